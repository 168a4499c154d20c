"""Attention kernels side by side on the same tensors: ours, FlashAttention 3, SDPA, FlashInfer.

Every peer is made and asked once before it is timed, and must agree with our answer: what is
timed computes the same. A peer that is missing or fails has its reason in its column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gpu_parts.ceilings import time_seconds
from gpu_parts.common import Row, Setting

Call = Callable[[], Tensor]
_BLOCK = 64
_LIMIT = 2e-2  # ‖theirs - ours‖ / ‖ours‖: both round to bf16, and sum in another order


@dataclass(frozen=True)
class Batch:
    """A paged batch and how long its rows are; see `kernel_ops.paged_batch`."""

    heads: Any
    query_lens: list[int]
    context_lens: list[int]
    tensors: Any

    @property
    def is_generation(self) -> bool:
        """One new token per request."""
        return max(self.query_lens) == 1

    @property
    def scale(self) -> float:
        """Of the softmax."""
        return float(self.heads.head_dim**-0.5)


def rows(setting: Setting) -> Iterator[Row]:
    """K1 and K2 beside the peers; quick: a few shapes of each.

    FlashInfer comes last: it compiles when it is first used, which may outlast the part's time.
    """
    torch.manual_seed(0)
    for names in (("fa3", "sdpa"), ("flashinfer",)):
        yield from _beside(setting, names)


def _beside(setting: Setting, names: Sequence[str]) -> Iterator[Row]:
    paged = import_module("kernel_ops.paged_batch")
    shapes = [paged.TINY] if setting.is_dry else [paged.LLAMA_8B, paged.LLAMA_13B]
    for heads in shapes[:1] if setting.is_quick else shapes:
        for query_lens, context_lens in _works(setting):
            tensors = paged.make_batch(
                heads,
                query_lens,
                context_lens,
                tokens_per_block=16 if setting.is_dry else _BLOCK,
                cache_dtype=torch.bfloat16,
                device=setting.device,
            )
            yield _row(setting, Batch(heads, query_lens, context_lens, tensors), names)


def _works(setting: Setting) -> list[tuple[list[int], list[int]]]:
    """(query tokens, context) of the rows of each batch."""
    if setting.is_dry:
        return [([1, 1], [20, 5]), ([20, 9], [20, 9])]
    generation = [(1, 1024), (64, 1024), (256, 1024), (32, 4096), (8, 16_384)]
    works = [([1] * batch, [context] * batch) for batch, context in generation]
    works.append(([1] * 64, [16_384] + [256 + 37 * row for row in range(63)]))  # ragged
    works += [([2048], [2048]), ([1024] * 8, [1024] * 8), ([512] + [1] * 64, [512] + [1024] * 64)]
    return works[:3] + works[6:7] if setting.is_quick else works


def _row(setting: Setting, batch: Batch, names: Sequence[str]) -> Row:
    labels = {
        "shape": batch.heads.name,
        "kind": "generation" if batch.is_generation else "context",
        "query": _lengths(batch.query_lens),
        "context": _lengths(batch.context_lens),
    }
    ours = _ours(batch)
    expected = ours()
    row: Row = {**labels, **_timed(setting, "inflight", ours)}
    for name in names:
        try:
            call = _PEERS[name](batch)
            error = _distance(call(), expected)
            if not error <= _LIMIT:
                raise ArithmeticError(f"differs from ours by {error:.1e}")
            row.update(_timed(setting, name, call))
            row[f"{name}_agrees"] = True
        except Exception as error:  # a peer may fail in any way: the others go on
            row[name] = f"{type(error).__name__}: {error}"[:160]
    return row


def _lengths(lengths: list[int]) -> str:
    if len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]}"
    return f"{len(lengths)} of {min(lengths)}-{max(lengths)}"


def _timed(setting: Setting, name: str, call: Call) -> Row:
    seconds, note = time_seconds(setting, call)
    return {**setting.figures(**{f"{name}_us": 1e6 * seconds}), **note}


def _distance(out: Tensor, expected: Tensor) -> float:
    out, expected = out.float().reshape(expected.shape), expected.float()
    return float((out - expected).norm() / expected.norm())


def _ours(batch: Batch) -> Call:
    tensors = batch.tensors
    cache = (tensors.key_cache, tensors.value_cache, tensors.block_tables)
    if batch.is_generation:
        op = import_module("inflight_kernels.ops.attention.paged_attention_generation")
        return partial(
            op.paged_attention_generation,
            tensors.query, *cache, tensors.context_lengths, batch.scale,
        )  # fmt: skip
    op = import_module("inflight_kernels.ops.attention.paged_attention_context")
    return partial(
        op.paged_attention_context, tensors.query, *cache, tensors.query_starts,
        tensors.context_lengths, batch.scale, max_query_len=max(batch.query_lens),
    )  # fmt: skip


def _flash_attention_3(batch: Batch) -> Call:
    from peer_parts import flash_attention_3

    flash_attention_3.load()
    tensors = batch.tensors
    return partial(
        flash_attention_3.attend,
        tensors.query,
        tensors.key_cache,
        tensors.value_cache,
        tensors.query_starts,
        max(batch.query_lens),
        max(batch.context_lens),
        batch.scale,
        context_lengths=tensors.context_lengths,
        block_table=tensors.block_tables,
    )


def _flashinfer(batch: Batch) -> Call:
    """Planned once: its own engines plan once per step, not once per layer."""
    flashinfer = import_module("flashinfer")
    tensors, heads = batch.tensors, batch.heads
    size = tensors.key_cache.shape[1]
    counts = [-(-length // size) for length in batch.context_lens]
    device = tensors.query.device
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    indices = torch.cat(
        [tensors.block_tables[row, :count] for row, count in enumerate(counts)]
    ).int()
    last = torch.tensor([(length - 1) % size + 1 for length in batch.context_lens]).int().to(device)
    workspace = torch.empty(2**27, dtype=torch.uint8, device=device)
    cache = (tensors.key_cache, tensors.value_cache)
    if batch.is_generation:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=heads.num_heads > heads.num_kv_heads
        )
        decode.plan(
            starts, indices, last, heads.num_heads, heads.num_kv_heads, heads.head_dim, size,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=batch.scale,
        )  # fmt: skip
        return partial(decode.run, tensors.query, cache)
    context = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    context.plan(
        tensors.query_starts, starts, indices, last, heads.num_heads, heads.num_kv_heads,
        heads.head_dim, size, causal=True, sm_scale=batch.scale,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return partial(context.run, tensors.query, cache)


def _sdpa(batch: Batch) -> Call:
    """torch's, for whole prompts of one length: it knows no blocks, so they are laid out first."""
    if batch.query_lens != batch.context_lens or len(set(batch.query_lens)) > 1:
        raise ValueError("torch has no paged attention: it runs for whole prompts of one length")
    tensors, heads = batch.tensors, batch.heads
    count, length = len(batch.query_lens), batch.query_lens[0]

    def laid_out(cache: Tensor) -> Tensor:
        rows_ = [
            cache[table.long()].flatten(0, 1)[:length] for table in tensors.block_tables.unbind()
        ]
        return torch.stack(rows_).transpose(1, 2).contiguous()

    query = tensors.query.view(count, length, heads.num_heads, heads.head_dim).transpose(1, 2)
    keys, values = laid_out(tensors.key_cache), laid_out(tensors.value_cache)
    is_grouped = heads.num_heads > heads.num_kv_heads

    def attend() -> Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, is_causal=True, enable_gqa=is_grouped
        )
        return found.transpose(1, 2)

    return attend


_PEERS: dict[str, Callable[[Batch], Call]] = {
    "fa3": _flash_attention_3,
    "flashinfer": _flashinfer,
    "sdpa": _sdpa,
}
