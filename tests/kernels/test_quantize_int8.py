"""Rows to int8 against the reference."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.ops.linear.quantize_int8 import quantize_int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 8), (1, 16), (3, 1000), (2, 3456)])
def test_quantize(
    device: torch.device,
    generator: torch.Generator,
    num_tokens: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    wide = torch.randn(num_tokens, size + 8, generator=generator).to(device, dtype)
    x = wide[:, :size]  # rows may lie apart
    numbers, scales = quantize_int8(x)
    expected, expected_scales = reference.quantize_int8(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # A division may come out a last bit different.
    assert int((numbers.int() - expected.int()).abs().max() if len(x) else 0) <= 1
    assert float((numbers != expected).float().mean() if len(x) else 0.0) < 1e-3


def test_halves_and_zeros(device: torch.device) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0], [0.0] * 5], device=device)
    numbers, scales = quantize_int8(x)
    assert numbers.tolist() == [[127, 0, 2, -2, -127], [0] * 5]
    assert bool((scales > 0).all())
