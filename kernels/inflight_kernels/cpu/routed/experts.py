"""What stands around the linears of a mixture of experts: which experts a token gets, its rows
sorted by expert, and their answers added up.

The linears themselves are `linear.grouped_linear_stage`. How many pieces these are is known once
the rows are sorted, and a thread may come late, when others are stages ahead: each layer of a
program needs `SortedRows` of its own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from inflight_kernels.cpu.intrinsics import (
    FAST,
    array_at,
    exp,
    finish_piece,
    get,
    put,
    rounded,
    take_next,
)
from inflight_kernels.cpu.threads import Kernel, Stage

_FEW = 32_768
"""Scores that one thread is done with before others have begun."""


def choose_experts(
    logits: Tensor, top_k: int, *, is_normalized: bool, norm_eps: float, scale: float
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts int64 [T, k] of the softmax of ``logits`` float32 [T, E], and their
    weights float32: ``scale`` times the scores, which ``is_normalized`` divides by their sum plus
    ``norm_eps``."""
    logits = logits.contiguous()
    experts = torch.empty(len(logits), top_k, dtype=torch.int32)
    weights = torch.empty(len(logits), top_k)
    choose_experts_stage(
        logits, experts, weights, logits.shape[1],
        is_normalized=is_normalized, norm_eps=norm_eps, scale=scale,
    ).run(is_small=logits.numel() < _FEW)  # fmt: skip
    return experts.long(), weights


class SortedRows(NamedTuple):
    """Rows of T tokens, one for each of their k experts, sorted by expert.

    ``starts`` [E + 1] int32: where the rows of each expert begin. ``active`` [E + 1] int32: how
    many experts have rows, then which. ``tokens`` [T * k] int64: whose row it is. ``places`` [T, k]
    int32: the row of each token and choice.
    """

    starts: Tensor
    active: Tensor
    tokens: Tensor
    places: Tensor

    @classmethod
    def empty(cls, num_tokens: int, top_k: int, num_experts: int) -> SortedRows:
        """Memory for them."""
        starts, active = torch.zeros(2, num_experts + 1, dtype=torch.int32)
        tokens = torch.zeros(num_tokens * top_k, dtype=torch.int64)
        return cls(starts, active, tokens, torch.zeros(num_tokens, top_k, dtype=torch.int32))


# Stages into memory that is given. All tensors are contiguous.


def choose_experts_stage(
    logits: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    *,
    is_normalized: bool,
    norm_eps: float,
    scale: float,
) -> Stage:
    """`choose_experts` by the first ``num_experts`` columns of ``logits`` float32 [T, columns],
    into ``experts`` int32 and ``weights`` float32 [T, k]."""
    numbers = (
        len(logits), logits.data_ptr(), experts.data_ptr(), weights.data_ptr(), logits.shape[1],
        num_experts, experts.shape[1], is_normalized,
    )  # fmt: skip
    return Stage(_choose_kernel(), numbers, (norm_eps, scale))


def widen_stage(x: Tensor, out: Tensor) -> Stage:
    """x bfloat16 [T, size] as ``out`` float32, for a router."""
    return Stage(_widen_kernel(), (len(x), x.data_ptr(), out.data_ptr(), x.shape[1]))


def sort_rows_stage(experts: Tensor, found: SortedRows) -> Stage:
    """Sort the rows of ``experts`` int32 [T, k]."""
    pointers = [each.data_ptr() for each in found]
    numbers = (len(experts), experts.data_ptr(), *pointers, experts.shape[1], len(found.starts) - 1)
    return Stage(_sort_kernel(), numbers)


def add_experts_stage(x: Tensor, weights: Tensor, places: Tensor, out: Tensor) -> Stage:
    """``out[t] = sum(x[places[t, i]] * weights[t, i])`` of x [T * k, size], ``weights`` float32 and
    ``places`` int32 [T, k]; weights and products are rounded to the type of x."""
    pointers = (x.data_ptr(), weights.data_ptr(), places.data_ptr(), out.data_ptr())
    numbers = (len(out), *pointers, out.shape[1], places.shape[1])
    return Stage(_add_kernel(x.dtype == torch.bfloat16), numbers)


def _widen(pointer):
    """A piece is a row."""
    numbers = carray(pointer, 6, types.int64)
    num_rows, size = numbers[2], numbers[5]
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        x = array_at(numbers[3] + row * size * 2, size, np.uint16(0))
        out = array_at(numbers[4] + row * size * 4, size, np.float32(0))
        for i in range(size):
            out[i] = get(x, i)
        finish_piece(numbers.ctypes.data)
    return num_rows


@cache
def _widen_kernel() -> Kernel:
    return Kernel(_widen, 4)


@njit(**FAST)
def _choose_row(logits, experts, weights, is_normalized, norm_eps, scale):
    largest = logits[0]
    for expert in range(len(logits)):
        largest = max(largest, logits[expert])
    total, chosen = np.float32(0.0), np.float32(0.0)
    for expert in range(len(logits)):
        total += exp(logits[expert] - largest)
    last, last_expert = np.float32(3e38), -1
    for choice in range(len(experts)):  # the largest behind the last one, of equal ones in order
        best, found = np.float32(-3e38), 0
        for expert in range(len(logits)):
            score = logits[expert]
            is_behind = score < last or (score == last and expert > last_expert)
            if is_behind and score > best:
                best, found = score, expert
        last, last_expert = best, found
        experts[choice] = found
        weights[choice] = exp(best - largest)
        chosen += weights[choice]
    divisor = chosen + np.float32(norm_eps) * total if is_normalized else total
    for choice in range(len(experts)):
        weights[choice] = weights[choice] / divisor * np.float32(scale)


def _choose(pointer):
    """A piece is a token."""
    numbers, floats = carray(pointer, 10, types.int64), carray(pointer, 12, types.float64)
    num_rows, columns, num_experts, top_k = numbers[2], numbers[6], numbers[7], numbers[8]
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        logits = array_at(numbers[3] + row * columns * 4, num_experts, np.float32(0))
        experts = array_at(numbers[4] + row * top_k * 4, top_k, np.int32(0))
        weights = array_at(numbers[5] + row * top_k * 4, top_k, np.float32(0))
        _choose_row(logits, experts, weights, numbers[9] != 0, floats[10], floats[11])
        finish_piece(numbers.ctypes.data)
    return num_rows


@cache
def _choose_kernel() -> Kernel:
    return Kernel(_choose, 8, 2)


@njit(**FAST)
def _sort_rows(experts, starts, active, tokens, places, top_k):
    num_experts = len(starts) - 1
    starts[:] = 0
    for row in range(len(experts)):
        starts[experts[row] + 1] += 1
    active[0] = 0
    for expert in range(num_experts):
        if starts[expert + 1] > 0:
            active[0] += 1
            active[active[0]] = expert
        starts[expert + 1] += starts[expert]
    for row in range(len(experts)):  # `starts` of an expert moves to its end
        place = starts[experts[row]]
        starts[experts[row]] += 1
        tokens[place], places[row] = row // top_k, place
    for expert in range(num_experts, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


def _sort(pointer):
    """There is one piece."""
    numbers = carray(pointer, 10, types.int64)
    if take_next(numbers.ctypes.data) == 0:
        num_rows, num_experts = numbers[2] * numbers[8], numbers[9]
        _sort_rows(
            array_at(numbers[3], num_rows, np.int32(0)),
            array_at(numbers[4], num_experts + 1, np.int32(0)),
            array_at(numbers[5], num_experts + 1, np.int32(0)),
            array_at(numbers[6], num_rows, np.int64(0)),
            array_at(numbers[7], num_rows, np.int32(0)),
            numbers[8],
        )
        finish_piece(numbers.ctypes.data)
    return 1


@cache
def _sort_kernel() -> Kernel:
    return Kernel(_sort, 8)


@njit(**{**FAST, "fastmath": False})
def _add_expert(x, weight, totals, like):
    for i in range(len(totals)):
        totals[i] += rounded(get(x, i) * weight, like)


@njit(**FAST)
def _add_experts(pointer, width, like):
    """``width``: bytes of a number like ``like``. A piece is a token."""
    numbers = carray(pointer, 9, types.int64)
    num_rows, size, top_k = numbers[2], numbers[7], numbers[8]
    totals = np.empty(size, np.float32)
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        weights = array_at(numbers[4] + row * top_k * 4, top_k, np.float32(0))
        places = array_at(numbers[5] + row * top_k * 4, top_k, np.int32(0))
        totals[:] = 0
        for choice in range(top_k):
            x = array_at(numbers[3] + np.int64(places[choice]) * size * width, size, like)
            _add_expert(x, rounded(weights[choice], like), totals, like)
        out = array_at(numbers[6] + row * size * width, size, like)
        for i in range(size):
            put(out, i, totals[i])
        finish_piece(numbers.ctypes.data)
    return num_rows


def _add_float32(pointer):
    return _add_experts(pointer, 4, np.float32(0))


def _add_bfloat16(pointer):
    return _add_experts(pointer, 2, np.uint16(0))


@cache
def _add_kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_add_bfloat16 if is_bfloat16 else _add_float32, 7)
