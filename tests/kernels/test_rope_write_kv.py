"""Rotation and cache write in one launch, against the reference's two steps."""

from __future__ import annotations

import pytest
import torch
from support.tolerance import assert_close

from inflight_kernels import reference
from inflight_kernels.ops.attention.rope_write_kv import rope_write_kv


def cos_sin_table(num_positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """[num_positions, D] float32: cosines, then sines."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(num_positions)[:, None] * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "tokens_per_block", "dtype"),
    [
        (8, 2, 64, 16, torch.float32),
        (4, 4, 128, 64, torch.bfloat16),
        (20, 4, 80, 32, torch.float16),
        (3, 1, 96, 16, torch.bfloat16),
        (3, 1, 576, 16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_equals_norm_then_rope_then_write(
    device: torch.device,
    generator: torch.Generator,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tokens_per_block: int,
    dtype: torch.dtype,
    has_norm: bool,
) -> None:
    num_tokens = 6
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(
        device, dtype
    )
    query, key, value = fused.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    cos_sin = cos_sin_table(50, head_dim, device)
    positions = torch.tensor([0, 1, 49, 7, 7, 3], device=device)
    slots = torch.tensor([0, 2 * tokens_per_block - 1, -1, 5, tokens_per_block, -1], device=device)
    q_weight, k_weight = (
        (1 + 0.3 * torch.randn(2, head_dim, generator=generator)).to(device, dtype).unbind()
    )
    # One more block lies before each cache: a write at slot -1 would land there.
    shape = (1 + 3, tokens_per_block, num_kv_heads, head_dim)
    old = torch.randn(2, *shape, generator=generator).to(device, dtype)
    memory = old.clone()
    key_cache, value_cache = memory[:, 1:].unbind()

    out = rope_write_kv(
        query, key, value, cos_sin, positions, key_cache, value_cache, slots,
        q_weight if has_norm else None, k_weight if has_norm else None, 1e-5,
    )  # fmt: skip

    if has_norm:
        query = reference.rms_norm(query, q_weight, 1e-5)
        key = reference.rms_norm(key, k_weight, 1e-5)
    # In float32, so that the oracle rounds once as the kernel does.
    rotated = reference.apply_rope(query.float(), key.float(), cos_sin, positions)
    expected = old.clone()
    expected_keys, expected_values = expected[:, 1:].unbind()
    reference.write_kv(rotated[1].to(dtype), value, expected_keys, expected_values, slots)
    assert_close(out, rotated[0].to(dtype))
    assert_close(key_cache, expected_keys)
    assert torch.equal(value_cache, expected_values)
    untouched = torch.ones(memory.shape[1:3], dtype=torch.bool)
    untouched[1:].view(-1)[slots[slots >= 0].cpu()] = False
    assert torch.equal(memory[:, untouched], old[:, untouched])


def test_keys_that_are_the_values(device: torch.device, generator: torch.Generator) -> None:
    """Without a value the cache gets the key, and the query turns as beside one."""
    fused = torch.randn(4, 3, 32, generator=generator).to(device)
    query, key = fused[:, :2], fused[:, 2:]
    caches = torch.zeros(3, 2, 16, 1, 32, device=device)
    places = torch.tensor([3, 0, -1, 20], device=device)
    table, positions = cos_sin_table(9, 32, device), torch.tensor([8, 1, 0, 5], device=device)
    out = rope_write_kv(query, key, None, table, positions, caches[0], None, places)
    both = rope_write_kv(query, key, key, table, positions, caches[1], caches[2], places)
    assert torch.equal(out, both)
    assert torch.equal(caches[0], caches[1])
    assert caches[0].count_nonzero() == 3 * 32


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_cache_of_8_bits_in_another_layout(
    device: torch.device, generator: torch.Generator, kind: torch.dtype
) -> None:
    """Scaled numbers written to a cache stored head before token; positions in int32."""
    query = torch.randn(3, 2, 64, generator=generator).to(device, torch.bfloat16)
    key, value = torch.randn(2, 3, 2, 64, generator=generator).to(device, torch.bfloat16).unbind()
    cos_sin = cos_sin_table(10, 64, device)
    positions = torch.tensor([9, 0, 4], dtype=torch.int32, device=device)
    slots = torch.tensor([17, 3, 30], device=device)
    memory = torch.zeros(2, 2, 2, 16, 64, dtype=kind, device=device)
    key_cache, value_cache = memory.transpose(2, 3).unbind()
    rope_write_kv(
        query, key, value, cos_sin, positions, key_cache, value_cache, slots,
        key_scale=0.5, value_scale=0.02,
    )  # fmt: skip
    rotated = reference.apply_rope(query.float(), key.float(), cos_sin, positions.long())[1]
    for cache, scale, new in ((key_cache, 0.5, rotated), (value_cache, 0.02, value.float())):
        expected = reference.to_bytes(new, scale, kind).float()
        written = cache.float()[slots // 16, slots % 16]
        atol = 1.0 if kind == torch.int8 else 2**-9
        torch.testing.assert_close(written, expected, rtol=0.13, atol=atol)
        assert float((written != expected).float().mean()) < 0.02


def test_extreme_numbers_in_an_int8_cache(device: torch.device) -> None:
    """To the nearest integer, ties to even, within the range."""
    numbers = [127.0, 127.5, 1e30, torch.inf, -128.0, -128.6, -torch.inf, 0.5, 1.5, 2.5, -0.5,
               -1.5, 0.49, -0.51, 3.0, 0.0]  # fmt: skip
    values = torch.tensor([numbers], device=device)[:, None]  # [1, 1, 16]
    zeros = torch.zeros_like(values)
    caches = torch.zeros(2, 1, 16, 1, 16, dtype=torch.int8, device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    table = cos_sin_table(1, 16, device)
    rope_write_kv(zeros, zeros, values, table, place, caches[0], caches[1], place)
    expected = [127, 127, 127, 127, -128, -128, -128, 0, 2, 2, 0, -2, 0, -1, 3, 0]
    assert caches[1, 0, 0, 0].tolist() == expected


def test_extreme_numbers_in_an_fp8_cache(device: torch.device) -> None:
    """To the nearest that e4m3 has, ties to even, 448 at most; never NaN, which would spread to
    every answer that reads the block."""
    largest = [448.0, 449.0, 464.0, 480.0, 1e30, torch.inf, -torch.inf, torch.nan]
    # Multiples of half the smallest number: on it, halfway, and above halfway.
    smallest = [2.0**-10 * times for times in (1, 1.01, 2, 3, -5, 16, 17, 0)]
    numbers = torch.tensor([largest + smallest], device=device)[:, None]  # [1, 1, 16]
    zeros = torch.zeros_like(numbers)
    caches = torch.zeros(2, 1, 16, 1, 16, dtype=torch.float8_e4m3fn, device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    table = cos_sin_table(1, 16, device)
    rope_write_kv(zeros, zeros, numbers, table, place, caches[0], caches[1], place)
    written = caches[1, 0, 0].float()
    assert written.isfinite().all()
    expected = numbers[0].clamp(-448, 448).to(torch.float8_e4m3fn).float()
    is_number = ~numbers[0].isnan()
    torch.testing.assert_close(written[is_number], expected[is_number], rtol=0, atol=0)
