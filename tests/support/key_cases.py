"""Launches that differ as the steps of a server do: numbers of requests, widths of their tables,
and where in a larger tensor the small ones lie. One compiled kernel must serve them all, or
requests would wait for the compiler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from support.compile_recorder import record_keys

from inflight_kernels.ops.attention.copy_blocks import copy_blocks
from inflight_kernels.ops.attention.delta_step import delta_step
from inflight_kernels.ops.attention.paged_attention_context import paged_attention_context
from inflight_kernels.ops.attention.paged_attention_generation import paged_attention_generation
from inflight_kernels.ops.attention.rope_write_kv import rope_write_kv
from inflight_kernels.ops.linear.head_linear import head_linear
from inflight_kernels.ops.linear.invariant_linear import invariant_linear
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from inflight_kernels.ops.linear.quantize_int8 import quantize_int8
from inflight_kernels.ops.linear.quantized_linear import Tile, prepare, quantized_linear
from inflight_kernels.ops.rms_norm import add_rms_norm_fp8
from inflight_kernels.ops.sampling.adjust_logits import adjust_logits
from inflight_kernels.ops.sampling.ban_tokens import ban_repeated_ngrams, ban_words
from inflight_kernels.ops.sampling.mask_logits import mask_logits
from inflight_kernels.ops.sampling.sample import sample
from inflight_kernels.ops.silu_mul import silu_mul

_INT32, _INT64 = torch.int32, torch.int64
_VOCABULARY = 256


class Step:
    """``num_rows`` requests; ``width`` counts what their texts take; ``shift`` elements lie before
    every small tensor."""

    def __init__(self, num_rows: int, width: int, shift: int) -> None:
        self.num_rows = num_rows
        self.width = width
        self._shift = shift

    def small(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor that need not be aligned."""
        size = torch.Size(shape).numel()
        return torch.empty(self._shift + size, dtype=dtype)[self._shift :].view(shape)

    def ids(self, *shape: int) -> torch.Tensor:
        """`small` of int32."""
        return self.small(*shape, dtype=_INT32)

    def places(self, *shape: int) -> torch.Tensor:
        """`small` of int64."""
        return self.small(*shape, dtype=_INT64)


def _context(step: Step) -> None:
    cache = torch.empty(4, 16, 2, 16)
    tables, lengths = step.ids(step.num_rows, step.width), step.ids(step.num_rows)
    query = torch.empty(step.num_rows + step.width, 4, 16)
    starts = step.ids(step.num_rows + 1)
    paged_attention_context(query, cache, cache, tables, starts, lengths, 0.1)


def _generation(step: Step, dtype: torch.dtype = torch.float32) -> None:
    cache = torch.empty(4, 16, 2, 16, dtype=dtype)
    tables, lengths = step.ids(step.num_rows, step.width), step.ids(step.num_rows)
    query = torch.empty(step.num_rows, 4, 16)
    paged_attention_generation(query, cache, cache, tables, lengths, 0.1)


def _generation_fp8(step: Step) -> None:
    _generation(step, torch.float8_e4m3fn)


def _rope(step: Step) -> None:
    fused, cache = torch.empty(step.num_rows, 8, 16), torch.empty(4, 16, 2, 16)
    query, key, value = fused.tensor_split((4, 6), dim=1)
    positions, slots = step.places(step.num_rows), step.places(step.num_rows)
    rope_write_kv(query, key, value, torch.empty(9, 16), positions, cache, cache, slots)


def _copy(step: Step) -> None:
    ids = step.ids(step.num_rows)
    for num_blocks in (9, 2**22):  # the second more numbers than 32 bits count; none is there
        cache = torch.empty(2, num_blocks, 16, 2, 16, device="meta")
        copy_blocks(cache, cache, ids.to("meta"), ids.to("meta"))


def _delta(step: Step) -> None:
    few, value = torch.empty(step.num_rows, 2, 16), torch.empty(step.num_rows, 4, 16)
    gates, slots = torch.empty(step.num_rows, 4), step.places(step.num_rows)
    delta_step(few, few, value, gates, gates, torch.empty(9, 4, 16, 16), slots, 1e-6)


def _sample(step: Step) -> None:
    logits, ids = torch.empty(step.num_rows, _VOCABULARY), step.ids(step.num_rows)
    numbers, places = step.small(step.num_rows, 6)[:, 1], step.places(step.num_rows)
    sample(logits, numbers, ids, numbers, places, places, numbers)


def _adjust(step: Step) -> None:
    logits, table = torch.empty(step.num_rows, _VOCABULARY), torch.empty(9, _VOCABULARY)
    rows = step.places(step.num_rows), step.small(step.num_rows)
    adjust_logits(logits, *rows, table, table.int(), step.small(step.num_rows, 3))


def _ban(step: Step) -> None:
    logits, history = torch.empty(step.num_rows, _VOCABULARY), torch.empty(9, 64, dtype=_INT32)
    lengths = step.places(step.num_rows)
    sizes = step.ids(step.num_rows)
    ban_repeated_ngrams(logits, lengths, lengths, sizes, history, step.width)
    words = torch.empty(step.num_rows, step.width, dtype=_INT32)
    of_words = torch.empty(step.num_rows, dtype=_INT32)
    ban_words(logits, step.ids(9), lengths, words, of_words, of_words, history)


def _mask(step: Step) -> None:
    masks = step.ids(step.num_rows, 2 + _VOCABULARY // 32)
    mask_logits(torch.empty(step.num_rows, _VOCABULARY), masks)


def _per_token(step: Step) -> None:
    x, weight = torch.empty(step.num_rows, 64), torch.empty(64)
    add_rms_norm_fp8(x, x, weight, 1e-5)
    silu_mul(x)
    quantize_fp8(x)
    invariant_linear(x, torch.empty(32, 64))


def _quantized(step: Step) -> None:
    """With the tile of few tokens, whose columns are split."""
    x, tile = torch.empty(step.num_rows, 256), Tile(16, 64, 32, 2, 4, 4)
    weight = prepare(torch.empty(64, 128, dtype=torch.uint8), torch.empty(64, 2), group_size=128)
    quantized_linear(x, weight, tile=tile)
    quantize_int8(x)


def _quantized_experts(step: Step) -> None:
    x, tile = torch.empty(step.num_rows, 256), Tile(16, 64, 32, 1, 4, 4)
    weight = prepare(torch.empty(64, 128, dtype=torch.uint8), torch.empty(64, 2), group_size=128)
    quantized_linear(x, weight, starts=step.ids(5), tile=tile)


def _heads(step: Step) -> None:
    """One tile of the two that loading compiles for."""
    values, scales = torch.empty(4 * 32, 64, dtype=torch.int8), torch.empty(4 * 32, 1)
    x = torch.empty(step.num_rows, 4, 24)[..., :16]
    head_linear(
        x, values, scales, group_size=64, by_rows=True, first_row=0, num_rows=16, tile_tokens=16
    )


OPS: tuple[Callable[[Step], None], ...] = (
    _context,
    _generation,
    _generation_fp8,
    _rope,
    _copy,
    _delta,
    _sample,
    _adjust,
    _ban,
    _mask,
    _per_token,
    _quantized,
    _quantized_experts,
    _heads,
)


def steps() -> Iterator[Step]:
    """Few and many requests, tables of a width that is 1, odd, and a multiple of 16."""
    for num_rows, width in ((1, 1), (2, 48), (3, 7), (16, 9), (300, 160), (1, 513)):
        for shift in (0, 1):
            yield Step(num_rows, width, shift)


def count_kernels() -> dict[str, int]:
    """For every kernel that a case launches: how many of it Triton would compile for all steps."""
    counts = Counter[str]()
    for op in OPS:
        with record_keys(90) as keys:
            for step in steps():
                op(step)
        counts.update(f"{op.__name__} {name}" for name, _ in keys)
    return counts
