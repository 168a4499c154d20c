"""``quantization_config`` of compressed-tensors, the format that llmcompressor writes."""

from __future__ import annotations

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.quantization.keys import (
    check_keys,
    check_pattern,
    choose,
    choose_number,
    group_size,
)
from inflight_backend.models.quantization.schemes import Rule, Scheme

_FLOAT = ("float-quantized", "naive-quantized", "mxfp8-quantized")
_INTEGER = ("int-quantized", "naive-quantized", "pack-quantized")
_FP4 = ("mxfp4-pack-quantized", "nvfp4-pack-quantized")
_FORMATS = tuple(dict.fromkeys((*_FLOAT, *_INTEGER, *_FP4)))
_CLASSES = ("Linear", "Embedding")
_OF_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_OF_NUMBERS = (
    "num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "block_structure",
    "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip


def read_compressed_tensors(reader: JsonReader) -> tuple[Rule, ...]:
    """The rules of ``config_groups`` with weights: others are of attention alone. None where the KV
    cache alone is quantised.

    Where targets of several groups are for one linear names go before patterns, these before
    classes, each in the order of the alphabet; of groups with the same target the last counts."""
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
    # What was written in a status before the last has the tensors of that.
    choose(reader, "quantization_status", "compressed", "frozen", default="compressed")
    for key in ("sparsity_config", "transform_config"):
        section = reader.section(key)
        if section.text("format", default="dense") != "dense" or "config_groups" in section:
            reader.fail(key, "is not supported: weights must be dense and as they were trained")
    groups = reader.section("config_groups")
    if not any(groups) and not any(reader.section("kv_cache_scheme")):
        reader.fail("config_groups", "is missing")
    sections = (groups.section(name) for name in groups)
    rules = tuple(_read_group(reader, each) for each in sections if "weights" in each)
    if len(rules) < 2:
        return rules
    schemes = {target: rule.scheme for rule in rules for target in rule.targets}
    order = sorted(schemes, key=lambda each: (each in _CLASSES, each.startswith("re:"), each))
    return tuple(Rule(schemes[target], (target,)) for target in order)


def _read_group(reader: JsonReader, group: JsonReader) -> Rule:
    check_keys(group, *_OF_GROUP)
    place = group if "format" in group else reader
    layout = choose(place, "format", *_FORMATS)
    weights = group.section("weights")
    check_keys(weights, *_OF_NUMBERS)
    kind = choose(weights, "type", "int", "float")
    if layout in _FP4 and kind == "float":
        scheme = _read_fp4(weights, layout)
    elif layout in _FLOAT and kind == "float":
        scheme = _read_float(weights, group.section("input_activations"))
    elif layout in _INTEGER and kind == "int":
        scheme = _read_integers(weights, group.section("input_activations"), layout)
    else:
        weights.fail("type", f"{kind!r} does not go with format {layout}")
    targets = tuple(group.texts("targets")) or ("Linear",)
    for target in targets:
        if target.startswith("re:"):
            check_pattern(group, "targets", target.removeprefix("re:"))
    return Rule(scheme, targets)


def _read_float(weights: JsonReader, inputs: JsonReader) -> Scheme:
    choose_number(weights, "num_bits", 8)
    if not weights.boolean("symmetric", default=True):
        weights.fail("symmetric", "false is not supported with type float")
    strategy = choose(weights, "strategy", "tensor", "channel", "group", "block")
    if strategy == "group":
        return Scheme("float8", 8, group_size=weights.integer("group_size"))
    if strategy != "block":
        return Scheme("float8", 8, quantizes_input=any(inputs))
    block = _block_of(weights)
    if len(block) != 2 or min(block) < 1:
        weights.fail("block_structure", f"must be two numbers above 0, not {block}")
    return Scheme(
        "float8", 8, group_size=block[1], block_rows=block[0], quantizes_input=any(inputs)
    )


def _block_of(weights: JsonReader) -> list[int]:
    """[128, 128], or "128x128" as the first versions wrote it."""
    if isinstance(weights.value("block_structure"), str):
        sizes = weights.text("block_structure").split("x")
        return [int(each) for each in sizes if each.isascii() and each.isdigit()]
    return weights.integers("block_structure")


def _read_fp4(weights: JsonReader, layout: str) -> Scheme:
    """Activations are not quantised, whether they may be (``input_activations``) or not."""
    choose_number(weights, "num_bits", 4)
    if not weights.boolean("symmetric", default=True):
        weights.fail("symmetric", "false is not supported with type float")
    if layout == "nvfp4-pack-quantized":
        choose(weights, "strategy", "tensor_group", "group")
        return Scheme("nvfp4", 4, group_size=choose_number(weights, "group_size", 16))
    choose(weights, "strategy", "group")
    return Scheme("mxfp4", 4, group_size=choose_number(weights, "group_size", 32))


def _read_integers(weights: JsonReader, inputs: JsonReader, layout: str) -> Scheme:
    is_packed = layout == "pack-quantized"
    bits = choose_number(weights, "num_bits", 4, 8)
    strategy = choose(weights, "strategy", "tensor", "channel", "group")
    if strategy == "group" and "group_size" not in weights:
        weights.fail("group_size", "is missing")
    size = group_size(weights) if strategy == "group" else None
    is_input_integer = any(inputs) and choose(inputs, "type", "int", "float") == "int"
    if is_input_integer:
        choose_number(inputs, "num_bits", 8)
    return Scheme(
        "packed" if is_packed else "int8",
        bits if is_packed else 8,  # 4 bits take a byte each
        group_size=size,
        is_symmetric=weights.boolean("symmetric", default=True),
        has_order=_has_order(weights),
        quantizes_input=is_input_integer and bits == 8 and size is None,
    )


def _has_order(weights: JsonReader) -> bool:
    """Whether columns are in groups of their own: "weight" orders them while they are rounded, and
    leaves them where they are. Each has a second name, and true was the first's."""
    if isinstance(weights.value("actorder"), bool):
        return weights.boolean("actorder", default=False)
    order = choose(weights, "actorder", "group", "dynamic", "weight", "static", default="static")
    return order in ("group", "dynamic")
