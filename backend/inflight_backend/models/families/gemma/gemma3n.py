"""Gemma 3n: several streams of hidden states, and gates that are mostly 0."""

from dataclasses import replace
from typing import Any

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
    AltUpConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
)
from inflight_backend.models.families.gemma.gemma import SANDWICH
from inflight_backend.models.families.gemma.gemma4 import with_shared_caches
from inflight_backend.models.families.llama import with_ropes_by_window
from inflight_backend.models.families.registry import (
    read_activation,
    read_plain,
    register_family,
    windows_by_type,
)


@register_family("Gemma3nForCausalLM", "gemma3n_text")
def gemma3n(reader: JsonReader) -> ModelConfig:
    """A token is several streams, a residual is learned, most gates of the first layers are 0; with
    inputs for each layer and last layers that read another's cache."""
    is_listed = reader.is_list("intermediate_size")
    sizes = reader.integers("intermediate_size") if is_listed else []
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    sparsity = _read_sparsity(reader, num_layers)
    if sizes and len(sizes) != num_layers:
        reader.fail("intermediate_size", f"has {len(sizes)} entries for {num_layers} layers")
    own = reader.with_values(intermediate_size=sizes[0]) if sizes else reader
    model = read_plain(
        own.with_defaults(rms_norm_eps=1e-6),
        names=SANDWICH,
        tied=True,
        activation=read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"),
        windows=windows_by_type(
            reader,
            reader.integer("sliding_window", default=512),
            lambda layer: "full_attention" if (layer + 1) % 5 == 0 else "sliding_attention",
        ),
        qk_norm="head",
        rope=False,
        needs_head_dim=True,
    )
    model = with_ropes_by_window(reader, model, local_theta="rope_local_base_freq")
    model = model.with_attention(lambda *_: {"scale": 1.0, "has_value_norm": True})

    def with_own_mlp(index: int, layer: LayerConfig) -> LayerConfig:
        size = sizes[index] if sizes else layer.mlp.size
        mlp = MlpConfig(size, layer.mlp.activation, sparsity=sparsity[index])
        return replace(layer, mlp=mlp)

    model = model.with_layers(with_own_mlp)
    altup = AltUpConfig(
        num_streams=reader.integer("altup_num_inputs", default=4, maximum=64),
        active=reader.integer("altup_active_idx", default=0, minimum=0, maximum=63),
        has_scale=reader.boolean("altup_correct_scale", default=True),
        laurel_rank=reader.integer("laurel_rank", default=64),
    )
    if altup.active >= altup.num_streams:
        reader.fail("altup_active_idx", f"must be below altup_num_inputs ({altup.num_streams})")
    model = replace(
        model,
        block="sandwich",
        embedding_scale=model.hidden_size**0.5,
        layer_input_size=reader.integer("hidden_size_per_layer_input", default=256),
        layer_input_rows=reader.integer("vocab_size_per_layer_input", default=262_144),
        final_softcap=reader.number("final_logit_softcapping", default=30.0),
        altup=altup,
    )
    return with_shared_caches(reader.with_defaults(num_kv_shared_layers=15), model)


def _read_sparsity(reader: JsonReader, num_layers: int) -> list[float]:
    """Of each layer; by default that of ten layers where there are more."""
    key = "activation_sparsity_pattern"
    found = reader.value(key)
    if found is None:
        num_sparse = 10 if num_layers > 10 else 0
        return [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    shares: list[Any] = found if isinstance(found, list) else [found] * num_layers
    is_valid = all(type(each) in (int, float) and 0 <= each < 1 for each in shares)
    if len(shares) != num_layers or not is_valid:
        reader.fail(key, f"must be {num_layers} numbers from 0 to below 1, one for each layer")
    return list(map(float, shares))
