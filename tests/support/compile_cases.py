"""What models launch, as calls that need shapes only: the 8B all of it, others what differs there.

As a script it compiles every case and writes the reports as JSON, beside the counts of `key_cases`,
or with ``--only`` a few of them alone; `test_compile.py` runs it in a process of its own, where
Triton does not interpret.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from support.compile_recorder import record
from support.key_cases import count_kernels

from inflight_kernels.ops.attention.copy_blocks import copy_blocks
from inflight_kernels.ops.attention.delta_step import delta_step
from inflight_kernels.ops.attention.paged_attention_context import paged_attention_context
from inflight_kernels.ops.attention.paged_attention_generation import paged_attention_generation
from inflight_kernels.ops.attention.rope_write_kv import rope_write_kv
from inflight_kernels.ops.linear.add_lora import add_lora, column_tiles, group_rows
from inflight_kernels.ops.linear.grouped_linear import grouped_linear
from inflight_kernels.ops.linear.head_linear import head_linear
from inflight_kernels.ops.linear.invariant_linear import invariant_linear
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from inflight_kernels.ops.linear.quantize_int8 import quantize_int8
from inflight_kernels.ops.linear.quantized_linear import prepare, quantized_linear
from inflight_kernels.ops.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from inflight_kernels.ops.sampling.adjust_logits import adjust_logits
from inflight_kernels.ops.sampling.ban_tokens import ban_repeated_ngrams, ban_words
from inflight_kernels.ops.sampling.mask_logits import mask_logits
from inflight_kernels.ops.sampling.sample import sample
from inflight_kernels.ops.silu_mul import silu_mul, silu_mul_fp8

_BATCH = 32
_BF16 = torch.bfloat16
_FP8 = torch.float8_e4m3fn  # Triton converts it from sm_89 on
_BYTES = (_FP8, torch.int8)
_CACHES = (_BF16, *_BYTES, torch.float32)
_BOTH = (80, 90)
_ADA = (89,)  # the first that converts FP8
_HOPPER = (90,)
_SMALL = (120,)  # 99 KiB of shared memory for a program


@dataclass(frozen=True)
class Shape:
    """The part of a model's shape that kernels see."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int = 0
    intermediate: int = 0
    vocabulary: int = 0


LLAMA_8B = Shape("8B", 32, 8, 128, 4096, 14336, 128256)
LLAMA_13B = Shape("13B", 40, 40, 128, 5120, 13824, 32000)
HEAD_64 = Shape("head 64", 32, 8, 64)
HEAD_80 = Shape("head 80", 32, 32, 80)
HEAD_96 = Shape("head 96", 32, 8, 96)
HEAD_256 = Shape("head 256", 16, 8, 256)
GROUP_8 = Shape("head 256 group of 8", 8, 1, 256)
HEAD_512 = Shape("head 512", 8, 2, 512)  # full layers of Gemma 4
LATENTS = Shape("latents", 128, 1, 576)  # DeepSeek V3
GROUP_5 = Shape("group of 5", 40, 8, 128)
# The models that tests and the checks on the device make.
HEAD_16 = Shape("head 16", 8, 2, 16)
HEAD_32 = Shape("head 32", 4, 2, 32)


@dataclass(frozen=True)
class Case:
    """One launch of an op, and the capabilities it is compiled for."""

    op: str
    label: str
    capabilities: tuple[int, ...]
    call: Callable[[], object]


def _int32(*sizes: int) -> torch.Tensor:
    return torch.empty(*sizes, dtype=torch.int32)


def _int64(*sizes: int) -> torch.Tensor:
    return torch.empty(*sizes, dtype=torch.int64)


def _cache(shape: Shape, block: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(4, block, shape.num_kv_heads, shape.head_dim, dtype=dtype)


def _attend(op: str, shape: Shape, block: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    cache = _cache(shape, block, dtype)
    values = None if shape == LATENTS else cache
    query_dtype = _BF16 if dtype in _BYTES else dtype
    tables, lengths = _int32(_BATCH, 8192 // block), _int32(_BATCH)
    num_tokens = _BATCH if op == "paged_attention_generation" else 1024
    query = torch.empty(num_tokens, shape.num_heads, shape.head_dim, dtype=query_dtype)
    per_head = {name: torch.empty(shape.num_heads) for name, has in options.items() if has is True}
    options = options | per_head
    if op == "paged_attention_generation":
        paged_attention_generation(query, cache, values, tables, lengths, 0.1, **options)
    else:
        starts = _int32(_BATCH + 1)
        paged_attention_context(query, cache, values, tables, starts, lengths, 0.1, **options)


def attention_cases() -> Iterator[Case]:
    """Both attention ops over the shapes, block sizes and dtypes in use, where the code differs:
    float16 is multiplied as bfloat16, and a group of 1 is a group of 4 with less to compute. The
    generation op reads an FP8 cache in a way of its own, so it has more of those."""
    table: list[tuple[Shape, int, torch.dtype, tuple[int, ...], dict[str, Any]]] = [
        (LLAMA_8B, 64, _BF16, _BOTH, {}),
        (LLAMA_8B, 32, _BF16, (*_BOTH, *_SMALL), {}),  # the default
        (LLAMA_8B, 16, _BF16, _HOPPER, {}),
        (LLAMA_8B, 64, _FP8, _HOPPER, {}),
        (LLAMA_8B, 32, _FP8, _HOPPER, {}),
        (LLAMA_8B, 32, torch.int8, _BOTH, {}),
        (LLAMA_8B, 64, torch.float32, _HOPPER, {}),
        (LLAMA_8B, 64, _BF16, _HOPPER, {"sliding_window": 4096, "softcap": 50.0}),
        (LLAMA_8B, 64, _BF16, _BOTH, {"chunk": 8192, "sinks": True, "slopes": True}),
        (HEAD_64, 32, _BF16, _HOPPER, {}),
        (HEAD_80, 64, _BF16, _HOPPER, {}),
        (HEAD_256, 64, _BF16, (*_BOTH, *_SMALL), {}),
        (HEAD_512, 32, _BF16, _BOTH, {}),
        (LATENTS, 32, _BF16, _BOTH, {}),
        (LATENTS, 32, torch.float32, _HOPPER, {}),
        (GROUP_5, 64, _BF16, _HOPPER, {}),
        *((shape, 16, dtype, _HOPPER, {}) for shape in (HEAD_16, HEAD_32) for dtype in _CACHES),
    ]
    words: list[tuple[Shape, int, torch.dtype, tuple[int, ...], dict[str, Any]]] = [
        (LLAMA_13B, 64, _FP8, _HOPPER, {}),
        (LLAMA_8B, 64, _FP8, _HOPPER, {"sliding_window": 4096, "softcap": 50.0}),
        (HEAD_80, 64, _FP8, _HOPPER, {}),
        (HEAD_256, 64, _FP8, (*_HOPPER, *_SMALL), {}),
        (HEAD_80, 64, torch.int8, (80,), {}),
        (HEAD_80, 16, _FP8, _ADA, {}),
        (HEAD_96, 64, _FP8, _ADA, {}),
    ]
    # Within five of the 255 registers that a thread may have.
    tight: list[tuple[Shape, int, torch.dtype, tuple[int, ...], dict[str, Any]]] = [
        (HEAD_256, 64, _FP8, (*_HOPPER, *_SMALL), {}),
        (HEAD_256, 64, torch.int8, _HOPPER, {}),
        (HEAD_256, 32, _FP8, _HOPPER, {"sliding_window": 4096, "softcap": 50.0}),
        (GROUP_8, 32, _FP8, _HOPPER, {}),
    ]
    for op, more in (("paged_attention_generation", words), ("paged_attention_context", tight)):
        for shape, block, dtype, capabilities, options in (*table, *more):
            extra = "".join(f" {name}={value}" for name, value in options.items())
            label = f"{shape.name} {str(dtype).removeprefix('torch.')} blocks of {block}{extra}"
            yield Case(op, label, capabilities, partial(_attend, op, shape, block, dtype, options))
    for shape, length in ((LLAMA_8B, 4), (LLAMA_8B, 16), (HEAD_512, 4)):
        options = {"max_query_len": length}
        op, label = "paged_attention_context", f"{shape.name} bfloat16 max_query_len={length}"
        yield Case(op, label, _HOPPER, partial(_attend, op, shape, 64, _BF16, options))


def _rope(shape: Shape, cache_dtype: torch.dtype, has_norm: bool) -> None:
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    fused = torch.empty(64, heads + 2 * kv_heads, dim, dtype=_BF16)
    query, key, value = fused.tensor_split((heads, heads + kv_heads), dim=1)
    cache = _cache(shape, 64, cache_dtype)
    values, value_cache = (None, None) if shape == LATENTS else (value, cache)
    weight = torch.empty(dim, dtype=_BF16) if has_norm else None
    table = torch.empty(1024, dim)
    rope_write_kv(
        query, key, values, table, _int64(64), cache, value_cache, _int64(64), weight, weight
    )


def _copy(shape: Shape) -> None:
    cache = _cache(shape, 64, _BF16)[None]
    copy_blocks(cache, cache, _int32(2), _int32(2))


def _delta(num_heads: int, size: int) -> None:
    few = torch.empty(_BATCH, num_heads // 2, size, dtype=_BF16)
    value, gates = few.repeat(1, 2, 1), torch.empty(_BATCH, num_heads)
    states = torch.empty(4, num_heads, size, size)
    delta_step(few, few, value, gates, gates, states, _int64(_BATCH), 1e-6)


def _linear(shape: Shape, dtype: torch.dtype, num_tokens: int) -> None:
    x = torch.empty(num_tokens, shape.intermediate, dtype=dtype)
    weight = torch.empty(shape.hidden, shape.intermediate, dtype=dtype)
    if dtype != _FP8:
        invariant_linear(x, weight)
        return
    scales, weight_scales = torch.empty(num_tokens, 1), torch.empty(shape.hidden, 1)
    invariant_linear(x, weight, x_scales=scales, weight_scales=weight_scales)


def _experts(num_tokens: int, dtype: torch.dtype) -> None:
    """Of Qwen3-30B-A3B: gate and up of 128 experts."""
    weight = torch.empty(128, 1536, 2048, dtype=dtype)
    grouped_linear(torch.empty(num_tokens, 2048, dtype=dtype), weight, _int32(129))


@dataclass(frozen=True)
class Quantized:
    """A weight of few bits: columns that share a scale (None: all), whether it has zeros and orders
    of its columns, and whether x is of its type, too."""

    values: torch.dtype
    group_size: int | None = None
    has_zeros: bool = False
    has_order: bool = False
    has_codebook: bool = False
    is_plain: bool = False


_QUANTIZED = {
    "4 bits, groups of 128": Quantized(torch.uint8, 128),
    "4 bits, groups of 128 with zeros": Quantized(torch.uint8, 128, has_zeros=True),
    "4 bits, groups of 32 in order": Quantized(torch.uint8, 32, has_order=True),
    "4 bits, groups of 32 of a codebook": Quantized(torch.uint8, 32, has_codebook=True),
    "4 bits, rows": Quantized(torch.uint8),
    "8 bits, rows": Quantized(torch.int8),
    "8 bits, groups of 32": Quantized(torch.int8, 32),
    "8 bits, groups of 40": Quantized(torch.int8, 40),
    "FP8, rows": Quantized(_FP8),
    "FP8, groups of 128": Quantized(_FP8, 128),
    "8 bits, both": Quantized(torch.int8, is_plain=True),
}
_QUANTIZED_FP8 = {
    "FP8, rows, both": Quantized(_FP8, is_plain=True),
    "FP8, groups of 128, both": Quantized(_FP8, 128, is_plain=True),
}


def _quantized_linear(
    kind: Quantized, num_tokens: int, num_experts: int = 0, dtype: torch.dtype = _BF16
) -> None:
    rows, columns = (1536, 2048) if num_experts else (LLAMA_8B.hidden, LLAMA_8B.hidden)
    all_rows, width = rows * max(num_experts, 1), columns
    values = torch.empty(
        all_rows, width // 2 if kind.values == torch.uint8 else width, dtype=kind.values
    )
    groups = 1 if kind.group_size is None else -(-columns // kind.group_size)
    scales = torch.empty(all_rows, groups, dtype=torch.float32 if kind.values == _FP8 else _BF16)
    weight = prepare(
        values,
        scales,
        torch.zeros_like(scales) if kind.has_zeros else None,
        group_size=kind.group_size or columns,
        order=_int32(max(num_experts, 1), columns) if kind.has_order else None,
        codebook=torch.empty(16) if kind.has_codebook else None,
        is_plain=kind.is_plain,
    )
    starts = _int32(num_experts + 1) if num_experts else None
    x = torch.empty(num_tokens, columns, dtype=kind.values if kind.is_plain else dtype)
    x_scales = torch.empty(num_tokens, groups) if kind.is_plain else None
    quantized_linear(x, weight, x_scales=x_scales, starts=starts)


def _quantized_cases() -> Iterator[Case]:
    op = "quantized_linear"
    for kinds, capabilities in ((_QUANTIZED, _BOTH), (_QUANTIZED_FP8, _HOPPER)):
        for name, kind in kinds.items():
            for num_tokens in (1, 64, 256, 1024):  # each has a tile of its own, or splits
                run = partial(_quantized_linear, kind, num_tokens)
                yield Case(op, f"{name}, {num_tokens} tokens", capabilities, run)
    for name in ("4 bits, groups of 128", "8 bits, both", "FP8, groups of 128, both"):
        kind = {**_QUANTIZED, **_QUANTIZED_FP8}[name]
        capabilities = _HOPPER if name in _QUANTIZED_FP8 else _BOTH
        run = partial(_quantized_linear, kind, 16, 1)  # the one of its form: columns are split
        yield Case(op, f"{name}, 1 expert, 16 rows", capabilities, run)
        for num_tokens in (64, 8192):
            run = partial(_quantized_linear, kind, num_tokens, 128)
            yield Case(op, f"{name}, 128 experts, {num_tokens} rows", capabilities, run)
    for name in ("4 bits, groups of 128", "8 bits, rows", "FP8, rows"):
        for dtype in (torch.float16, torch.float32):
            for num_tokens in (1, 64):
                run = partial(_quantized_linear, _QUANTIZED[name], num_tokens, dtype=dtype)
                yield Case(op, f"{name}, {dtype}, {num_tokens} tokens", _HOPPER, run)


def _head_linear(kind: Quantized, num_tokens: int, *, by_rows: bool, dtype: torch.dtype) -> None:
    """Queries to latents, or latents to values, of DeepSeek V3."""
    heads, size, columns = LATENTS.num_heads, 128, 512
    width = columns // 2 if kind.values == torch.uint8 else columns
    group_size = kind.group_size or columns
    scales = torch.empty(
        2 * heads * size,
        -(-columns // group_size),
        dtype=torch.float32 if kind.values == _FP8 else _BF16,
    )
    x = torch.empty(num_tokens, heads, size + 64 if by_rows else columns, dtype=dtype)
    head_linear(
        x[..., :size] if by_rows else x,
        torch.empty(2 * heads * size, width, dtype=kind.values),
        scales,
        torch.empty_like(scales) if kind.has_zeros else None,
        group_size=group_size,
        by_rows=by_rows,
        first_row=0 if by_rows else size,
        num_rows=size,
        order=_int32(columns) if kind.has_order else None,
        codebook=torch.empty(16) if kind.has_codebook else None,
    )


def _head_cases() -> Iterator[Case]:
    names = (
        "4 bits, groups of 128 with zeros", "4 bits, groups of 32 in order",
        "4 bits, groups of 32 of a codebook", "8 bits, groups of 32",
        "FP8, groups of 128",
    )  # fmt: skip
    for name in names:
        for by_rows, num_tokens in product((True, False), (16, 1024)):
            label = f"{name}, by {'rows' if by_rows else 'columns'}, {num_tokens} tokens"
            call = partial(_head_linear, _QUANTIZED[name], num_tokens, by_rows=by_rows)
            yield Case("head_linear", label, _BOTH, partial(call, dtype=_BF16))
            if name == "FP8, groups of 128":
                run = partial(call, dtype=torch.float32)
                yield Case("head_linear", f"{label}, float32", _HOPPER, run)


def _adapters(num_tokens: int, num_places: int, dtype: torch.dtype, experts: int = 1) -> None:
    """Of an 8B: queries, keys and values, pages of rank 8 and adapters of up to rank 64; or of
    ``experts`` of a 30B."""
    slices, columns = ([4096, 1024, 1024], 4096) if experts == 1 else ([768, 768], 2048)
    device = torch.device("cpu")
    add_lora(
        torch.empty(num_tokens, sum(slices), dtype=dtype),
        torch.empty(num_tokens, columns, dtype=dtype),
        torch.empty(num_places, experts, len(slices), 8, columns, dtype=dtype),
        torch.empty(num_places, experts, sum(slices), 8, dtype=dtype),
        torch.empty(num_places, sum(slices), dtype=dtype),
        None,
        _int32(num_places, 8),
        group_rows(torch.zeros(num_tokens, dtype=torch.int32), num_places * experts),
        column_tiles(slices, device),
    )


def _sample(vocabulary: int, dtype: torch.dtype) -> None:
    """With min-p, whose code holds all of the other."""
    numbers, seeds = torch.empty(64), _int64(64)
    logits = torch.empty(64, vocabulary, dtype=dtype)
    sample(logits, numbers, _int32(64), numbers, seeds, seeds, numbers)


def _adjust(vocabulary: int) -> None:
    table = torch.empty(64, vocabulary)
    settings = (torch.empty(64), table, table.int(), torch.empty(64, 3))
    adjust_logits(torch.empty(64, vocabulary), _int64(64), *settings)


def _ban(vocabulary: int) -> None:
    logits, history = torch.empty(64, vocabulary), _int32(65, 8192)
    ban_repeated_ngrams(logits, _int64(64), _int64(64), _int32(64), history, 8192)
    words = (_int32(100, 6), _int32(100), _int32(100))
    ban_words(logits, _int32(65), _int64(64), *words, history)


def _mask(vocabulary: int) -> None:
    mask_logits(torch.empty(64, vocabulary), _int32(64, 2 + -(-vocabulary // 32)))


def token_cases() -> Iterator[Case]:
    """The ops that work token by token, in bfloat16."""
    shape = LLAMA_8B
    gate_up = torch.empty(64, 2 * shape.intermediate, dtype=_BF16)
    for each in (LLAMA_8B, LLAMA_13B):  # rows of a power of two, and not
        x = torch.empty(64, each.hidden, dtype=_BF16)
        norm, add = (x, x[0], 1e-5), (x, x, x[0], 1e-5)
        yield Case("rms_norm", each.name, _BOTH, partial(rms_norm, *norm))
        yield Case("rms_norm", f"{each.name} add", _BOTH, partial(add_rms_norm, *add))
        yield Case("rms_norm", f"{each.name} fp8", _HOPPER, partial(rms_norm_fp8, *norm))
        yield Case("rms_norm", f"{each.name} add fp8", _HOPPER, partial(add_rms_norm_fp8, *add))
        yield Case("quantize_fp8", each.name, _HOPPER, partial(quantize_fp8, x))
        yield Case("quantize_int8", each.name, _BOTH, partial(quantize_int8, x))
        yield Case("quantize_fp8", f"{each.name} groups", _HOPPER, partial(quantize_fp8, x, 128))
    yield Case("silu_mul", shape.name, _BOTH, partial(silu_mul, gate_up))
    yield Case("silu_mul", f"{shape.name} fp8", _HOPPER, partial(silu_mul_fp8, gate_up))
    yield Case("rope_write_kv", shape.name, _BOTH, partial(_rope, shape, _BF16, False))
    yield Case("rope_write_kv", f"{shape.name} norm", _BOTH, partial(_rope, shape, _BF16, True))
    yield Case("rope_write_kv", f"{shape.name} fp8", _HOPPER, partial(_rope, shape, _FP8, True))
    yield Case(
        "rope_write_kv", f"{shape.name} int8", _BOTH, partial(_rope, shape, torch.int8, True)
    )
    yield Case("rope_write_kv", "head 512 norm", _BOTH, partial(_rope, HEAD_512, _BF16, True))
    yield Case("rope_write_kv", "latents", _BOTH, partial(_rope, LATENTS, _BF16, False))
    for num_tokens in (1, 64, 256, 1024):  # each has a tile of its own, or splits
        name = f"{shape.name} {num_tokens}"
        few, few_fp8 = (partial(_linear, shape, dtype, num_tokens) for dtype in (_BF16, _FP8))
        yield Case("invariant_linear", name, _BOTH, few)
        yield Case("invariant_linear", f"{name} fp8", _HOPPER, few_fp8)
    for num_tokens in (64, 8192):
        label = f"128 experts, {num_tokens} rows"
        yield Case("grouped_linear", label, _BOTH, partial(_experts, num_tokens, _BF16))
    yield from _quantized_cases()
    yield from _head_cases()
    for num_tokens in (64, 8192):
        label = f"64 adapters, {num_tokens} rows"
        yield Case("add_lora", label, _BOTH, partial(_adapters, num_tokens, 64, _BF16))
    for heads, size in ((32, 128), (4, 16)):  # Qwen3-Next, and the models of the tests
        yield Case("delta_step", f"{heads} heads of {size}", _BOTH, partial(_delta, heads, size))
    run = partial(_adapters, 512, 2, _BF16, 128)
    yield Case("add_lora", "128 experts, 2 adapters, 512 rows", _BOTH, run)
    yield Case("copy_blocks", shape.name, _BOTH, partial(_copy, shape))
    for dtype in (_BF16, torch.float32):  # as drawn from, and as changed before
        label = f"{shape.name} {str(dtype).removeprefix('torch.')}"
        yield Case("sample", label, _BOTH, partial(_sample, shape.vocabulary, dtype))
    # The maxima of its groups of tokens are held in registers.
    yield Case("sample", "vocabulary 262144", _BOTH, partial(_sample, 2**18, _BF16))
    yield Case("adjust_logits", shape.name, _BOTH, partial(_adjust, shape.vocabulary))
    yield Case("mask_logits", shape.name, _BOTH, partial(_mask, shape.vocabulary))
    yield Case("ban_tokens", shape.name, _BOTH, partial(_ban, shape.vocabulary))


def layer_cases() -> Iterator[Case]:
    """Each kernel of a generation step's layers once, for sm_90."""
    ops = ("rms_norm", "quantize_fp8", "silu_mul", "rope_write_kv", "paged_attention_generation")
    cases = [*attention_cases(), *token_cases()]
    for op in ops:
        yield replace(next(case for case in cases if case.op == op), capabilities=_HOPPER)


def quantized_cases() -> Iterator[Case]:
    """Linears of quantised weights for sm_90, in bfloat16."""
    for case in _quantized_cases():
        if "float" not in case.label:
            yield replace(case, capabilities=_HOPPER)


def draw_cases() -> Iterator[Case]:
    """Those of the draw."""
    return (case for case in token_cases() if case.op == "sample")


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "layer": layer_cases,
    "draw": draw_cases,
    "quantized": quantized_cases,
}


def main() -> None:
    """Compile the cases and write as JSON: the reports, op and label added, and of all cases also
    how many of every kernel steps of different shapes take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, help="file for the reports")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these and no counts")
    options = parser.parse_args()
    cases = [*attention_cases(), *token_cases()]
    if options.only:
        cases = [case for part in options.only for case in PARTS[part]()]
    counts = {} if options.only else count_kernels()
    reports = [
        {"op": case.op, "label": case.label, **report}
        for case in cases
        for capability in case.capabilities
        for report in record(capability, case.call)
    ]
    with open(options.output, "w", encoding="utf-8") as file:
        json.dump({"reports": reports, "counts": counts}, file, indent=1)


if __name__ == "__main__":
    main()
