"""Generation attention over the paged cache, with the turning of heads and the write of the new
key and value: what one layer does for one new token of each sequence.

Options mean what they do in `inflight_kernels.reference`. A piece of work is one key head of one
sequence, with the query heads that read it: it turns them, keeps its own key and value, and goes
over the blocks of the sequence, a softmax that is corrected after every `_KEYS` tokens.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from inflight_kernels.cpu.attention.head_tiles import KEYS, STEP_BYTES, STEPS, add_values, score
from inflight_kernels.cpu.attention.heads import (
    LayerAttention,
    fetch_block,
    first_seen,
    place_of,
    prepare,
    write,
)
from inflight_kernels.cpu.intrinsics import (
    FAST,
    WIDTH,
    array_at,
    exp,
    finish_piece,
    put,
    take_next,
)
from inflight_kernels.cpu.threads import Kernel, Stage

_KEYS = 256
"""Of which the weights are made at a time."""
_PIECES_AHEAD = 2
"""A piece that a thread takes soon, of two or a few."""


def attend_generations(
    layer: LayerAttention,
    heads: Tensor,  # [B, H + 2 * KVH, D]: query, key and value, as far as there are
    keys: Tensor,  # [num_blocks, tokens_per_block, KVH, D], the last two dimensions contiguous
    values: Tensor,  # of the same strides
    block_tables: Tensor,  # [B, max_blocks] int32
    context_lengths: Tensor,  # [B] int32: with the new token
    slot_mapping: Tensor,  # [B] int64; -1: not kept
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    sinks: Tensor | None,  # [H] float32
) -> Tensor:
    """The answer [B, H, D], of the dtype of ``heads`` and the caches."""
    heads = heads.contiguous()
    # Those with an offset in them are float32 in any case.
    query_norm, key_norm = (
        None if each is None else each.float() for each in (query_norm, key_norm)
    )
    out = torch.empty(len(heads), layer.num_heads, layer.head_dim, dtype=heads.dtype)
    step = StepNumbers.of(block_tables, context_lengths, slot_mapping)
    attention_stage(layer, heads, keys, values, step, query_norm, key_norm, sinks, out).run()
    return out


class StepNumbers(NamedTuple):
    """What changes from step to step: an address of block tables, how far apart their rows are,
    addresses of context lengths and slots. They follow the number of sequences in a stage."""

    tables: int
    table_stride: int
    lengths: int
    slots: int

    @classmethod
    def of(cls, block_tables: Tensor, context_lengths: Tensor, slot_mapping: Tensor) -> StepNumbers:
        """Of tensors as `attend_generations` has them."""
        return cls(
            block_tables.data_ptr(),
            block_tables.stride(0),
            context_lengths.data_ptr(),
            slot_mapping.data_ptr(),
        )


STEP_COLUMNS = slice(3, 7)
"""Where a `Program` has them."""


def attention_stage(
    layer: LayerAttention,
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    step: StepNumbers,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
) -> Stage:
    """`attend_generations` into ``out``; it and ``heads`` are contiguous, norms float32."""
    cos_sin, slopes, width = layer.cos_sin, layer.slopes, heads.itemsize
    numbers = (
        len(heads),
        *step,
        heads.data_ptr(),
        keys.data_ptr(),
        values.data_ptr() if layer.has_values else 0,
        out.data_ptr(),
        0 if cos_sin is None else cos_sin.data_ptr(),
        0 if query_norm is None else query_norm.data_ptr(),
        0 if key_norm is None else key_norm.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if slopes is None else slopes.data_ptr(),
        keys.stride(0) * width,
        keys.stride(1) * width,
        keys.shape[1],
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        heads.shape[1],
        layer.window or 0,
        layer.chunk or 0,
        layer.is_norm_after_rope,
        layer.has_own,
    )
    options = (layer.scale, layer.softcap or 0.0, layer.norm_eps)
    return Stage(_kernel(heads.dtype == torch.bfloat16), numbers, options)


@njit(**FAST)
def _weigh(scores, count, scale, softcap, slope, distance):
    """Scores of one head, the first at ``distance`` from the query: capped, and biased."""
    for token in range(count):
        number = scores[token] * scale
        if softcap > 0:
            number = softcap - np.float32(2.0) * softcap / (
                exp(np.float32(2.0) * number / softcap) + np.float32(1.0)
            )
        scores[token] = number + slope * (distance + np.float32(token))


@njit(**FAST)
def _soften(scores, count, peak):
    """Weights of one head's scores; their sum."""
    total = np.float32(0.0)
    for token in range(count):
        scores[token] = exp(scores[token] - peak)
        total += scores[token]
    return total


class _Call(NamedTuple):
    """What the kernel was called with, in the order of `attention_stage`: addresses, strides in
    bytes (of tables in entries), sizes, options."""

    num_sequences: int
    tables: int
    table_stride: int
    lengths: int
    slots: int
    heads: int
    keys: int
    values: int
    out: int
    cos_sin: int
    query_norm: int
    key_norm: int
    sinks: int
    slopes: int
    block_stride: int
    token_stride: int
    tokens_per_block: int
    num_heads: int
    num_kv_heads: int
    size: int
    num_given: int
    window: int
    chunk: int
    is_norm_last: int
    has_own: int


@njit(**FAST)
def _keep_own(call, sequence, kv_head, position, eps, row, width, like):
    """Write the key and the value of the new token, unless it has no place."""
    slot = array_at(call.slots, call.num_sequences, np.int64(0))[sequence]
    if slot < 0:
        return
    at = slot // call.tokens_per_block * call.block_stride
    at += slot % call.tokens_per_block * call.token_stride + kv_head * call.size * width
    number = sequence * call.num_given + call.num_heads + kv_head
    key = call.heads + number * call.size * width
    prepare(key, call.key_norm, call.cos_sin, position, eps, call.is_norm_last, row, like)
    write(row, call.keys + at, like)
    if call.values != 0:
        prepare(key + call.num_kv_heads * call.size * width, 0, 0, 0, eps, 0, row, like)
        write(row, call.values + at, like)


class _Memory(NamedTuple):
    """Of a thread. Addresses, aligned: ``query`` [group, words] padded with zeros, ``scores``
    [group, `_KEYS` and a few] and ``sums`` as `add_values` has them, float32; how many bytes their
    rows have. ``peaks`` and ``totals`` [group], ``row`` [D]: arrays."""

    query: Any
    query_row: Any
    scores: Any
    scores_row: Any
    sums: Any
    sums_row: Any
    peaks: Any
    totals: Any
    row: Any


@njit(**FAST)
def _floats(address, count):
    return array_at(address, count, np.float32(0))


@njit(**FAST)
def _allocate(group, size, width):
    """The buffer, which has to stay, and what is in it."""
    num_parts, per_step = 4 // width, STEPS * STEP_BYTES
    query_row = (size * width + per_step - 1) // per_step * per_step
    scores_row, sums_row = (_KEYS + KEYS) * 4, query_row * num_parts
    buffer = np.empty(group * (query_row + scores_row + sums_row) // 4 + 16, np.float32)
    query = (np.int64(buffer.ctypes.data) + 63) // 64 * 64
    _floats(query, group * query_row // 4)[:] = np.float32(0.0)
    scores = query + group * query_row
    sums = scores + group * scores_row
    return buffer, _Memory(
        query, query_row, scores, scores_row, sums, sums_row,
        np.empty(group, np.float32), np.empty(group, np.float32), np.empty(size, np.float32),
    )  # fmt: skip


@njit(**FAST)
def _begin(call, memory, sequence, kv_head, position, eps, width, like):
    """Turn the query heads of a key head; what they have seen is nothing but their sinks."""
    group = len(memory.peaks)
    _floats(memory.sums, group * memory.sums_row // 4)[:] = np.float32(0.0)
    for head in range(group):
        number = kv_head * group + head
        given = call.heads + (sequence * call.num_given + number) * call.size * width
        prepare(
            given, call.query_norm, call.cos_sin, position, eps, call.is_norm_last, memory.row,
            like,
        )  # fmt: skip
        write(memory.row, memory.query + head * memory.query_row, like)
        memory.peaks[head], memory.totals[head] = np.float32(-1e30), np.float32(0.0)
        if call.sinks != 0:
            memory.peaks[head] = _floats(call.sinks, call.num_heads)[number]
            memory.totals[head] = np.float32(1.0)


@njit(**FAST)
def _soften_all(call, memory, kv_head, distance, num_tokens, scale, softcap):
    """Make weights of the scores of some tokens, the first at ``distance`` from the query, and
    correct what was summed before by the new peaks."""
    group = len(memory.peaks)
    for head in range(group):
        slope = np.float32(0.0)
        if call.slopes != 0:
            slope = _floats(call.slopes, call.num_heads)[kv_head * group + head]
        scores = _floats(memory.scores + head * memory.scores_row, num_tokens)
        _weigh(scores, num_tokens, scale, softcap, slope, distance)
        before = peak = memory.peaks[head]
        for token in range(num_tokens):
            peak = max(peak, scores[token])
        factor = exp(before - peak)
        memory.totals[head] = memory.totals[head] * factor + _soften(scores, num_tokens, peak)
        memory.peaks[head] = peak
        if before != peak:
            sums = _floats(memory.sums + head * memory.sums_row, memory.sums_row // 4)
            for i in range(len(sums)):
                sums[i] *= factor


@njit(**FAST)
def _table(call, sequence, position):
    """Blocks of a sequence, up to that of the position."""
    return array_at(
        call.tables + sequence * call.table_stride * 4,
        position // call.tokens_per_block + 1,
        np.int32(0),
    )


@njit(**FAST)
def _first_key(call, piece, offset, width):
    """Where the key ``offset`` tokens behind the first that a piece sees is; 0 if there is none."""
    if piece >= call.num_sequences * call.num_kv_heads:
        return np.int64(0)
    sequence, kv_head = piece // call.num_kv_heads, piece % call.num_kv_heads
    last = np.int64(array_at(call.lengths, call.num_sequences, np.int32(0))[sequence]) - 1
    position = first_seen(call.window, call.chunk, last) + offset
    if position > last:
        return np.int64(0)
    return call.keys + place_of(call, _table(call, sequence, last), kv_head, position, width)


@njit(**FAST)
def _attend(call, memory, piece, position, options, width, like):
    """Go over what the sequence sees, `_KEYS` positions at a time, each block of them by itself.
    While keys are scored their values are read into the caches, and while these are added the next
    keys: of the same piece, or of one that follows soon."""
    scale, softcap = options
    sequence, kv_head = piece // call.num_kv_heads, piece % call.num_kv_heads
    values = call.values if call.values != 0 else call.keys
    per_block, stride, group = call.tokens_per_block, call.token_stride, len(memory.peaks)
    num_words = call.size * width // 4
    table = _table(call, sequence, position)
    first = first_seen(call.window, call.chunk, position)
    fetch_block(call, call.keys, table, kv_head, first, position + 1, width)
    while first <= position:
        end = min(first + _KEYS, position + 1)
        at = first
        while at < end:
            count = min(per_block - at % per_block, end - at)
            fetch_block(call, call.keys, table, kv_head, at + count, end, width)
            score(
                like, call.keys + place_of(call, table, kv_head, at, width), stride, count,
                num_words, memory.query, memory.query_row, memory.scores + (at - first) * 4,
                memory.scores_row, group, values - call.keys,
            )  # fmt: skip
            at += count
        distance = np.float32(first - position)
        _soften_all(call, memory, kv_head, distance, end - first, scale, softcap)
        at = first
        while at < end:
            count = min(per_block - at % per_block, end - at)
            place = values + place_of(call, table, kv_head, at, width)
            if at + _KEYS <= position:
                following = call.keys + place_of(call, table, kv_head, at + _KEYS, width)
            else:
                following = _first_key(call, piece + _PIECES_AHEAD, at - first, width)
            add_values(
                like, place, stride, count, num_words, memory.scores + (at - first) * 4,
                memory.scores_row, memory.sums, memory.sums_row, group, 4 // width,
                following - place if following != 0 else np.int64(0),
            )  # fmt: skip
            at += count
        first = end


@njit(**FAST)
def _finish(call, memory, sequence, kv_head, width, like):
    """Write what the heads have found."""
    group, size, per_step = len(memory.peaks), call.size, STEP_BYTES // width
    for head in range(group):
        number = sequence * call.num_heads + kv_head * group + head
        out = array_at(call.out + number * size * width, size, like)
        sums = _floats(memory.sums + head * memory.sums_row, memory.sums_row // 4)
        share = np.float32(1.0) / max(memory.totals[head], np.float32(1e-30))
        num_parts = 4 // width
        for first in range(0, size, per_step):
            for i in range(min(per_step, size - first)):
                place = first + i % num_parts * WIDTH + i // num_parts
                put(out, first + i, sums[place] * share)


@njit(**FAST)
def _run(pointer, width, like):
    """``width``: bytes of a number like ``like``."""
    n = carray(pointer, 27, types.int64)
    floats = carray(pointer, 30, types.float64)
    options, eps = (np.float32(floats[27]), np.float32(floats[28])), floats[29]
    call = _Call(
        n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14],
        n[15], n[16], n[17], n[18], n[19], n[20], n[21], n[22], n[23], n[24], n[25], n[26],
    )  # fmt: skip
    buffer, memory = _allocate(call.num_heads // call.num_kv_heads, call.size, width)
    lengths = array_at(call.lengths, call.num_sequences, np.int32(0))
    while True:
        piece = take_next(n.ctypes.data)
        if piece >= call.num_sequences * call.num_kv_heads:
            break
        sequence, kv_head = piece // call.num_kv_heads, piece % call.num_kv_heads
        position = np.int64(lengths[sequence]) - 1
        if call.has_own:
            _keep_own(call, sequence, kv_head, position, eps, memory.row, width, like)
        _begin(call, memory, sequence, kv_head, position, eps, width, like)
        _attend(call, memory, piece, position, options, width, like)
        _finish(call, memory, sequence, kv_head, width, like)
        finish_piece(n.ctypes.data)
    buffer[0] = np.float32(0)  # it has to live until here
    return call.num_sequences * call.num_kv_heads


def _run_float32(pointer):
    return _run(pointer, 4, np.float32(0))


def _run_bfloat16(pointer):
    return _run(pointer, 2, np.uint16(0))


@cache
def _kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_run_bfloat16 if is_bfloat16 else _run_float32, 25, 3)
