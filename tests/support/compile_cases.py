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
from typing import Any

import torch
from support.compile_recorder import record
from support.key_cases import count_kernels

from inflight_kernels.ops.adjust_logits import adjust_logits
from inflight_kernels.ops.ban_tokens import ban_repeated_ngrams, ban_words
from inflight_kernels.ops.copy_blocks import copy_blocks
from inflight_kernels.ops.invariant_linear import invariant_linear
from inflight_kernels.ops.mask_logits import mask_logits
from inflight_kernels.ops.paged_attention_context import paged_attention_context
from inflight_kernels.ops.paged_attention_generation import paged_attention_generation
from inflight_kernels.ops.quantize_fp8 import quantize_fp8
from inflight_kernels.ops.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from inflight_kernels.ops.rope_write_kv import rope_write_kv
from inflight_kernels.ops.sample import sample
from inflight_kernels.ops.silu_mul import silu_mul, silu_mul_fp8

_BATCH = 32
_BF16 = torch.bfloat16
_FP8 = torch.float8_e4m3fn  # Triton converts it from sm_89 on
_CACHES = (_BF16, _FP8, torch.float32)
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
    query_dtype = _BF16 if dtype == _FP8 else dtype
    tables, lengths = _int32(_BATCH, 8192 // block), _int32(_BATCH)
    num_tokens = _BATCH if op == "paged_attention_generation" else 1024
    query = torch.empty(num_tokens, shape.num_heads, shape.head_dim, dtype=query_dtype)
    if op == "paged_attention_generation":
        paged_attention_generation(query, cache, cache, tables, lengths, 0.1, **options)
    else:
        starts = _int32(_BATCH + 1)
        paged_attention_context(query, cache, cache, tables, starts, lengths, 0.1, **options)


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
        (LLAMA_8B, 64, torch.float32, _HOPPER, {}),
        (LLAMA_8B, 64, _BF16, _HOPPER, {"sliding_window": 4096, "softcap": 50.0}),
        (HEAD_64, 32, _BF16, _HOPPER, {}),
        (HEAD_80, 64, _BF16, _HOPPER, {}),
        (HEAD_256, 64, _BF16, (*_BOTH, *_SMALL), {}),
        (GROUP_5, 64, _BF16, _HOPPER, {}),
        *((shape, 16, dtype, _HOPPER, {}) for shape in (HEAD_16, HEAD_32) for dtype in _CACHES),
    ]
    words: list[tuple[Shape, int, torch.dtype, tuple[int, ...], dict[str, Any]]] = [
        (LLAMA_13B, 64, _FP8, _HOPPER, {}),
        (LLAMA_8B, 64, _FP8, _HOPPER, {"sliding_window": 4096, "softcap": 50.0}),
        (HEAD_80, 64, _FP8, _HOPPER, {}),
        (HEAD_256, 64, _FP8, (*_HOPPER, *_SMALL), {}),
        (HEAD_80, 16, _FP8, _ADA, {}),
        (HEAD_96, 64, _FP8, _ADA, {}),
    ]
    # Within five of the 255 registers that a thread may have.
    tight: list[tuple[Shape, int, torch.dtype, tuple[int, ...], dict[str, Any]]] = [
        (HEAD_256, 64, _FP8, (*_HOPPER, *_SMALL), {}),
        (HEAD_256, 32, _FP8, _HOPPER, {"sliding_window": 4096, "softcap": 50.0}),
        (GROUP_8, 32, _FP8, _HOPPER, {}),
    ]
    for op, more in (("paged_attention_generation", words), ("paged_attention_context", tight)):
        for shape, block, dtype, capabilities, options in (*table, *more):
            extra = "".join(f" {name}={value}" for name, value in options.items())
            label = f"{shape.name} {str(dtype).removeprefix('torch.')} blocks of {block}{extra}"
            yield Case(op, label, capabilities, partial(_attend, op, shape, block, dtype, options))
    for length in (4, 16):
        options = {"max_query_len": length}
        op, label = "paged_attention_context", f"8B bfloat16 max_query_len={length}"
        yield Case(op, label, _HOPPER, partial(_attend, op, LLAMA_8B, 64, _BF16, options))


def _rope(shape: Shape, cache_dtype: torch.dtype, has_norm: bool) -> None:
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    fused = torch.empty(64, heads + 2 * kv_heads, dim, dtype=_BF16)
    query, key, value = fused.tensor_split((heads, heads + kv_heads), dim=1)
    cache = _cache(shape, 64, cache_dtype)
    weight = torch.empty(dim, dtype=_BF16) if has_norm else None
    table = torch.empty(1024, dim)
    rope_write_kv(query, key, value, table, _int64(64), cache, cache, _int64(64), weight, weight)


def _copy(shape: Shape) -> None:
    cache = _cache(shape, 64, _BF16)[None]
    copy_blocks(cache, cache, _int32(2), _int32(2))


def _linear(shape: Shape, dtype: torch.dtype, num_tokens: int) -> None:
    x = torch.empty(num_tokens, shape.intermediate, dtype=dtype)
    weight = torch.empty(shape.hidden, shape.intermediate, dtype=dtype)
    if dtype != _FP8:
        invariant_linear(x, weight)
        return
    scales, weight_scales = torch.empty(num_tokens, 1), torch.empty(shape.hidden, 1)
    invariant_linear(x, weight, x_scales=scales, weight_scales=weight_scales)


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
    yield Case("silu_mul", shape.name, _BOTH, partial(silu_mul, gate_up))
    yield Case("silu_mul", f"{shape.name} fp8", _HOPPER, partial(silu_mul_fp8, gate_up))
    yield Case("rope_write_kv", shape.name, _BOTH, partial(_rope, shape, _BF16, False))
    yield Case("rope_write_kv", f"{shape.name} norm", _BOTH, partial(_rope, shape, _BF16, True))
    yield Case("rope_write_kv", f"{shape.name} fp8", _HOPPER, partial(_rope, shape, _FP8, True))
    for num_tokens in (1, 64, 300):  # each has a tile of its own
        name = f"{shape.name} {num_tokens}"
        few, few_fp8 = (partial(_linear, shape, dtype, num_tokens) for dtype in (_BF16, _FP8))
        yield Case("invariant_linear", name, _BOTH, few)
        yield Case("invariant_linear", f"{name} fp8", _HOPPER, few_fp8)
    yield Case("copy_blocks", shape.name, _BOTH, partial(_copy, shape))
    for dtype in (_BF16, torch.float32):  # as drawn from, and as changed before
        label = f"{shape.name} {str(dtype).removeprefix('torch.')}"
        yield Case("sample", label, _BOTH, partial(_sample, shape.vocabulary, dtype))
    yield Case("adjust_logits", shape.name, _BOTH, partial(_adjust, shape.vocabulary))
    yield Case("mask_logits", shape.name, _BOTH, partial(_mask, shape.vocabulary))
    yield Case("ban_tokens", shape.name, _BOTH, partial(_ban, shape.vocabulary))


def layer_cases() -> Iterator[Case]:
    """Each kernel of a generation step's layers once, for sm_90."""
    ops = ("rms_norm", "quantize_fp8", "silu_mul", "rope_write_kv", "paged_attention_generation")
    cases = [*attention_cases(), *token_cases()]
    for op in ops:
        yield replace(next(case for case in cases if case.op == op), capabilities=_HOPPER)


def draw_cases() -> Iterator[Case]:
    """Those of the draw."""
    return (case for case in token_cases() if case.op == "sample")


PARTS: dict[str, Callable[[], Iterator[Case]]] = {"layer": layer_cases, "draw": draw_cases}


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
