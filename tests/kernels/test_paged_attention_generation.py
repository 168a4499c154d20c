"""Generation attention against attention written out, over odd shapes and adversarial lengths."""

from __future__ import annotations

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

from inflight_kernels import launch, reference
from inflight_kernels.ops.attention.paged_attention_generation import (
    GenerationTile,
    paged_attention_generation,
    plan_generation,
)

_FP8 = torch.float8_e4m3fn


def expected_rows(
    query: torch.Tensor,
    cache: PagedCache,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """[B, H, D] float32; zeros for padding rows."""
    rows = [
        attention_oracle(
            query[row : row + 1], cache, row, scale, sliding_window, softcap, **options
        )[0]
        if int(cache.lengths[row])
        else torch.zeros_like(query[row], dtype=torch.float32)
        for row in range(query.shape[0])
    ]
    return torch.stack(rows)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "tokens_per_block", "dtype"),
    [
        (8, 2, 64, 16, torch.float32),
        (4, 4, 128, 32, torch.bfloat16),
        (4, 1, 80, 16, torch.float16),
        (6, 2, 96, 64, torch.bfloat16),
        (2, 1, 256, 128, torch.bfloat16),
        (3, 3, 80, 48, torch.float32),
        (20, 1, 64, 64, torch.float16),
        (40, 1, 288, 32, torch.bfloat16),
        (4, 2, 512, 16, torch.float32),
    ],
)
def test_matches_attention_written_out(
    device: torch.device,
    generator: torch.Generator,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tokens_per_block: int,
    dtype: torch.dtype,
) -> None:
    block = tokens_per_block
    cache = make_cache(
        generator,
        [1, block - 1, 0, block, block + 1, 3 * block + 5, 300],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tokens_per_block=tokens_per_block,
        dtype=dtype,
        device=device,
    )
    query = torch.randn(7, num_heads, head_dim, generator=generator).to(device, dtype)
    scale = head_dim**-0.5
    out = paged_attention_generation(query, *cache.memory, cache.lengths, scale)
    assert out.dtype == dtype
    expected = expected_rows(query, cache, scale)
    assert_attention_close(out, expected)


@pytest.mark.fast(2)
def test_keys_that_are_the_values(device: torch.device, generator: torch.Generator) -> None:
    """As of latents; heads share programs by 16."""
    lengths = [1, 33, 0, 300]
    cache = make_cache(
        generator,
        lengths,
        num_kv_heads=1,
        head_dim=576,
        tokens_per_block=32,
        dtype=torch.bfloat16,
        device=device,
    )
    keys, tables = cache.key, cache.block_tables
    query = torch.randn(4, 32, 576, generator=generator).to(device, torch.bfloat16)
    paged = (tables, cache.lengths, 0.04)
    out = paged_attention_generation(query, keys, None, *paged)
    assert torch.equal(out, paged_attention_generation(query, keys, keys, *paged))
    latents = PagedCache(keys, keys, tables, cache.lengths)
    expected = expected_rows(query, latents, 0.04)
    assert_attention_close(out, expected)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_equals_the_reference(
    device: torch.device, generator: torch.Generator, sliding_window: int | None
) -> None:
    cache = make_cache(
        generator,
        [1, 31, 32, 33, 500],
        num_kv_heads=2,
        head_dim=64,
        tokens_per_block=32,
        device=device,
    ).without_nan()
    query = torch.randn(5, 4, 64, generator=generator).to(device)
    paged = (*cache.memory, cache.lengths, 0.125, sliding_window)
    out = paged_attention_generation(query, *paged)
    assert_attention_close(out, reference.paged_attention_generation(query, *paged))


@pytest.mark.fast(3)
@pytest.mark.parametrize("sliding_window", [None, 1, 70, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_window_and_softcap(
    device: torch.device,
    generator: torch.Generator,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    cache = make_cache(
        generator, [1, 64, 65, 449], num_kv_heads=2, head_dim=64, tokens_per_block=32, device=device
    )
    query = torch.randn(4, 4, 64, generator=generator).to(device)
    out = paged_attention_generation(
        query,
        *cache.memory,
        cache.lengths,
        0.3,
        sliding_window,
        softcap,
    )
    expected = expected_rows(query, cache, 0.3, sliding_window, softcap)
    assert_attention_close(out, expected)


@pytest.mark.fast(2)
@pytest.mark.parametrize("num_splits", [None, 1, 4])
@pytest.mark.parametrize("options", WEIGHTINGS.values(), ids=WEIGHTINGS)
def test_weightings(
    device: torch.device,
    generator: torch.Generator,
    options: dict[str, Any],
    num_splits: int | None,
) -> None:
    """A padding row, rows of one split, and of many."""
    cache = make_cache(
        generator, [0, 1, 65, 599], num_kv_heads=2, head_dim=32, tokens_per_block=16, device=device
    )
    query = torch.randn(4, 4, 32, generator=generator).to(device)
    options = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    out = paged_attention_generation(
        query, *cache.memory, cache.lengths, 0.3, num_splits=num_splits, **options
    )
    assert_attention_close(out, expected_rows(query, cache, 0.3, **options))


def test_rows_of_a_ragged_batch_equal_the_same_rows_alone(
    device: torch.device, generator: torch.Generator
) -> None:
    """With the number of splits given, a row's bits do not depend on who runs beside it."""
    cache = make_cache(
        generator,
        [5, 700, 129, 260],
        num_kv_heads=1,
        head_dim=64,
        tokens_per_block=64,
        dtype=torch.bfloat16,
        device=device,
    )
    query = torch.randn(4, 4, 64, generator=generator).to(device, torch.bfloat16)
    together = paged_attention_generation(query, *cache.memory, cache.lengths, 0.125, num_splits=4)
    for row in range(4):
        one = slice(row, row + 1)
        alone = paged_attention_generation(
            query[one],
            cache.key,
            cache.value,
            cache.block_tables[one],
            cache.lengths[one],
            0.125,
            num_splits=4,
        )
        assert torch.equal(together[one], alone)


def test_more_splits_than_are_combined_at_a_time(
    device: torch.device, generator: torch.Generator
) -> None:
    """19 splits of one row beside one of the other, whose programs lie between them."""
    cache = make_cache(
        generator, [2400, 100], num_kv_heads=1, head_dim=16, tokens_per_block=64, device=device
    )
    query = torch.randn(2, 2, 16, generator=generator).to(device)
    out = paged_attention_generation(query, *cache.memory, cache.lengths, 0.25, num_splits=32)
    assert_attention_close(out, expected_rows(query, cache, 0.25))


def test_strides_of_query_and_cache_are_honoured(
    device: torch.device, generator: torch.Generator
) -> None:
    """A query cut out of a fused QKV output, and a cache stored head before token."""
    cache = make_cache(
        generator, [40, 7], num_kv_heads=2, head_dim=64, tokens_per_block=16, device=device
    )
    fused = torch.randn(2, 8, 64, generator=generator).to(device)
    query = fused[:, 2:6]
    head_first = [
        part.transpose(1, 2).contiguous().transpose(1, 2) for part in (cache.key, cache.value)
    ]
    out = paged_attention_generation(
        query, head_first[0], head_first[1], cache.block_tables, cache.lengths, 0.125
    )
    assert_attention_close(out, expected_rows(query, cache, 0.125))


@pytest.mark.fast(2)
@pytest.mark.parametrize("kind", [_FP8, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "tokens_per_block", "dtype", "options"),
    [
        (2, 2, 64, 32, torch.bfloat16, {}),
        (8, 2, 64, 32, torch.bfloat16, {"num_splits": 1}),
        (4, 1, 16, 16, torch.float16, {"sliding_window": 70}),
        (2, 2, 32, 64, torch.bfloat16, {"softcap": 3.0}),
        (20, 1, 80, 48, torch.bfloat16, {"num_splits": 2}),
        (2, 1, 256, 128, torch.float16, {"sliding_window": 20, "softcap": 3.0, "num_splits": 3}),
    ],
)
def test_cache_of_8_bits(
    device: torch.device,
    generator: torch.Generator,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tokens_per_block: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    kind: torch.dtype,
) -> None:
    """Read with its scales it equals the same cache dequantised."""
    cache = make_cache(
        generator,
        [33, 0, 64, 290],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tokens_per_block=tokens_per_block,
        device=device,
    )
    scales: dict[str, Any] = {"key_scale": 0.5, "value_scale": 0.25}
    if kind == torch.int8:
        scales = {"key_scale": 0.03, "value_scale": 0.02}
    narrow, read_back = cache.narrowed(kind, **scales)
    query = torch.randn(4, num_heads, head_dim, generator=generator).to(device, dtype)
    scale = head_dim**-0.5
    out = paged_attention_generation(
        query, *narrow.memory, cache.lengths, scale, **{**scales, **options}
    )
    seen = {name: value for name, value in options.items() if name != "num_splits"}
    assert_attention_close(out, expected_rows(query, read_back, scale, **seen))


@pytest.mark.parametrize("kind", [_FP8, torch.int8], ids=str)
def test_every_number_of_a_cache_of_8_bits_is_read_as_it_is(
    device: torch.device, kind: torch.dtype
) -> None:
    """All codes, of e4m3 the smallest, 448 and NaN among them, in both places of a word: as the
    only value of a row, so that it is the result."""
    codes = torch.arange(256, device=device).to(torch.uint8).view(16, 16)
    codes = torch.cat((codes, codes.roll(1, dims=1))).view(kind)
    values = codes[:, None, None, :].expand(32, 16, 1, 16).contiguous()
    tables = torch.arange(32, dtype=torch.int32, device=device)[:, None]
    lengths = torch.ones(32, dtype=torch.int32, device=device)
    query = torch.zeros(32, 1, 16, device=device)
    out = paged_attention_generation(query, torch.zeros_like(values), values, tables, lengths, 1.0)
    torch.testing.assert_close(out, values[:, 0].float(), rtol=0, atol=0, equal_nan=True)


def test_a_gpu_without_fp8_refuses_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "capability", lambda: 80)
    lengths, tables = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    cache = torch.zeros(1, 16, 1, 16, dtype=_FP8)
    query = torch.zeros(1, 1, 16)
    with pytest.raises(
        ValueError, match=r"float8_e4m3fn: needs .* 8\.9 or later, this one has 8\.0"
    ):
        paged_attention_generation(query, cache, cache, tables, lengths, 1.0)


def test_one_plan_serves_all_layers(device: torch.device, generator: torch.Generator) -> None:
    """And rows of one split lie beside those of several, in the list and in the answer."""
    cache = make_cache(
        generator, [400, 7, 0, 900], num_kv_heads=1, head_dim=64, tokens_per_block=64, device=device
    )
    work = plan_generation(2, *cache.memory[::2], cache.lengths)
    for _ in range(2):
        query = torch.randn(4, 2, 64, generator=generator).to(device)
        out = paged_attention_generation(query, *cache.memory, cache.lengths, 0.125, work=work)
        assert_attention_close(out, expected_rows(query, cache, 0.125))
    with pytest.raises(ValueError, match="work: made for tiles of 32 tokens, not 64"):
        paged_attention_generation(
            query,
            *cache.memory,
            cache.lengths,
            0.125,
            work=work,
            tile=GenerationTile(64, 3, 4),
        )


def cut(width: int, first: int) -> dict[str, torch.Tensor]:
    """FP8 caches of heads of 64, cut out of wider ones."""
    cache = torch.zeros(4, 16, 2, width, dtype=_FP8)[..., first : first + 64]
    return {"key_cache": cache, "value_cache": cache}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 64)}, "query: num_heads must be a multiple"),
        ({"query": torch.zeros(2, 4, 60)}, "query: head_dim must be a multiple of 16"),
        ({"query": torch.zeros(2, 4, 64, dtype=torch.float64)}, "query: dtype"),
        ({"query": torch.zeros(3, 4, 64)}, "context_lengths: shape"),
        ({"value_cache": torch.zeros(4, 16, 1, 64)}, "value_cache: shape"),
        ({"value_cache": torch.zeros(4, 16, 2, 64).to(_FP8)}, "value_cache: dtype"),
        ({"key_cache": torch.zeros(4, 16, 2, 64).to(_FP8)}, "value_cache: dtype"),
        (cut(65, 0), "key_cache: of 8 bits, .* must be even"),
        (cut(66, 1), "key_cache: of 8 bits, .* offset 1"),
        ({"key_cache": torch.zeros(4, 16, 2, 64, dtype=torch.float16)}, "key_cache: dtype"),
        ({"key_cache": torch.zeros(4, 16, 64, 2).transpose(2, 3)}, "key_cache: last dimension"),
        ({"block_tables": torch.zeros(2, 2, dtype=torch.int64)}, "block_tables: dtype"),
        ({"context_lengths": torch.zeros(3, dtype=torch.int32)}, "context_lengths: shape"),
        ({"scale": 0.0}, "scale: must be greater than 0"),
        ({"sliding_window": 0}, "sliding_window: must be greater than 0"),
        ({"softcap": -1.0}, "softcap: must be greater than 0"),
        ({"num_splits": 0}, "num_splits: must be greater than 0"),
        ({"out": torch.zeros(2, 4, 32)}, "out: shape"),
        ({"out": torch.zeros(2, 4, 64, dtype=torch.float16)}, "out: dtype"),
        ({"out": torch.zeros(4, 4, 64)[::2]}, "out: must be contiguous"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "query": torch.zeros(2, 4, 64),
        "key_cache": torch.zeros(4, 16, 2, 64),
        "value_cache": torch.zeros(4, 16, 2, 64),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "context_lengths": torch.zeros(2, dtype=torch.int32),
        "scale": 0.125,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention_generation(**{**arguments, **change})  # type: ignore[arg-type]


def planned_splits(
    device: torch.device,
    lengths: list[int],
    room: int,
    window: int | None = None,
    num_splits: int | None = None,
) -> list[int]:
    """Splits of each row as they are planned for 8 KV heads and tables of ``room`` tokens, after a
    look at the whole plan: all is done once, in order, and what is left over is marked."""
    cache = torch.empty(1, 64, 8, 128, dtype=torch.bfloat16, device=device)
    tables = torch.empty(len(lengths), room // 64, dtype=torch.int32, device=device)
    row_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    work = plan_generation(32, cache, tables, row_lengths, window, num_splits=num_splits)
    items, entries = work.items.tolist(), work.split_rows.tolist()
    made = [item for item in items if item[0] >= 0]
    assert items[: len(made)] == made, "what is left over lies behind"
    splits = []
    for row, length in enumerate(lengths):
        mine = [item for item in made if item[0] == row]
        assert [item[3] for item in mine] == [len(mine)] * len(mine)
        first = max(length - window, 0) if window else 0
        begins, ends = [item[1] * 64 for item in mine], [item[2] for item in mine]
        assert (begins[0], ends[-1]) == (first // 64 * 64, length)
        assert begins[1:] == ends[:-1]
        splits.append(len(mine))
    places = [item[0] for item in made]
    split_rows = [[row, places.index(row), n] for row, n in enumerate(splits) if n > 1]
    assert entries[: len(split_rows)] == split_rows
    assert all(entry[0] == -1 for entry in entries[len(split_rows) :])
    return splits


@pytest.mark.parametrize("room", [16_384, 131_072])
@pytest.mark.parametrize(
    ("lengths", "splits"),
    [
        ([16_384], [64]),
        ([1024], [8]),
        ([16_384] * 8, [8] * 8),  # 512 programs, of 528 that fill 132 multiprocessors
        ([1024] * 40, [2] * 40),
        ([1024] * 64, [1] * 64),
        ([1024] * 256, [1] * 256),
        ([16_384, *[1024] * 255], [4, *[1] * 255]),  # alone at the end, it would be waited for
        ([16_384, *[256] * 99], [26, *[1] * 99]),
        ([0, 5, 0], [1, 1, 1]),
    ],
)
def test_splits_fill_the_machine_by_the_lengths_that_there_are(
    device: torch.device, lengths: list[int], splits: list[int], room: int
) -> None:
    """Whatever the tables have room for: eight splits of every row were launched for that."""
    if launch.num_sms(device) != 132:
        pytest.skip("splits are those of 132 multiprocessors")
    assert planned_splits(device, lengths, room) == splits


@pytest.mark.slow
def test_plans_of_any_lengths_fit_their_list(
    device: torch.device, generator: torch.Generator
) -> None:
    for number in range(12):
        size = (1, 3, 65, 300)[number % 4]
        lengths = (8192 * torch.rand(size, generator=generator) ** 3).long().tolist()
        planned_splits(device, lengths, 8192)
        planned_splits(device, lengths, 8192, num_splits=16)
        planned_splits(device, lengths, 8192, window=(100, 1024, 5000)[number % 3])
