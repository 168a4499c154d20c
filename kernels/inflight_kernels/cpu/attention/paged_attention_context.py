"""Attention of any number of new tokens of each sequence over the paged cache, where their own keys
and values are already.

Options mean what they do in `inflight_kernels.reference`. A query row is a query head of a token;
a piece of work is up to `_LANES` rows that read one key head of one sequence. They stand side by
side in vectors, so that a key is one number for all of them, and peaks and sums of a softmax need
no number of another lane. Keys and values are read where they lie, `_KEYS` positions at a time;
these begin at multiples of it, so that an answer does not depend on how a prompt is cut to chunks.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from inflight_kernels.cpu.attention.heads import LayerAttention, first_seen, place_of
from inflight_kernels.cpu.attention.softmax import UNSEEN, bias_scores, raise_peaks, weigh
from inflight_kernels.cpu.attention.tiles import Layout, make_tile
from inflight_kernels.cpu.intrinsics import (
    FAST,
    HAS_WIDE_REGISTERS,
    WIDTH,
    array_at,
    exp,
    finish_piece,
    prefetch_at,
    put,
    take_next,
)
from inflight_kernels.cpu.threads import Kernel, Stage

_LANES = 6 * WIDTH
_KEYS = 64
_ROW = 4 * _LANES
"""Bytes of a number of each lane."""
_KEYS_HIGH, _PANELS, _ROWS_HIGH = (8, 3, 12) if HAS_WIDE_REGISTERS else (4, 1, 2)


def paged_attention_context(
    layer: LayerAttention,
    query: Tensor,  # [T, H, D], turned
    keys: Tensor,  # [num_blocks, tokens_per_block, KVH, D], the last two dimensions contiguous
    values: Tensor,  # of the same strides
    block_tables: Tensor,  # [B, max_blocks] int32
    query_starts: Tensor,  # [B + 1] int32: rows of the sequences
    context_lengths: Tensor,  # [B] int32: with the new tokens
    sinks: Tensor | None,  # [H] float32
) -> Tensor:
    """The answer [T, H, D], of the dtype of the query and the caches."""
    query, out = query.contiguous(), torch.empty(query.shape, dtype=query.dtype)
    step = ContextNumbers.of(block_tables, query_starts, context_lengths)
    paged_attention_context_stage(layer, query, keys, values, step, sinks, out).run()
    return out


class ContextNumbers(NamedTuple):
    """What changes from step to step: how many sequences, an address of block tables, how far apart
    their rows are, addresses of the starts and of context lengths."""

    num_sequences: int
    tables: int
    table_stride: int
    starts: int
    lengths: int

    @classmethod
    def of(
        cls, block_tables: Tensor, query_starts: Tensor, context_lengths: Tensor
    ) -> ContextNumbers:
        """Of tensors as `paged_attention_context` has them."""
        return cls(
            len(context_lengths),
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_starts.data_ptr(),
            context_lengths.data_ptr(),
        )


STEP_COLUMNS = slice(3, 8)
"""Where a `Program` has them."""


def paged_attention_context_stage(
    layer: LayerAttention,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: ContextNumbers,
    sinks: Tensor | None,
    out: Tensor,
) -> Stage:
    """`paged_attention_context` into ``out``; it and ``query`` are contiguous."""
    width = query.itemsize
    numbers = (
        len(query),
        *step,
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr() if layer.has_values else keys.data_ptr(),
        out.data_ptr(),
        *(0 if each is None else each.data_ptr() for each in (sinks, layer.slopes)),
        keys.stride(0) * width,
        keys.stride(1) * width,
        keys.shape[1],
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.window or 0,
        layer.chunk or 0,
    )
    options = (layer.scale, layer.softcap or 0.0)
    return Stage(_kernel(query.dtype == torch.bfloat16), numbers, options)


_score_tile, _score_tile_1 = (make_tile(rows, _PANELS, adds=False) for rows in (_KEYS_HIGH, 1))
_value_tile, _value_tile_1 = (make_tile(_ROWS_HIGH, panels, adds=True) for panels in (2, 1))


@njit(**FAST)
def _moved(layout, row, panel):
    """To that row and panel."""
    return Layout(
        layout.x + row * layout.x_row,
        layout.x_row,
        layout.x_step,
        layout.weight + panel * layout.weight_panel,
        layout.weight_panel,
        layout.weight_step,
        layout.out + row * layout.out_row + panel * 64,
        layout.out_row,
    )


@njit(**FAST)
def _score_keys(like, layout, num_steps, num_keys, num_panels):
    """``out``: keys [keys, steps] times lanes, whole `_PANELS` of them."""
    for panel in range(0, num_panels, _PANELS):
        key = 0
        while key + _KEYS_HIGH <= num_keys:
            _score_tile(like, _moved(layout, key, panel), num_steps)
            key += _KEYS_HIGH
        while key < num_keys:
            _score_tile_1(like, _moved(layout, key, panel), num_steps)
            key += 1


@njit(**FAST)
def _add_weighted(like, layout, num_steps, num_rows, num_panels):
    """Add weights [rows, steps], whole `_ROWS_HIGH` of them, times panels of values to ``out``."""
    for row in range(0, num_rows, _ROWS_HIGH):
        panel = 0
        while panel + 2 <= num_panels:
            _value_tile(like, _moved(layout, row, panel), num_steps)
            panel += 2
        if panel < num_panels:
            _value_tile_1(like, _moved(layout, row, panel), num_steps)


class _Call(NamedTuple):
    """What the kernel was called with, in the order of the stage: addresses, strides in bytes (of
    tables in entries), sizes, options."""

    num_tokens: int
    num_sequences: int
    tables: int
    table_stride: int
    starts: int
    lengths: int
    query: int
    keys: int
    values: int
    out: int
    sinks: int
    slopes: int
    block_stride: int
    token_stride: int
    tokens_per_block: int
    num_heads: int
    num_kv_heads: int
    size: int
    window: int
    chunk: int


class _Memory(NamedTuple):
    """Addresses of a thread's memory, all aligned: ``queries`` [steps, lanes] of 32 bits,
    ``scores`` [keys, lanes] float32, ``weights`` [keys / 2, lanes] pairs of bfloat16, ``values``
    [keys, D'] or pairs of keys, ``sums`` [lanes, D'] float32, where D' is whole panels; and of each
    lane its position, the first that it sees, peaks, totals, corrections and slopes."""

    queries: Any
    scores: Any
    weights: Any
    values: Any
    sums: Any
    positions: Any
    firsts: Any
    peaks: Any
    totals: Any
    factors: Any
    slopes: Any


@njit(**FAST)
def _lanes(address):
    return array_at(address, _LANES, np.float32(0))


@njit(**FAST)
def _counts(address):
    return array_at(address, _LANES, np.int32(0))


@njit(**FAST)
def _begin(call, memory, start, first_position, first_row, count, kv_head, width):
    """Put ``count`` query rows of a sequence into lanes; they have seen nothing but their sinks."""
    group, num_words = call.num_heads // call.num_kv_heads, call.size * width // 4
    lanes = array_at(memory.queries, num_words * _LANES, np.int32(0))
    positions, firsts = _counts(memory.positions), _counts(memory.firsts)
    peaks, totals, slopes = _lanes(memory.peaks), _lanes(memory.totals), _lanes(memory.slopes)
    for lane in range(_LANES):
        row = first_row + min(lane, count - 1)  # lanes without a row have the last one
        token, head = row // group, kv_head * group + row % group
        address = call.query + ((start + token) * call.num_heads + head) * call.size * width
        words = array_at(address, num_words, np.int32(0))
        for step in range(num_words):
            lanes[step * _LANES + lane] = words[step]
        position = first_position + token
        positions[lane] = np.int32(position)
        firsts[lane] = np.int32(first_seen(call.window, call.chunk, position))
        peaks[lane], totals[lane], slopes[lane] = np.float32(UNSEEN), np.float32(0), np.float32(0)
        if call.sinks != 0:
            peaks[lane] = array_at(call.sinks, call.num_heads, np.float32(0))[head]
            totals[lane] = np.float32(1)
        if call.slopes != 0:
            slopes[lane] = array_at(call.slopes, call.num_heads, np.float32(0))[head]


@njit(**FAST)
def _score(call, memory, table, kv_head, base, begin, end, num_panels, width, like):
    """Products of all rows with the keys from ``begin`` to ``end``."""
    per_block = call.tokens_per_block
    while begin < end:
        count = min(per_block - begin % per_block, end - begin)
        layout = Layout(
            call.keys + place_of(call, table, kv_head, begin, width), call.token_stride,
            np.int64(4), memory.queries, np.int64(64), np.int64(_ROW),
            memory.scores + (begin - base) * _ROW, np.int64(_ROW),
        )  # fmt: skip
        _score_keys(like, layout, call.size * width // 4, count, num_panels)
        begin += count


@njit(**FAST)
def _cap(memory, first, end, scale, softcap):
    """Scale scores of those keys of the memory, and cap them."""
    scores = array_at(memory.scores + first * _ROW, (end - first) * _LANES, np.float32(0))
    for i in range(len(scores)):
        ratio = exp(np.float32(2) * scale * scores[i] / softcap) + np.float32(1)
        scores[i] = softcap - np.float32(2) * softcap / ratio


@njit(**FAST)
def _bias(call, memory, begin, end, base, num_panels, scale):
    """Scale scores and add slopes, if there are any, and mask keys if a lane does not see them;
    what scores are to be multiplied by after it, which is the same for all keys of a layer."""
    positions, firsts = _counts(memory.positions), _counts(memory.firsts)
    is_masked = end > np.int64(positions[0]) + 1 or begin < np.int64(firsts[_LANES - 1])
    own, rest = (np.float32(1), scale) if call.slopes == 0 else (scale, np.float32(1))
    if is_masked or call.slopes != 0:
        for lane in range(0, num_panels * 64, 64):
            bias_scores(
                memory.scores + (begin - base) * _ROW + lane, np.int64(_ROW), begin, end, own,
                memory.firsts + lane, memory.positions + lane, memory.slopes + lane,
            )  # fmt: skip
    return rest


@njit(**FAST)
def _correct(call, memory, num_lanes):
    """Multiply what was summed by what its lane's new peak makes of it."""
    size, factors, totals = _padded(call.size), _lanes(memory.factors), _lanes(memory.totals)
    for lane in range(num_lanes):
        totals[lane] *= factors[lane]
    for lane in range(num_lanes):
        if factors[lane] != np.float32(1):
            sums = array_at(memory.sums + lane * size * 4, size, np.float32(0))
            for i in range(size):
                sums[i] *= factors[lane]


@njit(**FAST)
def _soften(call, memory, begin, end, base, num_panels, scale, softcap, like):
    """Scores become weights, and what was summed before is corrected by the new peaks. A key that
    is missing in a pair has none."""
    first, last = begin - base, end - base
    if softcap > 0:
        _cap(memory, first, last, scale, softcap)
        scale = np.float32(1)
    scale = _bias(call, memory, begin, end, base, num_panels, scale)
    if first % 2:
        first -= 1
        _lanes(memory.scores + first * _ROW)[:] = np.float32(UNSEEN)
    if last % 2:
        _lanes(memory.scores + last * _ROW)[:] = np.float32(UNSEEN)
        last += 1
    num_pairs = (last - first) // 2
    scores, weights = memory.scores + first * _ROW, memory.weights + first // 2 * _ROW
    for lane in range(0, num_panels * 64, 64):
        raise_peaks(
            scores + lane, np.int64(_ROW), num_pairs, scale, memory.peaks + lane,
            memory.factors + lane,
        )  # fmt: skip
    _correct(call, memory, num_panels * WIDTH)
    for lane in range(0, num_panels * 64, 64):
        weigh(
            like, scores + lane, np.int64(_ROW), num_pairs, scale, memory.peaks + lane,
            memory.totals + lane, weights + lane,
        )  # fmt: skip


@njit(**FAST)
def _padded(size):
    return (size + WIDTH - 1) // WIDTH * WIDTH


@njit(**FAST)
def _copy_values(call, memory, table, kv_head, base, begin, end, width, like):
    """Values of those keys, in bfloat16 as pairs of keys: a missing one has zeros."""
    size, row = call.size, _padded(call.size) * 4
    key = begin
    while key < end:
        place = call.values + place_of(call, table, kv_head, key, width)
        last = min(key + call.tokens_per_block - key % call.tokens_per_block, end)
        while key < last:
            value, number = array_at(place, size, like), key - base
            if width == 4:
                copied = array_at(memory.values + number * row, size, like)
                for i in range(size):
                    copied[i] = value[i]
            else:
                paired = array_at(memory.values + number // 2 * row, size, np.int32(0))
                if number % 2 == 0:
                    for i in range(size):
                        paired[i] = np.int32(value[i])
                elif key == begin:
                    for i in range(size):
                        paired[i] = np.int32(np.uint32(value[i]) << np.uint32(16))
                else:
                    for i in range(size):
                        paired[i] |= np.int32(np.uint32(value[i]) << np.uint32(16))
            place += call.token_stride
            key += 1


@njit(**FAST)
def _add_values(call, memory, table, kv_head, base, begin, end, num_rows, width, like):
    """Add values by their weights."""
    _copy_values(call, memory, table, kv_head, base, begin, end, width, like)
    first, last, weights = begin - base, end - base, memory.scores
    if width == 2:  # weights of pairs, too
        first, last, weights = first // 2, (last + 1) // 2, memory.weights
    row = _padded(call.size) * 4
    layout = Layout(
        weights + first * _ROW, np.int64(4), np.int64(_ROW),
        memory.values + first * row, np.int64(64), row, memory.sums, row,
    )  # fmt: skip
    _add_weighted(like, layout, last - first, num_rows, row // 64)


@njit(**FAST)
def _finish(call, memory, start, first_row, count, kv_head, width, like):
    group, size = call.num_heads // call.num_kv_heads, call.size
    totals = _lanes(memory.totals)
    for lane in range(count):
        row = first_row + lane
        number = (start + row // group) * call.num_heads + kv_head * group + row % group
        out = array_at(call.out + number * size * width, size, like)
        sums = array_at(memory.sums + lane * _padded(size) * 4, size, np.float32(0))
        share = np.float32(1) / max(totals[lane], np.float32(1e-30))
        for i in range(size):
            put(out, i, sums[i] * share)


@njit(**FAST)
def _allocate(size, width):
    """A buffer, which has to stay, and the addresses in it."""
    padded = _padded(size)
    sizes = (
        size * width // 4 * _ROW, _KEYS * _ROW, _KEYS * _ROW, _KEYS * padded * 4,
        _LANES * padded * 4,
    )  # fmt: skip
    total = 64 + 6 * _ROW
    for each in sizes:
        total += each
    buffer = np.zeros(total // 4, np.float32)
    at = (np.int64(buffer.ctypes.data) + 63) // 64 * 64
    scores = at + sizes[0]
    weights = scores + sizes[1]
    values = weights + sizes[2]
    sums = values + sizes[3]
    lanes = sums + sizes[4]
    return buffer, _Memory(
        at, scores, weights, values, sums, lanes, lanes + _ROW, lanes + 2 * _ROW,
        lanes + 3 * _ROW, lanes + 4 * _ROW, lanes + 5 * _ROW,
    )  # fmt: skip


@njit(**FAST)
def _read_ahead(call, cache, table, kv_head, begin, end, width):
    """Bring keys or values from ``begin`` to ``end`` into the caches."""
    key = begin
    while key < end:
        place = cache + place_of(call, table, kv_head, key, width)
        last = min(key + call.tokens_per_block - key % call.tokens_per_block, end)
        while key < last:
            for line in range(0, call.size * width, 64):
                prefetch_at(place + line)
            place += call.token_stride
            key += 1


@njit(**FAST)
def _attend(call, memory, sequence, kv_head, first_row, options, width, like):
    """A piece."""
    scale, softcap = options
    group = call.num_heads // call.num_kv_heads
    starts = array_at(call.starts, call.num_sequences + 1, np.int32(0))
    start = np.int64(starts[sequence])
    num_queries = np.int64(starts[sequence + 1]) - start
    length = np.int64(array_at(call.lengths, call.num_sequences, np.int32(0))[sequence])
    count = min(_LANES, num_queries * group - first_row)
    first_position = length - num_queries
    _begin(call, memory, start, first_position, first_row, count, kv_head, width)
    array_at(memory.sums, _LANES * _padded(call.size), np.float32(0))[:] = np.float32(0)
    table = array_at(
        call.tables + sequence * call.table_stride * 4,
        max(length - 1, 0) // call.tokens_per_block + 1,
        np.int32(0),
    )
    num_panels = (count + WIDTH - 1) // WIDTH
    num_rows = (count + _ROWS_HIGH - 1) // _ROWS_HIGH * _ROWS_HIGH
    key = np.int64(_counts(memory.firsts)[0])
    past_last = np.int64(_counts(memory.positions)[_LANES - 1]) + 1
    while key < past_last:
        base = key // _KEYS * _KEYS
        end = min(base + _KEYS, past_last)
        _read_ahead(call, call.values, table, kv_head, key, end, width)
        _score(call, memory, table, kv_head, base, key, end, num_panels, width, like)
        _read_ahead(call, call.keys, table, kv_head, end, min(end + _KEYS, past_last), width)
        _soften(call, memory, key, end, base, num_panels, scale, softcap, like)
        _add_values(call, memory, table, kv_head, base, key, end, num_rows, width, like)
        key = end
    _finish(call, memory, start, first_row, count, kv_head, width, like)


@njit(**FAST)
def _run(pointer, width, like):
    """``width``: bytes of a number like ``like``."""
    n = carray(pointer, 22, types.int64)
    floats = carray(pointer, 24, types.float64)
    options = (np.float32(floats[22]), np.float32(floats[23]))
    call = _Call(
        n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15],
        n[16], n[17], n[18], n[19], n[20], n[21],
    )  # fmt: skip
    group = call.num_heads // call.num_kv_heads
    starts = array_at(call.starts, call.num_sequences + 1, np.int32(0))
    buffer, memory = _allocate(call.size, width)
    sequence, first_piece, num_parts = -1, np.int64(0), np.int64(0)
    while True:
        piece = take_next(n.ctypes.data)
        # Pieces of a sequence follow those of the one before; each thread counts along.
        while sequence < call.num_sequences and piece >= first_piece + num_parts:
            first_piece += num_parts
            sequence += 1
            num_parts = np.int64(0)
            if sequence < call.num_sequences:
                num_rows = np.int64(starts[sequence + 1] - starts[sequence]) * group
                num_parts = (num_rows + _LANES - 1) // _LANES * call.num_kv_heads
        if sequence == call.num_sequences:
            break
        part, kv_head = divmod(piece - first_piece, call.num_kv_heads)
        _attend(call, memory, sequence, kv_head, part * _LANES, options, width, like)
        finish_piece(n.ctypes.data)
    buffer[0] = np.float32(0)  # it has to live until here
    return first_piece


def _run_float32(pointer):
    return _run(pointer, 4, np.float32(0))


def _run_bfloat16(pointer):
    return _run(pointer, 2, np.uint16(0))


@cache
def _kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_run_bfloat16 if is_bfloat16 else _run_float32, 20, 2)
