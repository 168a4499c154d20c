"""Compiled norms and activations against the reference: equal but for the order of a sum."""

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
        (
            elementwise.layer_norm(x + 1, weight, 2 * weight, 1e-5),
            reference.layer_norm(x + 1, weight, 2 * weight, 1e-5),
        ),
        (
            elementwise.layer_norm(x + 1, None, None, 1e-5),
            reference.layer_norm(x + 1, None, None, 1e-5),
        ),
    ):
        assert_nearly_equal(found, expected)


def assert_nearly_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """In bfloat16 a few are rounded the other way, once or twice."""
    is_wide = expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5 if is_wide else 2**-6, atol=1e-5)
    differs = (found - expected).abs() > 1e-6
    assert float(differs.float().mean()) < (1 if is_wide else 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_layer", [False, True])
def test_the_end_of_a_branch(
    generator: torch.Generator, is_layer: bool, dtype: torch.dtype
) -> None:
    """Two answers, normed, scaled, added, and normed for the next branch; or only some of that."""
    x, beside, residual, out, total = torch.randn(5, 7, 96, generator=generator).to(dtype)
    weights = torch.randn(4, 96, generator=generator)
    own, following = (
        elementwise.NormWeights.of(weight, bias if is_layer else None, 1e-5, is_layer=is_layer)
        for weight, bias in (weights[:2], weights[2:])
    )

    def normed(given: torch.Tensor, norm: elementwise.NormWeights) -> torch.Tensor:
        if is_layer:
            return reference.layer_norm(given, norm.weight, norm.bias, 1e-5)
        return reference.rms_norm(given, norm.weight, 1e-5)

    elementwise.add_norm_stage(
        x, residual, following, out, total, beside=beside, own_norm=own, scale=0.3
    ).run()
    expected = residual + normed(x + beside, own) * 0.3
    assert_nearly_equal(total, expected)
    assert_nearly_equal(out, normed(total, following))
    elementwise.add_norm_stage(x, residual, None, out, total, scale=0.3).run()
    assert torch.equal(total, residual + x * 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", reference.ACTIVATIONS)
def test_activations(generator: torch.Generator, kind: str, dtype: torch.dtype) -> None:
    """Beside those in float64: torch's own GELU is not exact far on its left. Also where powers
    overflow."""
    x = 4 * torch.randn(7, 192, generator=generator)
    x[0, :4] = torch.tensor([-1e18, -200.0, 200.0, 1e18])
    x = x.to(dtype)
    gate, up = x.chunk(2, dim=-1)
    expected = reference.activate(gate.double(), kind, False).to(dtype)
    assert_nearly_equal(elementwise.activate(gate, kind, False), expected)
    assert_nearly_equal(elementwise.activate(x, kind, True), expected * up)
