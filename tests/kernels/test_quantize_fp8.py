"""Rows to FP8 against the numbers themselves."""

from __future__ import annotations

import pytest
import torch
from support.tolerance import assert_fp8_close

from inflight_kernels.ops.quantize_fp8 import quantize_fp8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (3, 1000), (2, 3456)])
def test_quantize(
    device: torch.device,
    generator: torch.Generator,
    num_tokens: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    wide = torch.randn(num_tokens, size + 8, generator=generator).to(device, dtype)
    x = wide[:, :size]  # rows may lie apart
    out, scales = quantize_fp8(x)
    assert_fp8_close(out, scales, x)


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    out, scales = quantize_fp8(torch.zeros(2, 48, device=device))
    assert not out.float().any()
    assert bool((scales > 0).all())
