"""RMS norm with and without residual and quantisation, against the reference."""

from __future__ import annotations

import pytest
import torch
from support.tolerance import assert_close, assert_fp8_close

from inflight_kernels import reference
from inflight_kernels.ops.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8

SHAPES = [(1, 16), (3, 80), (2, 4096), (5, 5120)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(
    generator: torch.Generator, device: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, whose rows lie apart, residual, weight."""
    wide = torch.randn(shape[0], shape[1] + 8, generator=generator).to(device, dtype)
    x = wide[:, : shape[1]]
    residual = (3 * torch.randn(shape, generator=generator)).to(device, dtype)
    weight = (1 + 0.2 * torch.randn(shape[1], generator=generator)).to(device, dtype)
    return x, residual, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(
    device: torch.device, generator: torch.Generator, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, residual, weight = make(generator, device, shape, dtype)
    inputs = x.clone(), residual.clone()
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), units=2)
    out, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_residual = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(out, expected, units=2)
    assert_close(new_residual, expected_residual)
    assert torch.equal(x, inputs[0])
    assert torch.equal(residual, inputs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised(device: torch.device, generator: torch.Generator, dtype: torch.dtype) -> None:
    x, residual, weight = make(generator, device, (4, 1536), dtype)
    x[1] = 0
    residual[1] = 0
    out, scales = rms_norm_fp8(x, weight, 1e-5)
    assert_fp8_close(out, scales, reference.rms_norm(x, weight, 1e-5))
    assert not out[1].float().any()
    out, scales, new_residual = add_rms_norm_fp8(x, residual, weight, 1e-5)
    expected, expected_residual = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_fp8_close(out, scales, expected)
    assert_close(new_residual, expected_residual)
