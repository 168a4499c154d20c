"""Every family against transformers: logits at each position, in chunks and token by token."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_driver import EngineDriver, Job
from support.families import (
    FAMILY_VARIANTS,
    WRAPPERS,
    read_config,
    write_family,
    write_wrapped,
)
from support.pairs import PAIR_VARIANTS

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.models.attention import AttentionInputs, HostLengths
from inflight_backend.models.backends import make_cache, make_ops
from inflight_backend.models.blocks.rope import make_tables
from inflight_backend.models.config import (
    AltUpConfig,
    AttentionConfig,
    DeltaConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
    RoutingConfig,
    make_cache_layout,
)
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.families.registry import FAMILIES, read_model
from inflight_backend.models.kv_cache import RecurrentStates
from inflight_backend.models.parallel.collectives import NO_COLLECTIVES, Collectives
from inflight_backend.models.parallel.shards import local_model, local_parameters
from inflight_backend.models.weights import Checkpoint

_BLOCK = 16
Change = Callable[[ModelConfig], ModelConfig]


@torch.inference_mode()
def logits_in_parts(
    folder: Path,
    tokens: torch.Tensor,
    backend: str,
    change: Change | None = None,
    dtype: torch.dtype = torch.float32,
    ranks: Collectives = NO_COLLECTIVES,
    read_as: Change | None = None,
) -> torch.Tensor:
    """Logits [T, vocab]: 13 tokens, then 20, then one at a time. ``change`` the model before it is
    made of its parameters, ``read_as`` before these are read. ``ranks``: those that run it; only
    the first stage has logits."""
    model = read_model(folder)
    model = model if read_as is None else read_as(model)
    with Checkpoint(folder) as checkpoint:
        model = checkpoint.fit(model)
        checkpoint.check(model)
        specs = local_parameters(model, ranks.place)
        parameters = checkpoint.load(specs, dtype, "cpu", backend=backend)
    model = model if change is None else change(model)
    model = local_model(model, ranks.place)
    decoder = Decoder(model, parameters, make_ops(backend, "none"), None, ranks, dtype)
    is_shared = ranks.place.pipeline_size > 1
    layout = make_cache_layout(model, model.max_position_embeddings, is_shared=is_shared)
    num_groups = len(layout.windows)
    block_tables = torch.arange(1, 1 + 4 * num_groups, dtype=torch.int32).view(num_groups, 1, 4)
    offsets = torch.arange(_BLOCK)
    pool, attention = make_cache(
        model,
        layout,
        make_tables(model, model.max_position_embeddings, "cpu"),
        4 * num_groups + 1,
        backend=backend,
        tokens_per_block=_BLOCK,
        kv_dtype=dtype,
        dtype=dtype,
        device="cpu",
        is_deterministic=False,
        states=RecurrentStates(model.deltas, 1, dtype, "cpu"),
    )
    for index, layer in enumerate(model.layers):  # block 0 is another text's
        for cache in pool.layer(index) if layer.attention.delta is None else ():
            cache[0] = torch.nan
    own_tables = block_tables.clone()
    found, start = [], 0
    for count in (13, 20, *[1] * (len(tokens) - 33)):
        end = start + count
        is_generation = count == 1
        for table, window in zip(block_tables, layout.windows, strict=True):
            if window is not None:  # what lies behind it was given back
                table[0, : max(start - window + 1, 0) // _BLOCK] = 0
        inputs = AttentionInputs(
            num_generations=int(is_generation),
            block_tables=block_tables,
            context_lengths=torch.tensor([end], dtype=torch.int32),
            query_starts=torch.tensor([1] if is_generation else [0, count], dtype=torch.int32),
            positions=torch.arange(start, end),
            slot_mapping=torch.stack(
                [table[:, None] * _BLOCK + offsets for table in own_tables[:, 0]]
            ).flatten(1)[:, start:end],
            slots=torch.tensor([0]),
            host=HostLengths(np.array([count]), np.array([end])),
        )
        step = attention.begin(inputs)
        hidden = decoder.receive(decoder.forward(tokens[start:end], inputs.positions, step, None))
        if ranks.place.is_first_stage:
            found.append(decoder.logits(hidden))
        start = end
    return torch.cat(found) if found else torch.empty(0)


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, *, is_recurrent: bool = False
) -> None:
    """Of a wrong option logits differ by 1e-2 and more, of another order of sums by 1e-5. Those of
    recurrences differ by up to 1e-3 where embeddings differ in their last bit."""
    bound = (1e-3 if is_recurrent else 2e-4) * max(1.0, float(expected.std()))
    assert float((found - expected).abs().max()) < bound


def test_every_family_is_compared() -> None:
    """By its ``model_type``: of one function there may be several architectures."""
    variants = (*FAMILY_VARIANTS.values(), *PAIR_VARIANTS.values())  # the latter in `test_pairs`
    compared = {model_type for model_type, _ in variants} | WRAPPERS.keys()
    same = {
        "kimi_k2": "deepseek_v3",
        "internlm3": "llama",
        "RefinedWeb": "falcon",
        "RefinedWebModel": "falcon",
        "gemma3n": "gemma3n_text",  # whose towers need a package for images
    }
    for family in FAMILIES.values():
        assert {same.get(each, each) for each in family.model_types} <= compared


@pytest.mark.fast(8)
@pytest.mark.parametrize("name", FAMILY_VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    tokens, expected = write_family(tmp_path, name)
    is_recurrent = name.startswith(("qwen3_next", "qwen3_5"))
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected, is_recurrent=is_recurrent)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(
            (name, {"hidden_act": "relu"})
            for name in (
                "mixtral", "qwen2_moe", "phimoe", "olmoe", "granitemoeshared", "glm4_moe", "llama4",
                "ernie4_5_moe", "hunyuan_moe", "minimax_m2", "gemma",
            )
        ),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}),
        ("biogpt", {"layer_norm_eps": 0.1}),
    ],
)  # fmt: skip
def test_options_that_few_files_have(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """As transformers honours them, or does not."""
    tokens, expected = write_family(tmp_path, name, **settings)
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected)


@pytest.mark.fast(8)
@pytest.mark.parametrize(
    "name",
    [
        "llama-bias",
        "qwen3",
        "gemma2",
        "bloom",
        "gpt_oss",
        "llama4",
        "hunyuan",
        "glm4_moe_lite",
        "gemma4-e2b",
        "falcon-rw",
        "qwen3_5",
    ],
)
def test_logits_of_the_compiled_ops(tmp_path: Path, name: str) -> None:
    """Generations of layers of every kind, on a CPU."""
    tokens, expected = write_family(tmp_path, name)
    found = logits_in_parts(tmp_path, tokens, "compiled")
    assert_close(found, expected, is_recurrent=name == "qwen3_5")


def attention(**changes: Any) -> Change:
    """These options of all layers' attention; a function gets the layer's."""

    def change(_: int, config: AttentionConfig) -> dict[str, Any]:
        return {key: each(config) if callable(each) else each for key, each in changes.items()}

    return lambda model: model.with_attention(change)


def routing(**changes: Any) -> Change:
    """These options of the routing to experts."""

    def change(_: int, layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.mlp, MoeConfig):
            return layer
        return replace(layer, mlp=replace(layer.mlp, routing=replace(layer.mlp.routing, **changes)))

    return lambda model: model.with_layers(change)


def whole(**changes: Any) -> Change:
    """These options of the model."""
    return lambda model: replace(model, **changes)


def parts(kind: type[MlpConfig | MoeConfig], **changes: Any) -> Change:
    """These options of all feed-forward layers of a kind."""

    def change(_: int, layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.mlp, kind):
            return layer
        return replace(layer, mlp=replace(layer.mlp, **changes))

    return lambda model: model.with_layers(change)


def rope(**changes: Any) -> Change:
    """These options of the rotary embeddings of all layers that have one."""
    return attention(rope=lambda each: each.rope and replace(each.rope, **changes))


UNDONE: list[tuple[str, Change]] = [
    ("gemma2", attention(softcap=None)),
    ("gemma2", attention(window=lambda each: each.window and each.window + 1)),
    ("gemma2", attention(scale=lambda each: each.head_dim**-0.5)),
    ("gemma2", whole(final_softcap=None)),
    ("gemma2", whole(embedding_scale=1.0)),
    ("gemma2", whole(norm=NormConfig(eps=1e-2, offset=1.0))),
    ("gemma3n", parts(MlpConfig, sparsity=0.0)),
    ("gemma3n", whole(altup=AltUpConfig(3, 0, True, 8))),
    ("gemma3n", whole(altup=AltUpConfig(3, 1, False, 8))),
    ("gemma4", attention(has_value_norm=False)),
    ("gemma4", rope(num_turning=8)),
    ("granite", whole(residual_scale=1.0)),
    ("granite", whole(logit_scale=1.0)),
    ("llama4", attention(chunk=None)),
    ("llama4", attention(temperature=None)),
    ("llama4", attention(qk_norm=None)),
    ("llama4", routing(scales_input=False)),
    ("ministral3", attention(temperature=None)),
    ("mpt", attention(clip=None)),
    ("olmo", attention(clip=None)),
    ("bloom", attention(slopes=())),
    ("hunyuan", attention(is_norm_after_rope=False)),
    ("smollm3", attention(rope=RopeConfig(16, 2e6))),
    ("llama-yarn", rope(attention_factor=1.0)),
    ("llama-llama3", rope(kind="default")),
    ("phi3-longrope", rope(divisors=())),
    ("gpt_oss", rope(is_truncated=True)),
    ("mixtral", routing(is_normalized=False)),
    ("deepseek_v3", routing(num_groups=1)),
    ("deepseek_v3", routing(group_score="max")),
    ("deepseek_v3", routing(scale=1.0)),
    ("deepseek_v2", routing(num_groups=1)),
    ("deepseek_v3", routing(num_chosen_groups=4)),
    ("gpt_oss", routing(score="softmax")),
    ("gpt_oss", parts(MoeConfig, activation="silu")),
    ("phimoe", routing(jitter=2.0)),
    ("mixtral", parts(MoeConfig, top_k=1)),
    ("nemotron", parts(MlpConfig, activation="relu")),
    ("olmo", whole(norm=NormConfig("rms", 1e-5, has_weight=False))),
    ("qwen3", attention(qk_norm_kind=NormConfig(eps=0.1))),
    ("qwen3_next", attention(delta=lambda each: each.delta and replace(each.delta, norm_eps=0.1))),
    ("llama", rope(theta=5e3)),
    ("llama-linear", rope(factor=1.0)),
    ("llama-llama3", rope(low_freq_factor=2.0)),
    ("llama-llama3", rope(high_freq_factor=2.0)),
    ("llama-yarn", rope(original_max_positions=64)),
    ("gpt_oss", rope(beta_fast=2.0)),
    ("llama-yarn", rope(beta_slow=0.1)),
    ("xglm", whole(position_offset=0)),
    ("xglm", whole(has_sinusoids=False)),
]

OF_TENSORS = {
    "NormConfig": {"offset", "has_weight", "has_bias"},
    "RopeConfig": {"dim", "is_interleaved", "is_backwards"},
    "AttentionConfig": {
        "num_heads", "num_kv_heads", "head_dim", "has_sinks", "has_qkv_bias", "has_output_bias",
        "is_value_key", "has_gate", "kv_source", "latent",
    },
    "DeltaConfig": {
        "num_key_heads", "num_value_heads", "key_dim", "value_dim", "conv_size", "is_joined",
    },
    "MlpConfig": {"size", "is_gated", "has_bias"},
    "RoutingConfig": {"has_correction", "has_input_norm", "has_expert_scales"},
    "MoeConfig": {
        "num_experts", "size", "has_bias", "has_router_bias", "shared", "has_shared_gate",
    },
    "AltUpConfig": {"num_streams", "laurel_rank"},
    "LayerConfig": {"experts_beside", "has_scalar"},
    "ModelConfig": {
        "vocab_size", "hidden_size", "is_tied", "block", "embedding_size", "layer_input_size",
        "layer_input_rows", "has_embedding_norm", "has_final_norm", "has_head_bias", "names",
    },
}  # fmt: skip
"""Options that say which tensors there are, of what shape, or how they are read: one that is undone
leaves some over, or lets them not fit, or shows in `test_tensors_read_in_another_way_show`."""

ELSEWHERE = {
    "RopeConfig": {"short_divisors"},  # `test_model_config`
    "RoutingConfig": {"norm_eps"},  # keeps a sum above 0
    "AttentionConfig": {"relative_bias", "is_cross"},  # `test_pairs`
    "LayerConfig": {"cross"},
    "MoeConfig": {"held_experts"},  # `test_parallel`
    "DeltaConfig": {"is_tiled"},  # `test_gguf`
    "ModelConfig": {
        "architecture", "max_position_embeddings", "dtype", "ignored", "quantization", "kv_scales",
        "encoder", "is_encoder", "start_ids", "table_dtype", "linear_dtype",
    },
}  # fmt: skip


def differing(old: Any, new: Any) -> set[tuple[str, str]]:
    """(class, field) of what is not the same in two configurations."""
    found = set()
    for name in (each.name for each in fields(old)):
        before, after = getattr(old, name), getattr(new, name)
        pairs = [*zip(before, after, strict=True)] if name == "layers" else [(before, after)]
        for one, other in pairs:
            if one == other:
                continue
            if is_dataclass(one) and type(one) is type(other):
                found |= differing(one, other)
            else:
                found.add((type(old).__name__, name))
    return found


@pytest.mark.slow
def test_every_option_is_undone_once() -> None:
    undone: dict[str, set[str]] = defaultdict(set)
    for name, change in UNDONE:
        old = read_config(name)
        for kind_name, field in differing(old, change(old)):
            undone[kind_name].add(field)
    kinds: tuple[Any, ...] = (
        NormConfig, RopeConfig, AttentionConfig, DeltaConfig, AltUpConfig, MlpConfig, RoutingConfig,
        MoeConfig, LayerConfig, ModelConfig,
    )  # fmt: skip
    for kind in kinds:
        name = kind.__name__
        known = undone[name] | OF_TENSORS.get(name, set()) | ELSEWHERE.get(name, set())
        inner = {"norm", "layers", "rope", "qk_norm_kind", "attention", "mlp", "routing", "delta"}
        missing = {each.name for each in fields(kind)} - known - inner - {"altup"}
        assert not missing, name


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", whole(norm=NormConfig(offset=0.0))),
        ("cohere", rope(is_interleaved=False)),
        ("phi", rope(dim=4)),
        ("nanochat", rope(is_backwards=False)),
        ("gpt_neox", lambda model: with_names(model, qkv_layout="rows")),
        ("falcon-40b", lambda model: with_names(model, qkv_layout="rows")),
        ("codegen", lambda model: with_names(model, qkv_layout="rows")),
    ],
)
@pytest.mark.fast(2)
def test_tensors_read_in_another_way_show(tmp_path: Path, name: str, change: Change) -> None:
    """What is undone before the tensors are read."""
    tokens, expected = write_family(tmp_path, name)
    found = logits_in_parts(tmp_path, tokens, "torch", read_as=change)
    assert float((found - expected).abs().max()) > 5e-3


def with_names(model: ModelConfig, **names: Any) -> ModelConfig:
    """``model`` with other names of tensors."""
    return replace(model, names=replace(model.names, **names))


@pytest.mark.fast(4)
@pytest.mark.parametrize(("name", "change"), UNDONE)
def test_an_option_that_is_undone_shows(tmp_path: Path, name: str, change: Change) -> None:
    """Else the comparison with transformers would not see whether it is honoured."""
    tokens, expected = write_family(tmp_path, name)
    found = logits_in_parts(tmp_path, tokens, "torch", change)
    assert float((found - expected).abs().max()) > 5e-3


def test_the_decoder_saved_without_its_head(tmp_path: Path) -> None:
    """As GPT-2 lies on the Hub: no prefix, and masks that are computed here."""
    tokens, expected = write_family(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    weights = {name.removeprefix("transformer."): each for name, each in load_file(file).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 256, 256).tril()
    file.unlink()
    save_file(weights, file)
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "name", ["nemotron", "gemma4-moe", "gpt_oss", "bloom", "deepseek_v3", "qwen3_next", "apertus"]
)
def test_bfloat16_is_near_float32(tmp_path: Path, name: str) -> None:
    """Parameters that stay in float32 among those that do not: norms, routers, sinks, slopes."""
    tokens, expected = write_family(tmp_path, name)
    found = logits_in_parts(tmp_path, tokens, "torch", dtype=torch.bfloat16)
    found, expected = (each.float().log_softmax(-1) for each in (found, expected))
    assert float((found - expected).abs().mean()) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_VARIANTS)
def test_files_of_16_bits_take_no_more_in_float32(tmp_path: Path, name: str) -> None:
    """Compiled linears widen them in registers, to the same numbers."""
    tokens, _ = write_family(tmp_path / "plain", name)
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    found, bits = [], []
    for kind in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(kind)
        shutil.copytree(tmp_path / "plain", folder)
        converted = {key: each.bfloat16().to(kind) for key, each in weights.items()}
        save_file(converted, folder / "model.safetensors")
        found.append(logits_in_parts(folder, tokens, "compiled"))
        bits.append(make_plan(folder, EngineConfig(attention_backend="compiled")).weight_bytes)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert bits[1] < 0.9 * bits[0]


@pytest.mark.fast(2)
@pytest.mark.parametrize("model_type", WRAPPERS)
def test_the_decoder_of_a_multimodal_model(tmp_path: Path, model_type: str) -> None:
    """As transformers 5 writes it, and with the prefix that files of other years have."""
    tokens, expected = write_wrapped(tmp_path, model_type)
    is_recurrent = model_type.startswith("qwen3_5")
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected, is_recurrent=is_recurrent)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    prefixes = ("language_model.model.", "model.language_model.")
    old, new = prefixes if any(prefixes[0] in name for name in weights) else prefixes[::-1]
    file.unlink()
    # Nothing says whether the head is the embedding: here there is one.
    config = json.loads((tmp_path / "config.json").read_text())
    for each in (config, config["text_config"]):
        each.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name.replace(old, new): tensor for name, tensor in weights.items()}, file)
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected, is_recurrent=is_recurrent)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "bloom",
        "gpt_oss",
        "llama4",
        "mixtral",
        "hunyuan",
        "cohere2",
        "glm4_moe",
        "gemma4-e2b",
        "qwen3_5",
        "glm4_moe_lite",
        "youtu",
    ],
)
def test_logits_of_the_kernels(tmp_path: Path, name: str) -> None:
    """Sinks, ALiBi, chunks, experts, norms after turning, heads of two sizes, and latents of up to
    256 numbers and more, interpreted."""
    tokens, expected = write_family(tmp_path, name)
    assert_close(logits_in_parts(tmp_path, tokens, "triton"), expected)


def test_gemma3n_inside_its_multimodal_model(tmp_path: Path) -> None:
    """Its towers are left out, and so are the tokens of images, which have no row of their own."""
    rows = 90
    tokens, _ = write_family(tmp_path, "gemma3n")
    tokens = torch.where(tokens < rows, tokens, 3)
    expected = logits_in_parts(tmp_path, tokens, "torch")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors = {f"model.language_model.{name.removeprefix('model.')}": tensors[name]
               for name in tensors}  # fmt: skip
    short = "model.language_model.embed_tokens_per_layer.weight"
    tensors[short] = tensors[short][:rows].contiguous()
    towers = {"model.vision_tower.x.weight": torch.ones(2), "model.embed_audio.y": torch.ones(2)}
    save_file(tensors | towers, path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vocab_size_per_layer_input"] = rows
    outer = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": config,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected)
    of_images = logits_in_parts(tmp_path, torch.full((40,), rows + 1), "torch")
    assert bool(of_images.isfinite().all())


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "mixtral",
        "deepseek_v3",
        "gpt2",
        "gpt_oss",
        "falcon-rw",
        "opt-350m",
        "gemma4-e2b",
        "qwen3_next",
        "gemma3n",
    ],
)
def test_tokens_of_a_mixed_batch_through_a_pause(tmp_path: Path, name: str) -> None:
    """Each token is the likeliest by transformers' logits of all before it."""
    from transformers import AutoModelForCausalLM

    write_family(tmp_path, name)
    driver = EngineDriver(
        Engine.load(tmp_path, EngineConfig(device="cpu", max_batch_size=4, tokens_per_block=8))
    )
    jobs = [Job([5, 6, 7]), Job(list(range(20, 60))), Job([90])]
    driver.generate(jobs, 6, chunk_size=7)
    driver.release(jobs[1])
    driver.generate(jobs, 10, chunk_size=9)
    attention = "sdpa" if name.startswith("falcon") else "eager"
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).float()
    for job in jobs:
        with torch.inference_mode():
            logits = oracle.eval()(torch.tensor([job.tokens])).logits[0, len(job.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(job.generated)[:, None])[:, 0]
        assert bool((logits.amax(1) - chosen < 1e-3).all())
