"""Attention over a paged KV cache, for a ragged batch, in plain torch.

Sequences are put into groups of similar length, each group is gathered from the cache into one
padded tensor and handed to torch's fused attention. There is one pass per group, not per sequence:
lengths are rounded up to a power of two (with a floor) before grouping, so padding at most doubles
a group and a batch of similar requests is a single group. Everything that depends on lengths only
is in an `AttentionPlan`, made once and used for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

IntArray = npt.NDArray[np.int64]

# Below these, padding costs less than another pass.
_MIN_QUERY_BUCKET = 32
_MIN_CONTEXT_BUCKET = 256
_FP8_MAX = 448.0  # largest finite float8_e4m3fn
# Elements of one attention mask: 16 Mi (64 MiB in float32) bounds the memory of a long chunk.
_MAX_MASK_ELEMENTS = 2**24


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Store key and value [T, KVH, D] at ``slot_mapping`` [T] int64 of the caches, in place.

    A slot of -1 is skipped. A cache of float8_e4m3fn or int8 holds key / key_scale and
    value / value_scale.
    """
    if key_cache.itemsize == 1:
        key = to_bytes(key, key_scale, key_cache.dtype).view(torch.uint8)
        value = to_bytes(value, value_scale, key_cache.dtype).view(torch.uint8)
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.view(num_slots, *cache.shape[2:]).index_copy_(0, slot_mapping, new)


def paged_attention_generation(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence: query [B, H, D] -> [B, H, D].

    ``context_lengths`` [B] int32 counts the cached tokens with the new one, which is in the cache
    already. With a ``sliding_window`` only that many last tokens are seen, with a ``chunk`` only
    those of the same chunk of that many positions. `Weighting` says what the others do.
    """
    plan = plan_attention(
        block_tables,
        np.ones(len(query), dtype=np.int64),
        _to_numpy(context_lengths),
        key_cache.shape[1],
        sliding_window,
        chunk,
    )
    return plan.attend(query, key_cache, value_cache, Weighting(scale, softcap, sinks, slopes))


def paged_attention_context(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk of tokens per sequence: query [T, H, D] -> [T, H, D].

    The tokens of sequence ``s`` are rows ``query_starts[s] .. query_starts[s + 1]`` and are the
    last ones of its ``context_lengths[s]`` (cached before plus this chunk); their keys and values
    are in the cache already.
    """
    plan = plan_attention(
        block_tables,
        np.diff(_to_numpy(query_starts)),
        _to_numpy(context_lengths),
        key_cache.shape[1],
        sliding_window,
        chunk,
    )
    return plan.attend(query, key_cache, value_cache, Weighting(scale, softcap, sinks, slopes))


@dataclass(frozen=True, slots=True)
class Weighting:
    """From products of query and key to weights: ``softmax(cap(scale * q . k) + bias)``.

    ``softcap``: ``cap(s) = softcap * tanh(s / softcap)`` (Gemma 2). ``sinks`` [H] float32: a score
    of each head that joins the softmax and is dropped from it (gpt-oss). ``slopes`` [H] float32:
    the bias is ``slope * (key position - query position)`` (ALiBi). ``key_scale`` and
    ``value_scale`` multiply what a cache of float8_e4m3fn or int8 holds. ``relative_bias``
    [H, 2 * m + 1] float32: the bias of a key at distance ``d = key position - query position`` is
    that of column ``m + d``, of the first or last one beyond these (T5).
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    relative_bias: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if torch's fused attention computes it."""
        others = (self.softcap, self.sinks, self.slopes, self.relative_bias)
        return all(each is None for each in others)


@dataclass(slots=True)
class _Group:
    """Sequences of similar length, padded to ``num_queries`` rows and ``num_keys`` keys each.

    ``token_rows`` is a slice when the tokens lie side by side with nothing to pad, else [n * q]
    indices; ``flat_rows`` and ``valid_tokens`` then say which padded rows go back where.
    """

    size: int
    num_queries: int
    token_rows: slice | Tensor
    flat_rows: Tensor | None
    valid_tokens: Tensor | None
    blocks: list[Tensor]  # [size * num_blocks] block ids, by each of the block tables
    query_positions: Tensor  # [size, num_queries]
    key_positions: Tensor  # [size, num_keys]
    is_causal: bool  # fresh prompts: key i is position i, no mask needed
    window: int | None
    chunk: int | None
    needs_mask: bool
    mask: Tensor | None = None  # for the whole group, reused by all layers
    buffers: tuple[Tensor, Tensor] | None = None  # gathered keys and values, reused by all layers


@dataclass(slots=True)
class AttentionPlan:
    """What all layers of one step share; `attend` runs one layer."""

    groups: list[_Group]

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        weighting: Weighting,
        own: tuple[Tensor, Tensor] | None = None,
        table: int = 0,
    ) -> Tensor:
        """Attention of query [T, H, D], contiguous answer of the same shape.

        ``table``: by which of the block tables the caches are read. ``own``: keys and values
        [T, KVH, D] of the same tokens, in the dtype of the caches. A prompt that is computed as a
        whole then reads these, and nothing from the caches.
        """
        if len(self.groups) == 1 and isinstance(self.groups[0].token_rows, slice):
            group = self.groups[0]
            return _attend_group(group, query, key_cache, value_cache, weighting, own, table)
        answer = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self.groups:
            rows = _attend_group(group, query, key_cache, value_cache, weighting, own, table)
            if group.flat_rows is None or group.valid_tokens is None:
                answer[group.token_rows] = rows
            else:
                answer.index_copy_(0, group.valid_tokens, rows.index_select(0, group.flat_rows))
        return answer


def plan_attention(
    block_tables: Tensor,
    query_lengths: IntArray,
    context_lengths: IntArray,
    tokens_per_block: int,
    sliding_window: int | None = None,
    chunk: int | None = None,
    is_causal: bool = True,
    further_tables: Sequence[Tensor] = (),
) -> AttentionPlan:
    """Group sequences whose packed queries follow each other in the order of ``block_tables``.

    block_tables: [S, max_blocks] on the device, and like it ``further_tables``, of layers that see
    the same of other blocks; query_lengths, context_lengths: [S] on the host,
    both at least 1, a context never shorter than its queries. Without ``is_causal`` each query sees
    the whole context, which is another text and may be shorter.
    """
    starts = np.concatenate(([0], np.cumsum(query_lengths)))[:-1]
    is_fresh = (query_lengths == context_lengths) & is_causal
    keys = np.stack(
        (
            _bucket(query_lengths, _MIN_QUERY_BUCKET) * (query_lengths > 1),
            _bucket(context_lengths, _MIN_CONTEXT_BUCKET),
            is_fresh & (query_lengths > 1),
        ),
        axis=1,
    )
    groups = []
    for rows in _equal_rows(keys):
        groups.append(
            _plan_group(
                [block_tables, *further_tables],
                rows,
                starts[rows],
                query_lengths[rows],
                context_lengths[rows],
                tokens_per_block,
                sliding_window,
                chunk,
                is_causal=is_causal,
            )
        )
    return AttentionPlan(groups)


def _plan_group(
    block_tables: Sequence[Tensor],
    rows: IntArray,
    starts: IntArray,
    query_lengths: IntArray,
    context_lengths: IntArray,
    tokens_per_block: int,
    window: int | None,
    chunk: int | None,
    *,
    is_causal: bool,
) -> _Group:
    device = block_tables[0].device
    num_queries = int(query_lengths.max())
    first_positions = context_lengths - query_lengths
    # Padded rows repeat the last token, so that no row of the mask is empty.
    steps = np.minimum(np.arange(num_queries), query_lengths[:, None] - 1)  # [n, q]
    query_positions = first_positions[:, None] + steps
    if not is_causal:  # all stand at the end
        query_positions = context_lengths[:, None] - 1 + steps * 0
    first_seen = first_positions * 0 if window is None else first_positions - window + 1
    if chunk is not None:
        first_seen = np.maximum(first_seen, first_positions // chunk * chunk)
    first_blocks = np.maximum(first_seen, 0) // tokens_per_block
    last_blocks = (context_lengths - 1) // tokens_per_block
    num_blocks = int((last_blocks - first_blocks).max()) + 1
    # Past its end a sequence reads its own last block again: never another one's memory, which
    # may hold a NaN that no mask can hide.
    entries = np.minimum(first_blocks[:, None] + np.arange(num_blocks), last_blocks[:, None])
    offsets = np.arange(num_blocks * tokens_per_block)
    key_positions = first_blocks[:, None] * tokens_per_block + offsets
    flat_rows = valid_tokens = None
    is_packed = bool((query_lengths == num_queries).all() and (np.diff(rows) == 1).all())
    token_rows: slice | Tensor
    if is_packed:
        token_rows = slice(int(starts[0]), int(starts[0]) + len(rows) * num_queries)
    else:
        tokens = starts[:, None] + steps
        is_valid = np.arange(num_queries) < query_lengths[:, None]
        token_rows = torch.from_numpy(tokens.reshape(-1)).to(device)
        flat_rows = torch.from_numpy(np.flatnonzero(is_valid)).to(device)
        valid_tokens = torch.from_numpy(tokens[is_valid]).to(device)
    if len(rows) < len(block_tables[0]):
        block_tables = [each[rows.tolist()] for each in block_tables]
    places = torch.from_numpy(entries).to(device)
    is_causal = is_causal and num_queries > 1 and bool((first_positions == 0).all())
    is_causal = is_causal and min(window or num_queries, chunk or num_queries) >= num_queries
    is_exact = num_queries == 1 and context_lengths.min() == key_positions.shape[1]
    return _Group(
        size=len(rows),
        num_queries=num_queries,
        token_rows=token_rows,
        flat_rows=flat_rows,
        valid_tokens=valid_tokens,
        blocks=[each.gather(1, places).reshape(-1) for each in block_tables],
        query_positions=torch.from_numpy(query_positions).to(device),
        key_positions=torch.from_numpy(key_positions).to(device),
        is_causal=is_causal,
        window=window,
        chunk=chunk,
        needs_mask=not is_causal and not (is_exact and window is None and chunk is None),
    )


def _attend_group(
    group: _Group,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    weighting: Weighting,
    own: tuple[Tensor, Tensor] | None,
    table: int,
) -> Tensor:
    """Attention of one group, its padded rows packed: [size * num_queries, H, D]."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    if own is not None and group.is_causal:
        found = own[0][group.token_rows], own[1][group.token_rows]
    else:
        found = _gather(group, group.blocks[table], key_cache, value_cache)
        if key_cache.itemsize == 1:
            found = (
                from_bytes(found[0], weighting.key_scale, query.dtype),
                from_bytes(found[1], weighting.value_scale, query.dtype),
            )
    keys, values = (
        each.view(group.size, -1, num_kv_heads, each.shape[-1]).transpose(1, 2) for each in found
    )  # [n, KVH, L, D]
    if group.is_causal:
        keys, values = keys[:, :, : group.num_queries], values[:, :, : group.num_queries]
    queries = query[group.token_rows]
    if group.num_queries == 1 and weighting.is_plain:
        # The query heads of one KV head stand where query tokens stand: nothing is repeated.
        queries = queries.reshape(group.size, num_kv_heads, -1, head_dim)
        mask = _mask(group, slice(None), query.dtype) if group.needs_mask else None
        rows = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=weighting.scale
        )
        return rows.reshape(group.size, num_heads, -1)
    queries = queries.reshape(group.size, group.num_queries, num_heads, head_dim).transpose(1, 2)
    attend = _attend_fused if weighting.is_plain else _attend_written_out
    tiles = [
        attend(group, tile, queries[:, :, tile], keys, values, weighting)
        for tile in _query_tiles(group, 1 if weighting.is_plain else num_heads)
    ]
    rows = torch.cat(tiles, dim=2) if len(tiles) > 1 else tiles[0]
    return rows.transpose(1, 2).reshape(-1, num_heads, values.shape[-1])


def _attend_fused(
    group: _Group, tile: slice, queries: Tensor, keys: Tensor, values: Tensor, weighting: Weighting
) -> Tensor:
    """queries [n, H, q, D] of a tile -> [n, H, q, D] by torch's fused attention."""
    return functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=_mask(group, tile, queries.dtype) if group.needs_mask else None,
        is_causal=group.is_causal,
        scale=weighting.scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def _attend_written_out(
    group: _Group, tile: slice, queries: Tensor, keys: Tensor, values: Tensor, weighting: Weighting
) -> Tensor:
    """The same with every kind of `Weighting`; scores and weights are float32."""
    size, num_heads, num_queries, _ = queries.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    queries = queries.reshape(size, num_kv_heads, -1, num_queries, queries.shape[-1])
    scores = (queries @ keys[:, :, None].transpose(-1, -2)).float() * weighting.scale
    if weighting.softcap is not None:
        scores = weighting.softcap * torch.tanh(scores / weighting.softcap)
    if weighting.slopes is not None:
        distance = group.key_positions[:, None] - group.query_positions[:, tile, None]
        slopes = weighting.slopes.view(num_kv_heads, -1, 1, 1)
        scores += slopes * distance[:, None, None, :, :num_keys]
    if weighting.relative_bias is not None:
        found = relative_bias(
            weighting.relative_bias, group.query_positions[:, tile], group.key_positions
        )
        scores += found[..., :num_keys].reshape(size, num_kv_heads, -1, num_queries, num_keys)
    if group.needs_mask or group.is_causal:
        scores += _mask(group, tile, torch.float32)[:, :, None, :, :num_keys]
    if weighting.sinks is not None:
        sinks = weighting.sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    answer = weights.to(values.dtype) @ values[:, :, None]
    return answer.reshape(size, num_heads, num_queries, -1)


def relative_bias(table: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What is added to scores: table [H, 2 * m + 1] of `Weighting` at the distances between query
    [n, q] and key [n, k] positions -> [n, H, q, k]."""
    most = table.shape[1] // 2
    distance = (keys[:, None] - queries[..., None]).clamp(-most, most) + most
    return table[:, distance].transpose(0, 1)


def _gather(
    group: _Group, blocks: Tensor, key_cache: Tensor, value_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Copy ``blocks`` of the group side by side; fresh memory costs page faults, so once."""
    if group.buffers is None:
        shape = (len(blocks), *key_cache.shape[1:])
        group.buffers = key_cache.new_empty(shape), value_cache.new_empty(shape)
    keys, values = group.buffers
    for cache, gathered in ((key_cache, keys), (value_cache, values)):
        if cache.itemsize == 1:  # torch has few operations on FP8
            cache, gathered = cache.view(torch.uint8), gathered.view(torch.uint8)
        torch.index_select(cache, 0, blocks, out=gathered)
    return keys, values


def to_bytes(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale in float8_e4m3fn or int8: to the nearest number there is, ties to even."""
    x = x.float() / scale
    if dtype == torch.int8:
        return x.round_().clamp_(-128, 127).to(dtype)
    return x.clamp_(-_FP8_MAX, _FP8_MAX).to(dtype)


def from_bytes(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x * scale in ``dtype``, by a table: torch's own conversion takes five times as long."""
    codes = torch.arange(256, dtype=torch.int16, device=x.device).to(torch.uint8).view(x.dtype)
    numbers = (codes.float() * scale).to(dtype)
    places = x.view(torch.uint8).flatten().to(torch.int32)
    return numbers.index_select(0, places).view(x.shape)


def _query_tiles(group: _Group, num_heads: int) -> Iterator[slice]:
    """Cuts the queries so that masks, or scores of ``num_heads`` heads, stay small."""
    tile = max(1, _MAX_MASK_ELEMENTS // (group.key_positions.numel() * num_heads))
    if tile >= group.num_queries or (group.is_causal and num_heads == 1):
        yield slice(None)
        return
    for start in range(0, group.num_queries, tile):
        yield slice(start, start + tile)


def _mask(group: _Group, tile: slice, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 where a query may look, else -inf.

    [size, 1, queries of the tile, num_keys]; that of a whole group is kept for the next layers.
    """
    if group.mask is not None:
        return group.mask
    positions = group.query_positions[:, tile, None]
    distance = positions - group.key_positions[:, None]
    is_seen = distance >= 0
    if group.window is not None:
        is_seen &= distance < group.window
    if group.chunk is not None:
        is_seen &= group.key_positions[:, None] >= positions // group.chunk * group.chunk
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
    mask = mask.masked_fill_(~is_seen, -torch.inf)[:, None]
    if tile == slice(None):
        group.mask = mask
    return mask


def _bucket(lengths: IntArray, floor: int) -> IntArray:
    """Lengths rounded up to a power of two, at least ``floor``."""
    exponents = np.ceil(np.log2(np.maximum(lengths, floor)))
    return np.asarray(2**exponents, dtype=np.int64)


def _equal_rows(keys: IntArray) -> Iterator[IntArray]:
    """Indices of the rows of ``keys`` that are equal, one array per distinct row."""
    if (keys == keys[0]).all():
        yield np.arange(len(keys))
        return
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    for group in range(int(inverse.max()) + 1):
        yield np.flatnonzero(inverse == group)


def _to_numpy(lengths: Tensor) -> IntArray:
    return np.asarray(lengths.cpu().numpy(), dtype=np.int64)
