"""Compiled norms and activation against the reference: equal but for the order of a sum."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.cpu import elementwise

pytestmark = pytest.mark.fast(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 576), (7, 96), (100, 1536)])
@pytest.mark.parametrize("is_wide", [False, True])
def test_equal_the_reference(
    generator: torch.Generator, is_wide: bool, dtype: torch.dtype, num_tokens: int, size: int
) -> None:
    """``is_wide``: the weight is float32, as one with an offset in it."""
    shape = (num_tokens, size)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator).to(torch.float32 if is_wide else dtype)
    normed, total = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    for found, expected in (
        (normed, reference.add_rms_norm(x, residual, weight, 1e-5)[0]),
        (elementwise.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        (elementwise.silu_mul(8 * x), reference.silu_mul(8 * x)),
    ):
        # In bfloat16 a few are rounded the other way, once or twice.
        rtol = 1e-5 if dtype == torch.float32 else 2**-6
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)
        assert float((found != expected).float().mean()) < (1 if dtype == torch.float32 else 0.01)


def test_silu_at_its_ends() -> None:
    """No infinity and no NaN where e^-x overflows."""
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.0, 0.0, 200.0, 1e30]])
    torch.testing.assert_close(elementwise.silu_mul(gate_up), expected, rtol=1e-6, atol=1e-7)
