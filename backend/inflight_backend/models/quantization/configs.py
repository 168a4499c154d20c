"""Reads ``quantization_config`` of config.json; a key that is not known is an error.

What tools leave there about how they quantised is passed over by name, because a key that changes
what the numbers mean must not be.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.quantization.compressed_tensors import read_compressed_tensors
from inflight_backend.models.quantization.keys import check_keys
from inflight_backend.models.quantization.schemes import Quantization, Rule, Scheme

KEY = "quantization_config"


def read_quantization(reader: JsonReader) -> Quantization | None:
    """That of an open ``config.json``; None without one. `CheckpointError` names the key that is
    missing, unknown or unsupported, and what is supported."""
    if KEY not in reader:
        return None
    section = reader.section(KEY)
    method = section.text("quant_method")
    if method not in METHODS:
        section.fail(
            "quant_method", f"{method!r} is not supported; supported: {', '.join(METHODS)}"
        )
    return Quantization(method, METHODS[method](section))


_IGNORED_MODULES = ("quant_method", "modules_to_not_convert", "ignored_layers")


def _read_fbgemm_fp8(reader: JsonReader) -> tuple[Rule, ...]:
    """A scale per row. The bound ``activation_scale_ub`` is of activations in FP8, which are not
    used."""
    check_keys(reader, *_IGNORED_MODULES, "activation_scale_ub")
    return (Rule(Scheme("float8", 8)),)


def _read_fp8(reader: JsonReader) -> tuple[Rule, ...]:
    """A scale for each block of ``weight_block_size``; without it one for a tensor or row."""
    check_keys(
        reader,
        *_IGNORED_MODULES,
        "activation_scheme",
        "weight_block_size",
        "fmt",
        "scale_fmt",
        "is_checkpoint_fp8_serialized",
        "dequantize",
    )
    if (fmt := reader.text("fmt", default="e4m3")) != "e4m3":
        reader.fail("fmt", f"{fmt!r} is not supported; supported: e4m3")
    block = reader.integers("weight_block_size")
    if not block:
        return (Rule(Scheme("float8", 8)),)
    if len(block) != 2 or min(block) < 1:
        reader.fail("weight_block_size", f"must be two numbers above 0, not {block}")
    return (Rule(Scheme("float8", 8, group_size=block[1], block_rows=block[0])),)


METHODS: dict[str, Callable[[JsonReader], tuple[Rule, ...]]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
}
"""By ``quant_method``."""
