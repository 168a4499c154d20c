"""Bias and penalties in the Triton language against the reference."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.ops.sampling.adjust_logits import adjust_logits


@pytest.mark.parametrize("vocabulary", [1, 100, 2048, 5001])
@pytest.mark.parametrize(("has_bias", "has_counts"), [(True, False), (False, True), (True, True)])
def test_equals_the_reference(
    device: torch.device,
    generator: torch.Generator,
    vocabulary: int,
    has_bias: bool,
    has_counts: bool,
) -> None:
    num_rows, num_slots = 4, 6
    wide = torch.randn(num_rows, vocabulary + 7, generator=generator).to(device)
    wide[0, 0] = -torch.inf
    logits = wide[:, :vocabulary]
    slots = torch.tensor([5, 1, 0, 3], device=device)
    bias = torch.randn(num_slots, vocabulary, generator=generator).to(device)
    counts = torch.randint(0, 7, (num_slots, vocabulary), generator=generator, dtype=torch.int32)
    penalties = torch.tensor(
        [[1.3, 0.5, -0.25], [1.0, 0.0, 0.0], [0.5, 0.0, 0.0], [1.0, -1.0, 2.0]], device=device
    )
    arguments = (
        slots,
        torch.tensor([0.5, 1.0, 0.0, 3.0], device=device),
        bias if has_bias else None,
        counts.to(device) if has_counts else None,
        penalties,
    )
    expected = logits.clone()
    reference.adjust_logits(expected, *arguments)
    behind = wide[:, vocabulary:].clone()
    adjust_logits(logits, *arguments)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(wide[:, vocabulary:], behind)
    if not has_bias:
        assert torch.equal(logits[1], expected[1])
