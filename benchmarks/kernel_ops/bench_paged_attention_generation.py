"""Generation attention (K1): GB/s over batch, context, GQA and MHA, bfloat16 and FP8 cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from inflight_kernels.ops.attention.paged_attention_generation import (
    GenerationTile,
    choose_tile,
    paged_attention_generation,
    plan_generation,
)
from kernel_ops.harness import Call, Row, Setting
from kernel_ops.paged_batch import (
    HEAD_512,
    LATENTS,
    LLAMA_8B,
    LLAMA_13B,
    TINY,
    Heads,
    PagedBatch,
    make_batch,
)

# More would not fit beside the weights either: 48 GiB of cache per row of the table.
_MAX_CACHE_BYTES = 48 * 2**30
_BLOCK = 64
# Tokens of a block if nobody says otherwise: half a tile. At these (batch, context) it is measured
# beside blocks of a whole one; as is the layout with heads first, in which a tile is one piece of
# memory instead of one for each token. Both run the code that is compiled for the others.
_DEFAULT_BLOCK, _COMPARED_AT = 32, {(1, 1024), (64, 1024), (256, 1024), (8, 16_384)}
# Tokens that tables have room for: as in a recorded step, which may meet rows so long. It has
# programs for them, which leave at once.
_ROOM = (8192, 131_072)
# Beside the splits chosen for a shape, in a sweep: as many per row, whatever the batch.
_SPLITS, _LEAST_PROGRAMS, _MOST_PROGRAMS = (1, 2, 4, 8, 16, 32), 64, 8192
# What a sweep tries beside the chosen tile, most promising first by the code compiled for sm_90
# (docs/gpu.md): tokens, stages, warps. By cache: plain, FP8. Four stages compile to three's code.
RANKED = (
    ((128, 3, 4), (32, 5, 4), (64, 3, 4), (64, 5, 8), (32, 5, 2)),
    ((64, 5, 4), (64, 3, 4), (64, 3, 2), (32, 5, 2), (128, 3, 4), (32, 5, 4)),
)


def rows(setting: Setting) -> Iterator[Row]:
    """Uniform batches over the matrix, then ragged ones."""
    shapes = [TINY] if setting.is_dry else [LLAMA_8B, LLAMA_13B, LATENTS, HEAD_512]
    contexts = [70] if setting.is_dry else [256, 1024, 4096, 16384]
    batches = [1, 2] if setting.is_dry else [1, 8, 32, 64, 128, 256]
    for heads in shapes:
        is_wide = heads.head_dim > 256
        for dtype in heads.cache_types:
            for context in contexts:
                for batch in batches:
                    lengths = [context] * batch
                    if not setting.is_wanted(batch, context):
                        continue
                    if is_wide and (batch, context) not in _COMPARED_AT:
                        continue
                    if _cache_bytes(heads, lengths, dtype) > _MAX_CACHE_BYTES:
                        continue
                    yield from _variants(setting, heads, lengths, dtype, "uniform")
                    if (batch, context) in _COMPARED_AT and heads == LLAMA_8B:
                        yield from _compared(setting, heads, lengths, dtype)
        longest = contexts[-1]
        ragged = [longest] + [contexts[0] + 37 * row % 1000 for row in range(batches[-1] - 1)]
        if setting.is_wanted(batches[-1], longest) and not is_wide:
            yield from _variants(setting, heads, ragged, torch.bfloat16, "ragged")


def _compared(
    setting: Setting, heads: Heads, lengths: list[int], dtype: torch.dtype
) -> Iterator[Row]:
    """The same work in other blocks, layouts and tables; the last two run what is compiled already
    and are left out of a sweep of tiles."""
    uniform = partial(_variants, setting, heads, lengths, dtype, "uniform")
    yield from uniform(block=_DEFAULT_BLOCK)
    if not setting.has_sweep:
        yield from uniform(has_heads_first=True)
        for room in _ROOM:
            yield from uniform(room=room)


def _cache_bytes(heads: Heads, lengths: list[int], dtype: torch.dtype) -> int:
    return sum(lengths) * heads.numbers_per_token * dtype.itemsize


def _variants(
    setting: Setting,
    heads: Heads,
    lengths: list[int],
    dtype: torch.dtype,
    kind: str,
    *,
    block: int = _BLOCK,
    has_heads_first: bool = False,
    room: int = 0,
) -> Iterator[Row]:
    batch = make_batch(
        heads,
        [1] * len(lengths),
        lengths,
        tokens_per_block=block,
        cache_dtype=dtype,
        device=setting.device,
        has_heads_first=has_heads_first,
    )
    tables = batch.block_tables
    if room:
        tables = functional.pad(tables, (0, max(0, room // block - tables.shape[1])))
    paged = (batch.query, batch.key_cache, batch.value_cache, tables)
    chosen = choose_tile(heads.head_dim, dtype, heads.num_heads // heads.num_kv_heads)
    ranked = RANKED[dtype == torch.float8_e4m3fn] if setting.has_sweep else ()
    tiles = dict.fromkeys((chosen, *(GenerationTile(*fields) for fields in ranked)))
    tried: list[tuple[GenerationTile, int | None]] = [(tile, None) for tile in tiles]
    if setting.has_sweep and kind == "uniform":
        programs = len(lengths) * heads.num_kv_heads
        tried += [(chosen, count) for count in _SPLITS
                  if _LEAST_PROGRAMS <= programs * count <= _MOST_PROGRAMS]  # fmt: skip
    for tile, num_splits in tried:
        plan = partial(
            plan_generation,
            heads.num_heads,
            batch.key_cache,
            tables,
            batch.context_lengths,
            num_splits=num_splits,
            tile=tile,
        )
        attend = partial(
            paged_attention_generation,
            *paged,
            batch.context_lengths,
            heads.head_dim**-0.5,
            tile=tile,
        )
        call = _planned(plan, attend)
        parameters: dict[str, object] = {
            "shape": heads.name,
            "batch": len(lengths),
            "context": max(lengths),
            "kind": kind,
            "cache": str(dtype).removeprefix("torch."),
            "tile": (tile.block_n, tile.stages, tile.num_warps),
            "chosen": tile == chosen and num_splits is None,
            "block": block,
        }
        if has_heads_first:
            parameters["layout"] = "heads first"
        if room:
            parameters["room"] = room
        if num_splits is not None:
            parameters["splits"] = num_splits
        size = _cache_bytes(heads, lengths, dtype)
        flops = 4 * sum(lengths) * heads.num_heads * heads.head_dim
        wants_peer = bool(parameters["chosen"]) and kind == "uniform" and block == _BLOCK
        wants_peer = wants_peer and dtype == torch.bfloat16 and not (has_heads_first or room)
        baselines = {"sdpa": _sdpa(batch, heads, lengths)} if wants_peer else {}
        yield Row(parameters, call, size, flops, baselines)


def _planned(plan: Callable[[], object], attend: Callable[..., object]) -> Call:
    """A call of what a layer runs: its work is planned at the first one, as once per step."""
    work: list[object] = []

    def call() -> object:
        if not work:
            work.append(plan())
        return attend(work=work[0])

    return call


def _sdpa(batch: PagedBatch, heads: Heads, lengths: list[int]) -> Call:
    """torch's attention over the same numbers lying contiguously: no paging to pay for."""
    shape = (len(lengths), lengths[0], heads.num_kv_heads, heads.head_dim)
    size = (batch.block_tables.shape[0], -1, heads.num_kv_heads, heads.head_dim)
    values = batch.key_cache if batch.value_cache is None else batch.value_cache
    key, value = (
        cache.reshape(size)[:, : lengths[0]].reshape(shape).transpose(1, 2)
        for cache in (batch.key_cache, values)
    )
    query = batch.query[:, :, None]  # [B, H, 1, D]
    is_gqa = heads.num_heads != heads.num_kv_heads
    return partial(functional.scaled_dot_product_attention, query, key, value, enable_gqa=is_gqa)
