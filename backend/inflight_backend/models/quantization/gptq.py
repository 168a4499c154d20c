"""``quantization_config`` of GPTQ, AWQ and AutoRound, whose tools share keys."""

from __future__ import annotations

from collections.abc import Callable

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.quantization.keys import (
    NOT_QUANTISED,
    check_keys,
    check_pattern,
    choose,
    choose_number,
    group_size,
)
from inflight_backend.models.quantization.schemes import Rule, Scheme

_OF_GPTQ = (
    "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "lm_head", "dynamic",
    "pack_dtype", "data_type",
)  # fmt: skip
_LEFT_BY_GPTQ = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "cache_examples_on_gpu", "damp_auto_increment", "damp_percent", "dataset", "disable_exllama",
    "exllama_config", "hyb_act", "is_marlin_format", "max_input_length", "meta", "method",
    "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "mse", "pad_token_id", "parallel_packing", "static_groups", "tokenizer",
    "true_sequential", "use_cuda_fp16", "use_exllama", "version",
)  # fmt: skip
"""About the way there, or which kernel to use."""


_LEFT_BY_AUTO_ROUND = (
    "act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym", "amp",
    "autoround_version", "batch_size", "block_name_to_quantize", "damp_percent", "dataset",
    "desc_act", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "gradient_accumulate_steps", "iters", "low_cpu_mem_usage", "low_gpu_mem_usage", "lr",
    "minmax_lr", "model_dtype", "nsamples", "provider", "quant_block_list", "regex_config",
    "scale_dtype", "seqlen", "static_attention_dtype", "static_attention_granularity",
    "static_kv_dtype", "static_kv_granularity", "super_bits", "super_group_size", "supported_types",
    "to_quant_block_names", "train_bs", "true_sequential",
)  # fmt: skip
"""The same by AutoRound, which writes the layouts of GPTQ and AWQ under their names, too."""


def read_gptq(reader: JsonReader) -> tuple[Rule, ...]:
    """Groups along the inputs, with zeros, in the order of ``desc_act``."""
    check_keys(
        reader, *dict.fromkeys((*NOT_QUANTISED, *_OF_GPTQ, *_LEFT_BY_GPTQ, *_LEFT_BY_AUTO_ROUND))
    )
    choose(reader, "pack_dtype", "int32", default="int32")
    choose(reader, "data_type", "int", default="int")
    key = reader.first_of("checkpoint_format", "format")
    version = choose(reader, key, "gptq", "gptq_v2", default="gptq")
    return _with_exceptions(reader, lambda each: _gptq_scheme(each, 0 if version[4:] else 1))


def _gptq_scheme(reader: JsonReader, zero_offset: int) -> Scheme:
    size = group_size(reader)
    return Scheme(
        "gptq",
        choose_number(reader, "bits", 4, 8),
        group_size=size,
        is_symmetric=reader.boolean("sym", default=True),
        has_order=reader.boolean("desc_act", default=False) and size is not None,
        zero_offset=zero_offset,
    )


_OF_AWQ = (
    "w_bit", "q_group_size", "zero_point", "version", "backend", "do_fuse", "fuse_max_seq_len",
    "modules_to_fuse", "exllama_config",
)  # fmt: skip


def read_awq(reader: JsonReader) -> tuple[Rule, ...]:
    """The gemm order; GPTQModel writes it with the keys of GPTQ."""
    known = (*NOT_QUANTISED, *_OF_GPTQ, *_OF_AWQ, *_LEFT_BY_GPTQ, *_LEFT_BY_AUTO_ROUND)
    check_keys(reader, *dict.fromkeys(known))
    choose(reader, "data_type", "int", default="int")
    reader = reader.with_names(
        bits=reader.first_of("bits", "w_bit"),
        group_size=reader.first_of("group_size", "q_group_size"),
    )
    for key in ("version", "format", "checkpoint_format"):
        if (version := reader.text(key, default="gemm")).lower() != "gemm":
            reader.fail(key, f"{version!r} is not supported; supported: gemm")
    return _with_exceptions(reader, _awq_scheme)


def _awq_scheme(reader: JsonReader) -> Scheme:
    choose_number(reader, "bits", 4)
    return Scheme("awq", 4, group_size(reader), is_symmetric=False)


def _with_exceptions(
    reader: JsonReader, read_scheme: Callable[[JsonReader], Scheme]
) -> tuple[Rule, ...]:
    """A rule for all, and those of ``dynamic``: patterns of names, and what differs there. Those
    behind "-:" are not quantised."""
    rules = [Rule(read_scheme(reader))]
    exceptions = reader.section("dynamic")
    for pattern in exceptions:
        check_pattern(reader, "dynamic", pattern.removeprefix("-:").removeprefix("+:"))
        if pattern.startswith("-:"):
            continue
        changes = exceptions.section(pattern)
        check_keys(changes, "bits", "group_size", "desc_act", "sym", *_LEFT_BY_GPTQ)
        changed = reader.with_values(**{key: changes.value(key) for key in changes})
        rules.append(Rule(read_scheme(changed), (f"re:{pattern.removeprefix('+:')}",)))
    return tuple(rules)


_OF_AUTO_ROUND = (
    "bits", "group_size", "sym", "data_type", "packing_format", "backend", "extra_config",
)  # fmt: skip
_PACKINGS = (
    "auto_round", "auto_gptq", "gptq", "gptqmodel", "auto_awq", "awq", "exllamav2", "tritonv2",
    "triton", "llm_compressor", "fp8_static", "fp8",
)  # fmt: skip


def read_auto_round(reader: JsonReader) -> tuple[Rule, ...]:
    """The tensors of GPTQ, AWQ or compressed-tensors, by ``packing_format``; ``extra_config`` says
    what differs, by names or patterns."""
    check_keys(reader, *NOT_QUANTISED, *_OF_AUTO_ROUND, *_LEFT_BY_AUTO_ROUND)
    key = reader.first_of("packing_format", "backend")
    packing = reader.text(key, default="auto_round:auto_gptq")
    for part in packing.split(":"):
        if part not in _PACKINGS:
            supported = ", ".join(_PACKINGS)
            reader.fail(key, f"{packing!r} is not supported; supported, joined by ':': {supported}")
    rules = [Rule(_auto_round_scheme(reader, packing))]
    exceptions = reader.section("extra_config")
    for name in exceptions:
        changes = exceptions.section(name)
        check_keys(changes, *_OF_AUTO_ROUND, *_LEFT_BY_AUTO_ROUND)
        if changes.integer("bits", default=4) < 16:
            changed = reader.with_values(**{key: changes.value(key) for key in changes})
            check_pattern(reader, "extra_config", name)
            targets = (name, f"re:{name}")
            rules.append(Rule(_auto_round_scheme(changed, packing), targets))
    return tuple(rules)


def _auto_round_scheme(reader: JsonReader, packing: str) -> Scheme:
    kind = choose(reader, "data_type", "int", "mx_fp", "nv_fp", "fp", default="int")
    if kind == "mx_fp":
        if choose_number(reader, "bits", 4, 8) == 8:
            return Scheme("float8", 8, group_size=choose_number(reader, "group_size", 32))
        return Scheme("mxfp4", 4, group_size=choose_number(reader, "group_size", 32))
    if kind == "nv_fp":
        choose_number(reader, "bits", 4)
        return Scheme("nvfp4", 4, group_size=choose_number(reader, "group_size", 16))
    if kind == "fp":
        return Scheme("float8", choose_number(reader, "bits", 8))
    if "awq" in packing:
        return _awq_scheme(reader)
    has_gptq = "gptq" in packing and "gptqmodel" not in packing
    return _gptq_scheme(reader.with_values(desc_act=False), 1 if has_gptq else 0)
