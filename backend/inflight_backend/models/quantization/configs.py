"""Reads ``quantization_config`` of config.json; a key that is not known is an error.

What tools leave there about how they quantised is passed over by name, because a key that changes
what the numbers mean must not be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from inflight_backend.models.checkpoint_files import JsonReader, find_file
from inflight_backend.models.quantization.compressed_tensors import read_compressed_tensors
from inflight_backend.models.quantization.gptq import read_auto_round, read_awq, read_gptq
from inflight_backend.models.quantization.keys import (
    NOT_QUANTISED,
    check_keys,
    choose,
    choose_number,
    left_out,
)
from inflight_backend.models.quantization.schemes import (
    SEEN_IN_TENSORS,
    Quantization,
    Rule,
    Scheme,
)

KEY = "quantization_config"
_FIRST_KEY = "compression_config"
"""As the first compressed-tensors called it."""


def read_quantization(reader: JsonReader) -> Quantization | None:
    """That of an open ``config.json``; None without one. `CheckpointError` names the key that is
    missing, unknown or unsupported, and what is supported."""
    key = reader.first_of(KEY, _FIRST_KEY)
    return _read(reader.section(key), None) if key in reader else None


def read_beside(folder: Path) -> Quantization | None:
    """That of a file of its own, where older tools have it and ModelOpt does."""
    for name, method in _FILES.items():
        if (path := find_file(folder, name)) is not None:
            reader = JsonReader.from_file(path)
            return _read(reader.section("quantization") if method == "modelopt" else reader, method)
    return None


def _read(reader: JsonReader, default: str | None) -> Quantization:
    """``default``: the method of a file that does not name it."""
    told = default or next((each for key, each in _TELLING.items() if key in reader), None)
    if told is None and "quant_method" not in reader:
        reader.fail("quant_method", f"is missing; supported: {', '.join(METHODS)}")
    if told is None:
        method = reader.text("quant_method")
    else:
        method = reader.text("quant_method", default=told)
    if method not in METHODS:
        reader.fail("quant_method", f"{method!r} is not supported; supported: {', '.join(METHODS)}")
    rules = METHODS[method](reader)
    return Quantization(method, rules, kv_cache=_read_kv_cache(reader), left_out=left_out(reader))


def _read_kv_cache(reader: JsonReader) -> str | None:
    """By ``kv_cache_scheme``, or ModelOpt's ``kv_cache_quant_algo``; None for those that are not
    supported, since any cache can do without."""
    if algorithm := reader.text("kv_cache_quant_algo", default=""):
        return {"FP8": "fp8", "INT8": "int8"}.get(algorithm)
    if isinstance(reader.value("kv_cache_scheme"), str):  # as AutoFP8 says it
        return {"static": "fp8"}.get(reader.text("kv_cache_scheme"))
    scheme = reader.section("kv_cache_scheme")
    is_fitting = (
        any(scheme)
        and scheme.integer("num_bits") == 8
        and scheme.text("strategy", default="tensor") == "tensor"
        and scheme.boolean("symmetric", default=True)
        and not scheme.boolean("dynamic", default=False)
    )
    return {"float": "fp8", "int": "int8"}.get(scheme.text("type")) if is_fitting else None


_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""By names of files, the usual method."""
_TELLING = {
    "quant_algo": "modelopt",
    "config_groups": "compressed-tensors",
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
}
"""Keys that tell the method, for files without ``quant_method``; the first that is there does."""


def _read_fbgemm_fp8(reader: JsonReader) -> tuple[Rule, ...]:
    """A scale per row. The bound ``activation_scale_ub`` is of activations in FP8, which are not
    used."""
    check_keys(reader, *NOT_QUANTISED, "activation_scale_ub")
    return (Rule(Scheme("float8", 8, quantizes_input=True)),)


def _read_fp8(reader: JsonReader) -> tuple[Rule, ...]:
    """A scale for each block of ``weight_block_size``; without it one for a tensor or row."""
    check_keys(
        reader,
        *NOT_QUANTISED,
        "activation_scheme",
        "weight_block_size",
        "fmt",
        "scale_fmt",
        "is_checkpoint_fp8_serialized",
        "kv_cache_scheme",
        "dequantize",
        "modules_to_convert",
    )
    choose(reader, "activation_scheme", "dynamic", "static", default="dynamic")
    choose(reader, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    block = reader.integers("weight_block_size")
    if not block:
        return (Rule(Scheme("float8", 8, quantizes_input=True)),)
    if len(block) != 2 or min(block) < 1:
        reader.fail("weight_block_size", f"must be two numbers above 0, not {block}")
    scheme = Scheme("float8", 8, group_size=block[1], block_rows=block[0], quantizes_input=True)
    return (Rule(scheme),)


def _read_modelopt(reader: JsonReader) -> tuple[Rule, ...]:
    """What ``quant_algo`` says; with MIXED_PRECISION what ``quantized_layers`` say of each linear,
    whose tensors differ."""
    reader = _with_upper_case(reader)
    algorithm = choose(reader, "quant_algo", *_OF_MODELOPT, "MIXED_PRECISION")
    check_keys(
        reader,
        *NOT_QUANTISED,
        "quant_algo",
        "group_size",
        "has_zero_point",
        "pre_quant_scale",
        "quantized_layers",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "exclude_modules",
        "ignore",
        "config_groups",
        "producer",
    )
    if algorithm != "MIXED_PRECISION":
        return (Rule(_read_layer(reader)),)
    named: dict[Scheme, list[str]] = {}
    layers = reader.section("quantized_layers")
    for name in layers:
        layer = _with_upper_case(layers.section(name))
        named.setdefault(_read_layer(layer), []).append(name)
    return tuple(Rule(scheme, tuple(names)) for scheme, names in named.items())


_OF_MODELOPT = {
    "FP8": Scheme("float8", 8, quantizes_input=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("float8", 8, quantizes_input=True),
    "MXFP8": Scheme("float8", 8, group_size=32),
    "FP8_PB_WO": Scheme("float8", 8, group_size=128, block_rows=128),
    "W8A16": Scheme("int8", 8),
    "W8A8_SQ_PER_CHANNEL": Scheme("int8", 8, quantizes_input=True),
    **dict.fromkeys(
        ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "NVFP4_AWQ"),
        Scheme("modelopt-nvfp4", 4, group_size=16),
    ),
    **dict.fromkeys(("W4A16_AWQ", "W4A8_AWQ"), Scheme("modelopt-int4", 4, group_size=128)),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), Scheme("modelopt-mxfp4", 4, group_size=32)),
}
"""Sizes of groups are the usual ones: others are seen in the tensors."""


def _with_upper_case(reader: JsonReader) -> JsonReader:
    """ModelOpt writes some of its algorithms in small letters."""
    if "quant_algo" not in reader:
        return reader
    return reader.with_values(quant_algo=reader.text("quant_algo").upper())


def _read_layer(reader: JsonReader) -> Scheme:
    scheme = _OF_MODELOPT[choose(reader, "quant_algo", *_OF_MODELOPT)]
    if reader.boolean("has_zero_point", default=False):
        reader.fail("has_zero_point", "true is not supported")
    if scheme.layout not in SEEN_IN_TENSORS and "group_size" in reader:
        choose_number(reader, "group_size", scheme.group_size or 0)
    return scheme


def _read_mxfp4(reader: JsonReader) -> tuple[Rule, ...]:
    """The experts of gpt-oss as published."""
    check_keys(reader, *NOT_QUANTISED, "dequantize")
    return (Rule(Scheme("mxfp4-blocks", 4, group_size=32)),)


_OF_BITSANDBYTES = (
    "quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit",
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules", "llm_int8_threshold",
)  # fmt: skip


def _read_bitsandbytes(reader: JsonReader) -> tuple[Rule, ...]:
    """Tables, blocks and whether scales are quantised are seen in the tensors. Activations of 8-bit
    linears are not rounded, so none of them is an outlier (``llm_int8_threshold``)."""
    check_keys(reader, *_OF_BITSANDBYTES)
    if reader.boolean("load_in_4bit", default=False):
        choose(reader, "bnb_4bit_quant_type", "nf4", "fp4", default="fp4")
        return (Rule(Scheme("bnb4", 4, group_size=64)),)
    if not reader.boolean("load_in_8bit", default=False):
        reader.fail("load_in_4bit", "or load_in_8bit must be true")
    return (Rule(Scheme("bnb8", 8)),)


METHODS: dict[str, Callable[[JsonReader], tuple[Rule, ...]]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
    "modelopt": _read_modelopt,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "mxfp4": _read_mxfp4,
    "bitsandbytes": _read_bitsandbytes,
}
"""By ``quant_method``."""
