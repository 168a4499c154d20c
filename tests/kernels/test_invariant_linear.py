"""The linear whose rows stand alone, against torch and against itself in other batches."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels.ops.linear.invariant_linear import invariant_linear
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8

LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def random(generator: torch.Generator, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=generator)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(("num_tokens", "rows", "columns"), [(1, 16, 48), (70, 200, 33)])
def test_against_torch(
    device: torch.device, generator: torch.Generator, num_tokens: int, rows: int, columns: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    x, weight = (random(generator, n, columns).to(device, dtype) for n in (num_tokens, rows))
    bias = random(generator, rows).to(device, dtype)
    out = invariant_linear(x, weight, bias)
    assert out.dtype == dtype
    assert out.shape == (num_tokens, rows)
    expected = x.float() @ weight.float().t() + bias.float()
    assert error(out, expected) < LIMIT[dtype]


def test_fp8(device: torch.device, generator: torch.Generator) -> None:
    x, weight = (random(generator, n, 80).to(device) for n in (5, 24))
    (x_fp8, x_scales), (weight_fp8, weight_scales) = quantize_fp8(x), quantize_fp8(weight)
    out = invariant_linear(
        x_fp8, weight_fp8, x_scales=x_scales, weight_scales=weight_scales, out_dtype=torch.float32
    )
    expected = (x_fp8.float() * x_scales) @ (weight_fp8.float() * weight_scales).t()
    assert error(out, expected) < 1e-5
    assert invariant_linear(
        x_fp8, weight_fp8, x_scales=x_scales, weight_scales=weight_scales
    ).dtype == torch.bfloat16  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_every_batch(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype
) -> None:
    """Bit by bit: alone, among others, and in another tile."""
    x, weight = (random(generator, n, 96).to(device, dtype) for n in (130, 40))
    whole = invariant_linear(x, weight)
    assert torch.equal(invariant_linear(x[:1], weight), whole[:1])
    assert torch.equal(invariant_linear(x[63:67], weight), whole[63:67])
    assert torch.equal(invariant_linear(x[129:], weight), whole[129:])
