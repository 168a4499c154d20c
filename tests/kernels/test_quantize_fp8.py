"""Rows to FP8 against the numbers themselves."""

from __future__ import annotations

import pytest
import torch
from support.tolerance import assert_fp8_close

from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8


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


@pytest.mark.parametrize(("size", "group_size"), [(256, 128), (300, 128), (1100, 64), (16, 16)])
def test_groups_have_scales_of_their_own(
    device: torch.device, generator: torch.Generator, size: int, group_size: int
) -> None:
    x = torch.randn(3, size, generator=generator).to(device, torch.bfloat16)
    out, scales = quantize_fp8(x, group_size)
    assert scales.shape == (3, -(-size // group_size))
    for index in range(scales.shape[1]):
        place = slice(index * group_size, (index + 1) * group_size)
        assert_fp8_close(out[:, place], scales[:, index : index + 1], x[:, place])
    with pytest.raises(ValueError, match="group_size: must be a power of two, not 48"):
        quantize_fp8(x, 48)
