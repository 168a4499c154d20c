"""``quantization_config`` of compressed-tensors, the format that llmcompressor writes."""

from __future__ import annotations

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.quantization.keys import (
    check_keys,
    choose,
    choose_number,
    group_size,
)
from inflight_backend.models.quantization.schemes import Rule, Scheme

_FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized")
_OF_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_OF_NUMBERS = (
    "num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "block_structure",
    "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip


def read_compressed_tensors(reader: JsonReader) -> tuple[Rule, ...]:
    """A rule for each of ``config_groups``. Scales of the KV cache (``kv_cache_scheme``) are not
    used."""
    check_keys(
        reader,
        "quant_method",
        "config_groups",
        "format",
        "ignore",
        "kv_cache_scheme",
        "quantization_status",
        "global_compression_ratio",
        "version",
        "sparsity_config",
        "transform_config",
        "run_compressed",
    )
    choose(reader, "quantization_status", "compressed", default="compressed")
    for key in ("sparsity_config", "transform_config"):
        section = reader.section(key)
        if section.text("format", default="dense") != "dense" or "config_groups" in section:
            reader.fail(key, "is not supported: weights must be dense and as they were trained")
    groups = reader.section("config_groups")
    rules = tuple(_read_group(reader, groups.section(name)) for name in groups)
    if not rules:
        reader.fail("config_groups", "is missing")
    return rules


def _read_group(reader: JsonReader, group: JsonReader) -> Rule:
    check_keys(group, *_OF_GROUP)
    place = group if "format" in group else reader
    layout = choose(place, "format", *_FORMATS)
    weights = group.section("weights")
    check_keys(weights, *_OF_NUMBERS)
    kind = choose(weights, "type", "int", "float")
    if layout in ("float-quantized", "naive-quantized") and kind == "float":
        scheme = _read_float(weights)
    elif layout != "float-quantized" and kind == "int":
        scheme = _read_integers(weights, group.section("input_activations"), layout)
    else:
        weights.fail("type", f"{kind!r} does not go with format {layout}")
    return Rule(scheme, tuple(group.texts("targets")) or ("Linear",))


def _read_float(weights: JsonReader) -> Scheme:
    choose_number(weights, "num_bits", 8)
    if not weights.boolean("symmetric", default=True):
        weights.fail("symmetric", "false is not supported with type float")
    strategy = choose(weights, "strategy", "tensor", "channel", "block")
    if strategy != "block":
        return Scheme("float8", 8)
    block = weights.integers("block_structure")
    if len(block) != 2 or min(block) < 1:
        weights.fail("block_structure", f"must be two numbers above 0, not {block}")
    return Scheme("float8", 8, group_size=block[1], block_rows=block[0])


def _read_integers(weights: JsonReader, inputs: JsonReader, layout: str) -> Scheme:
    bits = choose_number(weights, "num_bits", *((4, 8) if layout == "pack-quantized" else (8,)))
    strategy = choose(weights, "strategy", "tensor", "channel", "group")
    size = group_size(weights) if strategy == "group" else None
    is_input_integer = any(inputs) and choose(inputs, "type", "int", "float") == "int"
    if is_input_integer:
        choose_number(inputs, "num_bits", 8)
    return Scheme(
        "packed" if layout == "pack-quantized" else "int8",
        bits,
        group_size=size,
        is_symmetric=weights.boolean("symmetric", default=True),
        has_order=weights.text("actorder", default="static") == "group",
        quantizes_input=is_input_integer and bits == 8 and size is None,
    )
