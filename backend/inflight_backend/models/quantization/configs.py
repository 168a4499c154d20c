"""Reads ``quantization_config`` of config.json; a key that is not known is an error.

What tools leave there about how they quantised is passed over by name, because a key that changes
what the numbers mean must not be.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.quantization.compressed_tensors import read_compressed_tensors
from inflight_backend.models.quantization.keys import (
    check_keys,
    choose,
    choose_number,
    group_size,
)
from inflight_backend.models.quantization.schemes import Quantization, Rule, Scheme

KEY = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"


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
        "kv_cache_scheme",
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


_OF_AWQ = (
    "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "backend", "do_fuse",
    "fuse_max_seq_len", "modules_to_fuse", "exllama_config",
)  # fmt: skip


def _read_awq(reader: JsonReader) -> tuple[Rule, ...]:
    check_keys(reader, *_IGNORED_MODULES, *_OF_AWQ)
    reader = reader.with_names(
        bits=reader.first_of("bits", "w_bit"),
        group_size=reader.first_of("group_size", "q_group_size"),
    )
    choose_number(reader, "bits", 4)
    version = reader.text("version", default="gemm")
    if version.lower() != "gemm":
        reader.fail("version", f"{version!r} is not supported; supported: gemm")
    return (Rule(Scheme("awq", 4, group_size(reader), is_symmetric=False)),)


_OF_GPTQ = (
    "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "lm_head", "dynamic",
    "pack_dtype",
)  # fmt: skip
_LEFT_BY_GPTQ = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "cache_examples_on_gpu", "damp_auto_increment", "damp_percent", "dataset", "disable_exllama",
    "exllama_config", "hyb_act", "is_marlin_format", "max_input_length", "meta",
    "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "mse", "pad_token_id", "parallel_packing", "static_groups", "tokenizer",
    "true_sequential", "use_cuda_fp16", "use_exllama", "version",
)  # fmt: skip
"""About the way there, or which kernel to use."""


def _read_gptq(reader: JsonReader) -> tuple[Rule, ...]:
    check_keys(reader, *_IGNORED_MODULES, *_OF_GPTQ, *_LEFT_BY_GPTQ)
    if any(reader.section("dynamic")):
        reader.fail("dynamic", "is not supported: bits and groups of all linears must be the same")
    choose(reader, "pack_dtype", "int32", default="int32")
    key = reader.first_of("checkpoint_format", "format")
    version = choose(reader, key, "gptq", "gptq_v2", default="gptq")
    size = group_size(reader)
    scheme = Scheme(
        "gptq",
        choose_number(reader, "bits", 4, 8),
        group_size=size,
        is_symmetric=reader.boolean("sym", default=True),
        has_order=reader.boolean("desc_act", default=False) and size is not None,
        zero_offset=0 if version == "gptq_v2" else 1,
    )
    return (Rule(scheme),)


def read_modelopt(reader: JsonReader) -> Quantization:
    """Of the file that ModelOpt writes instead (`MODELOPT_FILE`)."""
    section = reader.section("quantization")
    return Quantization("modelopt", _read_modelopt(section))


def _read_modelopt(reader: JsonReader) -> tuple[Rule, ...]:
    """A scale for a tensor, or for each row."""
    check_keys(
        reader,
        *_IGNORED_MODULES,
        "quant_algo",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "exclude_modules",
        "ignore",
        "config_groups",
        "producer",
    )
    choose(reader, "quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    return (Rule(Scheme("float8", 8)),)


METHODS: dict[str, Callable[[JsonReader], tuple[Rule, ...]]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
    "modelopt": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
}
"""By ``quant_method``."""
