"""The gated activation against the reference."""

from __future__ import annotations

import pytest
import torch
from support.tolerance import assert_close, assert_fp8_close

from inflight_kernels import reference
from inflight_kernels.ops.silu_mul import silu_mul, silu_mul_fp8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (3, 1000), (2, 3456)])
def test_silu_mul(
    device: torch.device,
    generator: torch.Generator,
    num_tokens: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    gate_up = (4 * torch.randn(num_tokens, 2 * size, generator=generator)).to(device, dtype)
    assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))


def test_extreme_gates_stay_finite(device: torch.device) -> None:
    """exp overflows for very negative gates; the answer is zero, not NaN."""
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, -90.0, 1.0, 2.0, 3.0, 4.0]], device=device)
    assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised(device: torch.device, generator: torch.Generator, dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 1080, generator=generator).to(device, dtype)
    gate_up[2] = 0
    out, scales = silu_mul_fp8(gate_up)
    assert_fp8_close(out, scales, reference.silu_mul(gate_up))
    assert not out[2].float().any()
