"""What a layer's heads are, how they are normed and turned, and what they see: for all that attends
or writes the cache."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from torch import Tensor

from inflight_kernels.cpu.intrinsics import FAST, array_at, get, prefetch_at, put, rounded


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What stays the same of a layer. ``cos_sin`` [positions, D] float32, None: heads do not turn.
    ``query_norm`` and ``key_norm`` [D]: RMS norms of heads, before they turn or after it.
    ``has_values``: without, keys are the values; ``has_own``: without, nothing is written."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    cos_sin: Tensor | None = None
    slopes: Tensor | None = None
    norm_eps: float = 0.0
    is_norm_after_rope: bool = False
    has_values: bool = True
    has_own: bool = True

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether heads of ``dtype`` (float32 or bfloat16) are made of whole words of 32 bits."""
        return dtype == torch.float32 or self.head_dim % 2 == 0


@njit(**FAST)
def _norm(head, weight, eps, like):
    """A head [D] normed over itself, rounded as in memory."""
    squares = np.float32(0.0)
    for i in range(len(head)):
        squares += head[i] * head[i]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(head)) + np.float32(eps))
    for i in range(len(head)):
        head[i] = rounded(rounded(head[i] * scale, like) * get(weight, i), like)


@njit(**FAST)
def _turn(head, cos_sin):
    half = len(head) // 2
    for i in range(half):
        low, high = head[i], head[half + i]
        cos, sin = cos_sin[i], cos_sin[half + i]
        head[i] = low * cos - high * sin
        head[half + i] = high * cos + low * sin


@njit(**FAST)
def prepare(address, norm_weight, table, position, eps, is_norm_last, head, like):
    """The head at ``address`` widened, normed and turned, into ``head``."""
    size = len(head)
    stored = array_at(address, size, like)
    for i in range(size):
        head[i] = get(stored, i)
    if norm_weight != 0 and not is_norm_last:
        _norm(head, array_at(norm_weight, size, np.float32(0)), eps, like)
    if table != 0:
        _turn(head, array_at(table + position * size * 4, size, np.float32(0)))
    if norm_weight != 0 and is_norm_last:
        _norm(head, array_at(norm_weight, size, np.float32(0)), eps, like)
    for i in range(size):
        head[i] = rounded(head[i], like)


@njit(**FAST)
def write(head, address, like):
    """A head into memory, rounded."""
    stored = array_at(address, len(head), like)
    for i in range(len(head)):
        put(stored, i, head[i])


@njit(**FAST)
def first_seen(window, chunk, position):
    """The first position that a query sees."""
    first = 0
    if window > 0:
        first = max(position - window + 1, first)
    if chunk > 0:
        first = max(position // chunk * chunk, first)
    return first


@njit(**FAST)
def place_of(call, table, kv_head, position, width):
    """How far the key of a position is from the first of the cache."""
    block = np.int64(table[position // call.tokens_per_block])
    at = block * call.block_stride + position % call.tokens_per_block * call.token_stride
    return at + kv_head * call.size * width


@njit(**FAST)
def fetch_block(call, cache, table, kv_head, position, end, width):
    """Read the rest of a block into the caches, up to ``end``; lines of a head are too far apart
    for the CPU to guess them."""
    if position < end:
        per_block = call.tokens_per_block
        row = cache + place_of(call, table, kv_head, position, width)
        for _ in range(min(per_block - position % per_block, end - position)):
            for line in range(0, call.size * width, 64):
                prefetch_at(row + line)
            row += call.token_stride
