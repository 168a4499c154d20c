"""Context attention against attention written out: ragged chunks, cached prefixes, padding."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from typing import Any

import pytest
import torch
from support.paged import (
    WEIGHTINGS,
    PagedCache,
    assert_attention_close,
    attention_oracle,
    make_cache,
)

from inflight_kernels import reference
from inflight_kernels.ops.attention.paged_attention_context import (
    ContextTile,
    paged_attention_context,
)
from inflight_kernels.ops.attention.paged_attention_generation import paged_attention_generation


def starts_of(query_lens: list[int], device: torch.device) -> torch.Tensor:
    """[S + 1] int32."""
    return torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device)


def expected_tokens(
    query: torch.Tensor,
    query_lens: list[int],
    cache: PagedCache,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """[T, H, D] float32; zeros for padding tokens."""
    out = torch.zeros_like(query, dtype=torch.float32)
    start = 0
    for row, num_tokens in enumerate(query_lens):
        chunk = slice(start, start + num_tokens)
        if num_tokens:
            out[chunk] = attention_oracle(
                query[chunk], cache, row, scale, sliding_window, softcap, **options
            )
        start += num_tokens
    return out


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "tokens_per_block", "dtype", "block_m"),
    [
        (8, 2, 64, 16, torch.float32, None),
        (4, 4, 128, 32, torch.bfloat16, None),
        (4, 1, 80, 64, torch.float16, 64),
        (3, 1, 96, 64, torch.bfloat16, 32),
        (2, 1, 256, 16, torch.bfloat16, None),
        (7, 1, 64, 48, torch.float32, 64),
        (40, 1, 288, 32, torch.bfloat16, None),
        (4, 2, 512, 16, torch.float32, None),
    ],
)
def test_ragged_chunks_over_cached_blocks(
    device: torch.device,
    generator: torch.Generator,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tokens_per_block: int,
    dtype: torch.dtype,
    block_m: int | None,
) -> None:
    """Whole prompts, chunks behind a cached prefix, single tokens, an empty row, padding."""
    block = tokens_per_block
    query_lens = [1, block - 1, 0, block + 1, 3, 140]
    cached = [0, 0, 5, block, 2 * block + 1, 61]
    cache = make_cache(
        generator,
        [new + old for new, old in zip(query_lens, cached, strict=True)],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tokens_per_block=tokens_per_block,
        dtype=dtype,
        device=device,
    )
    num_tokens = sum(query_lens) + 37
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(device, dtype)
    scale = head_dim**-0.5
    out = paged_attention_context(
        query,
        *cache.memory,
        starts_of(query_lens, device),
        cache.lengths,
        scale,
        tile=ContextTile(block_m, 32, 2, 4) if block_m else None,
    )
    assert out.dtype == dtype
    expected = expected_tokens(query, query_lens, cache, scale)
    assert_attention_close(out, expected)
    assert not out[sum(query_lens) :].any()


@pytest.mark.slow
def test_keys_that_are_the_values(device: torch.device, generator: torch.Generator) -> None:
    """As of latents; heads share programs by 64."""
    query_lens, lengths = [3, 1, 40], [3, 90, 50]
    cache = make_cache(
        generator,
        lengths,
        num_kv_heads=1,
        head_dim=576,
        tokens_per_block=32,
        dtype=torch.bfloat16,
        device=device,
    )
    keys, starts = cache.key, starts_of(query_lens, device)
    query = torch.randn(sum(query_lens), 128, 576, generator=generator).to(device, torch.bfloat16)
    paged = (cache.block_tables, starts, cache.lengths, 0.04)
    out = paged_attention_context(query, keys, None, *paged)
    assert torch.equal(out, paged_attention_context(query, keys, keys, *paged))
    latents = PagedCache(keys, keys, cache.block_tables, cache.lengths)
    assert_attention_close(out, expected_tokens(query, query_lens, latents, 0.04))


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_equals_the_reference(
    device: torch.device, generator: torch.Generator, sliding_window: int | None
) -> None:
    query_lens, lengths = [32, 33, 1, 70], [32, 50, 90, 134]
    cache = make_cache(
        generator, lengths, num_kv_heads=2, head_dim=64, tokens_per_block=32, device=device
    ).without_nan()
    query = torch.randn(sum(query_lens), 4, 64, generator=generator).to(device)
    starts = starts_of(query_lens, device)
    paged = (*cache.memory, starts, cache.lengths, 0.125)
    out = paged_attention_context(query, *paged, sliding_window)
    expected = reference.paged_attention_context(query, *paged, sliding_window)
    assert_attention_close(out, expected)


@pytest.mark.fast(3)
@pytest.mark.parametrize("sliding_window", [1, 50, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_window_and_softcap(
    device: torch.device,
    generator: torch.Generator,
    sliding_window: int,
    softcap: float | None,
) -> None:
    query_lens, cached = [130, 3, 65], [70, 0, 300]
    cache = make_cache(
        generator,
        [new + old for new, old in zip(query_lens, cached, strict=True)],
        num_kv_heads=1,
        head_dim=64,
        tokens_per_block=32,
        device=device,
    )
    query = torch.randn(198, 2, 64, generator=generator).to(device)
    out = paged_attention_context(
        query,
        *cache.memory,
        starts_of(query_lens, device),
        cache.lengths,
        0.3,
        sliding_window,
        softcap,
        tile=ContextTile(64, 32, 2, 4),
    )
    expected = expected_tokens(query, query_lens, cache, 0.3, sliding_window, softcap)
    assert_attention_close(out, expected)


@pytest.mark.fast(4)
@pytest.mark.parametrize("op", [paged_attention_context, reference.paged_attention_context])
@pytest.mark.parametrize("options", WEIGHTINGS.values(), ids=WEIGHTINGS)
def test_weightings(
    device: torch.device, generator: torch.Generator, options: dict[str, Any], op: Any
) -> None:
    """Of whole prompts, later chunks and single tokens, by kernel and reference."""
    query_lens, lengths = [50, 1, 33, 40], [50, 90, 133, 40]
    cache = make_cache(
        generator, lengths, num_kv_heads=2, head_dim=32, tokens_per_block=16, device=device
    ).without_nan()
    query = torch.randn(sum(query_lens), 4, 32, generator=generator).to(device)
    options = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    out = op(query, *cache.memory, starts_of(query_lens, device), cache.lengths, 0.3, **options)
    assert_attention_close(out, expected_tokens(query, query_lens, cache, 0.3, **options))


def test_single_tokens_equal_generation(device: torch.device, generator: torch.Generator) -> None:
    """A mixed batch may run its generation rows here; the hint chooses a small tile."""
    cache = make_cache(
        generator, [1, 16, 17, 200], num_kv_heads=2, head_dim=64, tokens_per_block=16, device=device
    )
    query = torch.randn(4, 8, 64, generator=generator).to(device)
    paged = cache.memory
    starts = starts_of([1] * 4, device)
    out = paged_attention_context(query, *paged, starts, cache.lengths, 0.125, max_query_len=1)
    alone = paged_attention_generation(query, *paged, cache.lengths, 0.125)
    assert_attention_close(out, alone)


@pytest.mark.parametrize(("kind", "scale"), [(torch.float8_e4m3fn, 0.5), (torch.int8, 0.03)])
def test_cache_of_8_bits(
    device: torch.device, generator: torch.Generator, kind: torch.dtype, scale: float
) -> None:
    cache = make_cache(
        generator, [90], num_kv_heads=1, head_dim=64, tokens_per_block=32, device=device
    )
    query = torch.randn(40, 4, 64, generator=generator).to(device, torch.bfloat16)
    narrow, read_back = cache.narrowed(kind, scale, scale / 2)
    out = paged_attention_context(
        query,
        *narrow.memory,
        starts_of([40], device),
        cache.lengths,
        0.125,
        key_scale=scale,
        value_scale=scale / 2,
    )
    expected = expected_tokens(query, [40], read_back, 0.125)
    assert_attention_close(out, expected)


def test_both_kinds_of_a_mixed_step_write_to_one_answer(
    device: torch.device, generator: torch.Generator
) -> None:
    cache = make_cache(
        generator, [20, 33], num_kv_heads=1, head_dim=64, tokens_per_block=16, device=device
    )
    query = torch.randn(8, 2, 64, generator=generator).to(device)
    out = torch.full_like(query, torch.nan)
    keys, values, tables = cache.memory
    first = (query[:7], keys, values, tables[:1], starts_of([7], device), cache.lengths[:1], 0.125)
    assert paged_attention_context(*first, out=out[:7]).data_ptr() == out.data_ptr()
    rest = (query[7:], keys, values, tables[1:], cache.lengths[1:], 0.125)
    paged_attention_generation(*rest, out=out[7:])
    assert_attention_close(out, expected_tokens(query, [7, 1], cache, 0.125))


@pytest.mark.parametrize("num_before", [0, 3, 37])
def test_tokens_before_the_first_chunk_are_somebody_elses(
    device: torch.device, generator: torch.Generator, num_before: int
) -> None:
    """Tiles of 8 tokens; a chunk that is not there, and padding behind the last one."""
    query_lens, lengths = [9, 0, 20], [25, 8, 20]
    cache = make_cache(
        generator, lengths, num_kv_heads=1, head_dim=64, tokens_per_block=16, device=device
    )
    query = torch.randn(num_before + 40, 4, 64, generator=generator).to(device)
    starts = starts_of(query_lens, device) + num_before
    out = torch.full_like(query, 7.0)
    tile = ContextTile(32, 16, 2, 4)
    paged_attention_context(
        query, *cache.memory, starts, cache.lengths, 0.125, tile=tile, out=out
    )  # fmt: skip
    assert bool((out[:num_before] == 7.0).all())
    expected = expected_tokens(query[num_before:], query_lens, cache, 0.125)
    assert_attention_close(out[num_before:], expected)


@pytest.mark.parametrize(("group", "num_kv_heads"), [(64, 1), (64, 2), (71, 1), (4, 8)])
def test_a_grid_has_room_for_the_longest_steps(
    monkeypatch: pytest.MonkeyPatch, group: int, num_kv_heads: int
) -> None:
    """128k tokens with 64 query heads to a KV head are 65,536 tiles and one more for each sequence:
    all dimensions of a grid but the first end at 65,535."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    module = import_module("inflight_kernels.ops.attention.paged_attention_context")
    monkeypatch.setattr(module, "_paged_attention_context_kernel", Kernel())
    with torch.device("meta"):
        cache = torch.empty(4, 32, num_kv_heads, 64, dtype=torch.bfloat16)
        query = torch.empty(2**17, group * num_kv_heads, 64, dtype=torch.bfloat16)
        starts, lengths = torch.empty(3, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        tables = torch.empty(2, 2048, dtype=torch.int32)
    paged_attention_context(query, cache, cache, tables, starts, lengths, 0.125)
    [(num_programs, *others)] = grids
    assert num_programs % num_kv_heads == 0
    rows = module.choose_tile(group, 64, torch.bfloat16, None).block_m
    assert num_programs // num_kv_heads >= 2**17 // (rows // group) + 2
    assert all(size < 2**16 for size in others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_starts": torch.zeros(2, dtype=torch.int32)}, "query_starts: shape"),
        ({"out": torch.zeros(4, 4, 64)}, "out: shape"),
        ({"query_starts": torch.zeros(3, dtype=torch.int64)}, "query_starts: dtype"),
        (
            {"value_cache": torch.zeros(4, 2, 16, 64).transpose(1, 2)},
            "value_cache: must have the str",
        ),
        ({"max_query_len": 0}, "max_query_len: must be greater than 0"),
        ({"query": torch.zeros(5, 3, 64)}, "query: num_heads must be a multiple"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "query": torch.zeros(5, 4, 64),
        "key_cache": torch.zeros(4, 16, 2, 64),
        "value_cache": torch.zeros(4, 16, 2, 64),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "query_starts": torch.zeros(3, dtype=torch.int32),
        "context_lengths": torch.zeros(2, dtype=torch.int32),
        "scale": 0.125,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention_context(**{**arguments, **change})  # type: ignore[arg-type]


def test_an_empty_batch_gives_an_empty_answer(device: torch.device) -> None:
    empty = torch.zeros(0, 4, 64, device=device)
    cache = torch.zeros(4, 16, 2, 64, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    out = paged_attention_context(empty, cache, cache, none.view(0, 2), starts, none, 0.125)
    assert out.shape == (0, 4, 64)
