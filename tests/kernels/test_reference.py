"""The oracle against arithmetic written out: attention, cache writes, rope, norms."""

from __future__ import annotations

import math

import pytest
import torch
from support.paged import assert_attention_close, attention_oracle, make_cache

from inflight_kernels import reference

# (new tokens, tokens in the cache with them): fresh prompts, later chunks, single tokens.
RAGGED = [(1, 1), (7, 7), (40, 90), (1, 33), (300, 300), (33, 300), (65, 65), (2, 130)]


CPU = torch.device("cpu")


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "tokens_per_block"),
    [(12, 4, 64, 16), (3, 1, 20, 8), (8, 8, 32, 32), (2, 2, 6, 1)],
)
def test_context_attention_of_a_ragged_batch(
    generator: torch.Generator,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tokens_per_block: int,
    window: int | None,
) -> None:
    cache = make_cache(
        generator,
        [length for _, length in RAGGED],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tokens_per_block=tokens_per_block,
        device=CPU,
    ).without_nan()
    starts = torch.tensor([0, *(new for new, _ in RAGGED)]).cumsum(0).int()
    query = _random(generator, int(starts[-1]), num_heads, head_dim)
    scale = head_dim**-0.5
    answer = reference.paged_attention_context(
        query, cache.key, cache.value, cache.block_tables, starts, cache.lengths, scale, window
    )
    expected = torch.cat(
        [
            attention_oracle(query[starts[row] : starts[row + 1]], cache, row, scale, window)
            for row in range(len(RAGGED))
        ]
    )
    assert_attention_close(answer, expected)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "lengths",
    [[1], [64, 64, 64], [16, 1, 17, 15, 250, 300, 33], [600, 1, 2, 3, 900]],
)
def test_generation_attention(
    generator: torch.Generator, lengths: list[int], window: int | None
) -> None:
    cache = make_cache(
        generator, lengths, num_kv_heads=2, head_dim=24, tokens_per_block=16, device=CPU
    ).without_nan()
    query = _random(generator, len(lengths), 6, 24)
    answer = reference.paged_attention_generation(query, *cache.memory, cache.lengths, 0.3, window)
    expected = torch.cat(
        [
            attention_oracle(query[row : row + 1], cache, row, 0.3, window)
            for row in range(len(lengths))
        ]
    )
    assert_attention_close(answer, expected)


def test_long_chunk_is_cut_into_tiles(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 16 queries of 40 keys fit into the bound, so the chunk of 30 takes two tiles.
    monkeypatch.setattr("inflight_kernels.reference.attention._MAX_MASK_ELEMENTS", 16 * 40)
    cache = make_cache(generator, [40], num_kv_heads=1, head_dim=8, tokens_per_block=8, device=CPU)
    query = _random(generator, 30, 2, 8)
    starts = torch.tensor([0, 30])
    answer = reference.paged_attention_context(query, *cache.memory, starts, cache.lengths, 0.4)
    assert_attention_close(answer, attention_oracle(query, cache, 0, 0.4))


def test_other_sequences_may_hold_nan(generator: torch.Generator) -> None:
    cache = make_cache(
        generator, [16, 80], num_kv_heads=1, head_dim=8, tokens_per_block=16, device=CPU
    )
    cache.value[cache.block_tables[1, :5].long()] = torch.nan
    cache.block_tables[0, 1:] = cache.block_tables[1, 0]  # stale entries past the end
    query = _random(generator, 2, 2, 8)
    answer = reference.paged_attention_generation(query, *cache.memory, cache.lengths, 1.0)
    assert_attention_close(answer[:1], attention_oracle(query[:1], cache, 0, 1.0))
    assert answer[1].isnan().all()


@pytest.mark.parametrize("is_skipping", [False, True])
def test_write_kv(generator: torch.Generator, is_skipping: bool) -> None:
    key, value = _random(generator, 3, 2, 4), _random(generator, 3, 2, 4)
    key_cache, value_cache = torch.zeros(2, 5, 4, 2, 4)
    slots = torch.tensor([19, -1 if is_skipping else 4, 6])  # block * 4 + offset
    reference.write_kv(key, value, key_cache, value_cache, slots)
    for new, cache in ((key, key_cache), (value, value_cache)):
        expected = torch.zeros(5, 4, 2, 4)
        expected[4, 3], expected[1, 2] = new[0], new[2]
        if not is_skipping:
            expected[1, 0] = new[1]
        assert torch.equal(cache, expected)


def test_rope_turns_pairs_in_the_complex_plane(generator: torch.Generator) -> None:
    angles = torch.rand(9, 5, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([8, 0, 3])
    query, key = _random(generator, 3, 4, 10), _random(generator, 3, 2, 10)
    turned = reference.apply_rope(query, key, cos_sin, positions)
    for x, answer in zip((query, key), turned, strict=True):
        turn = torch.polar(torch.ones(3, 1, 5), angles[positions][:, None])
        expected = torch.complex(x[..., :5], x[..., 5:]) * turn
        torch.testing.assert_close(answer, torch.cat((expected.real, expected.imag), -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(generator: torch.Generator, dtype: torch.dtype) -> None:
    x, residual = _random(generator, 2, 3, 40).to(dtype)
    weight = _random(generator, 40).to(dtype)
    added = (x + residual).double()
    expected = added / (added.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    normed, new_residual = reference.add_rms_norm(x, residual, weight, 1e-5)
    relative = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(normed.double(), expected, rtol=relative, atol=1e-5)
    assert normed.dtype == dtype
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(reference.rms_norm(new_residual, weight, 1e-5), normed)


def test_silu_mul(generator: torch.Generator) -> None:
    gate_up = _random(generator, 4, 10)
    gate, up = gate_up[:, :5], gate_up[:, 5:]
    expected = torch.tensor([[g / (1 + math.exp(-g)) for g in row] for row in gate.tolist()]) * up
    torch.testing.assert_close(reference.silu_mul(gate_up), expected)
