"""How far element-wise kernels may be from the reference, per dtype."""

from __future__ import annotations

import torch

# Results are rounded twice on the way (see the formulas), and float32 sums are taken in another
# order, so a number next to a rounding boundary may end one unit in the last place away.
RELATIVE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def assert_close(out: torch.Tensor, expected: torch.Tensor, units: int = 1) -> None:
    """Compare with the tolerance of the dtype, which both must have, or ``units`` times that: a
    number that is multiplied after it was rounded may end more than one unit away."""
    assert out.dtype == expected.dtype
    relative = units * RELATIVE[out.dtype]
    torch.testing.assert_close(out, expected, rtol=relative, atol=relative / 8)


def assert_fp8_close(out: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor) -> None:
    """``out`` [T, n] e4m3 times ``scales`` [T, 1] is ``expected`` to half a step of e4m3."""
    assert out.dtype == torch.float8_e4m3fn
    assert scales.shape == (out.shape[0], 1)
    peaks = expected.float().abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(scales, (peaks / 448).clamp(min=1e-12 / 448), rtol=2**-6, atol=0)
    # Steps are 2^-3 of a number's power of two, 2^-9 of the scale near zero. Half a step each,
    # plus what the input's own rounding adds.
    error = (out.float() * scales - expected.float()).abs()
    allowed = expected.float().abs() * (2**-4 + 2**-6) + scales * 2**-10
    assert bool((error <= allowed).all())
