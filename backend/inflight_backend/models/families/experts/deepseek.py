"""DeepSeek V2 to V3 and Kimi K2, Mistral 4, and MiniCPM3: multi-head latent attention."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
    AttentionConfig,
    LatentConfig,
    ModelConfig,
    RopeConfig,
    RoutingConfig,
)
from inflight_backend.models.families.experts.grouped_experts import (
    deepseek_experts,
    deepseek_routing,
    dense_layers,
    layers_behind,
)
from inflight_backend.models.families.experts.plain_experts import with_moe
from inflight_backend.models.families.mistral import with_temperature
from inflight_backend.models.families.registry import read_plain, register_family
from inflight_backend.models.families.rope import read_rope, rope_section, yarn_scale


def _with_latents(reader: JsonReader, model: ModelConfig, *, is_interleaved: bool) -> ModelConfig:
    latent = LatentConfig(
        kv_rank=reader.integer("kv_lora_rank"),
        nope=reader.integer("qk_nope_head_dim"),
        rope=reader.integer("qk_rope_head_dim"),
        value=reader.integer("v_head_dim"),
        query_rank=reader.integer("q_lora_rank") if "q_lora_rank" in reader else None,
    )
    rope = read_rope(reader, latent.rope, is_interleaved=is_interleaved, dim=latent.rope)
    scale = (latent.nope + latent.rope) ** -0.5 * _sharpened(reader, rope)

    def change(_: int, attention: AttentionConfig) -> dict[str, object]:
        head_dim = latent.kv_rank + latent.rope
        kinds = {"num_kv_heads": 1, "head_dim": head_dim}
        return {**kinds, "latent": latent, "rope": rope, "scale": scale}

    return model.with_attention(change)


def _sharpened(reader: JsonReader, rope: RopeConfig) -> float:
    """YaRN's ``mscale_all_dim`` sharpens scores, for queries and keys."""
    section = rope_section(reader)
    if rope.kind == "yarn" and "mscale_all_dim" in section:
        return yarn_scale(rope.factor, section.number("mscale_all_dim")) ** 2
    return 1.0


def _read(
    reader: JsonReader, routing: RoutingConfig, *, first_dense: int = 0, tied: bool = False
) -> ModelConfig:
    """``first_dense``: layers without experts, where the file does not say."""
    plain = reader.with_values(head_dim=reader.integer("qk_rope_head_dim"))
    model = read_plain(plain, rope=False, tied=tied)
    is_interleaved = reader.boolean("rope_interleave", default=True)
    model = _with_latents(reader, model, is_interleaved=is_interleaved)
    if "n_routed_experts" not in reader:
        return model
    moe = deepseek_experts(reader, routing)
    model = with_moe(model, moe, dense_layers(reader, first_dense))
    return replace(model, ignored=layers_behind(model))


@register_family("DeepseekV2ForCausalLM", "deepseek_v2")
def deepseek_v2(reader: JsonReader) -> ModelConfig:
    """Experts by softmax, of the best groups where ``topk_method`` says so."""
    is_grouped = reader.text("topk_method", default="greedy") == "group_limited_greedy"
    routing = RoutingConfig(
        is_normalized=False,
        num_groups=reader.integer("n_group", default=1) if is_grouped else 1,
        num_chosen_groups=reader.integer("topk_group", default=1) if is_grouped else 1,
        scale=reader.number("routed_scaling_factor", default=1.0),
    )
    return _read(reader, routing)


@register_family("DeepseekV3ForCausalLM", "deepseek_v3", "kimi_k2")
def deepseek_v3(reader: JsonReader) -> ModelConfig:
    """Experts by sigmoid with a correction."""
    return _read(reader, deepseek_routing(reader))


@register_family("Glm4MoeLiteForCausalLM", "glm4_moe_lite")
def glm4_moe_lite(reader: JsonReader) -> ModelConfig:
    """GLM-4.7-Flash: DeepSeek V3 whose first layer alone has no experts."""
    return _read(reader, deepseek_routing(reader), first_dense=1)


@register_family("Mistral4ForCausalLM", "mistral4")
def mistral4(reader: JsonReader) -> ModelConfig:
    """Experts by softmax with DeepSeek V3's groups; queries grow as Ministral 3's."""
    routing = replace(deepseek_routing(reader), score="softmax", has_correction=False)
    return with_temperature(reader, _read(reader, routing))


@register_family("YoutuForCausalLM", "youtu")
def youtu(reader: JsonReader) -> ModelConfig:
    """DeepSeek V3 without experts."""
    # Only attention has biases, whatever the file says.
    return _read(reader.with_values(mlp_bias=False), RoutingConfig(), tied=True)


@register_family("MiniCPM3ForCausalLM", "minicpm3", scale_depth=1.4)
def minicpm3(reader: JsonReader) -> ModelConfig:
    """Latent attention in a dense model with multipliers."""
    plain = reader.with_values(head_dim=reader.integer("qk_rope_head_dim"))
    model = _with_latents(reader, read_plain(plain, rope=False, tied=True), is_interleaved=False)
    base = reader.number("dim_model_base", default=float(model.hidden_size))
    return replace(
        model,
        embedding_scale=reader.number("scale_emb", default=1.0),
        residual_scale=reader.number("scale_depth", default=1.0) / model.num_layers**0.5,
        logit_scale=base / model.hidden_size,
    )
