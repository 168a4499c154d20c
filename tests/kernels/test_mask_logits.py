"""Token masks in the Triton language against the reference, and the reference against sets."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.ops.sampling.mask_logits import mask_logits


def _masks(vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """For rows 3, 0 and 2: half of the tokens, one forced token, none at all."""
    words = -(-vocabulary // 32)
    masks = torch.randint(-(2**31), 2**31, (3, 2 + words), generator=generator).int()
    masks[:, 0] = torch.tensor([3, 0, 2])
    masks[:, 1] = torch.tensor([-1, vocabulary - 1, -1])
    masks[2, 2:] = 0
    return masks


@pytest.mark.parametrize("vocabulary", [1, 31, 100, 4096, 5001])
def test_equals_the_reference(
    device: torch.device, generator: torch.Generator, vocabulary: int
) -> None:
    wide = torch.randn(5, vocabulary + 7, generator=generator).to(device)
    wide[0] = -torch.inf  # of a forced token, too
    logits, behind = wide[:, :vocabulary], wide[:, vocabulary:].clone()
    masks = _masks(vocabulary, generator).to(device)
    expected = logits.clone()
    reference.mask_logits(expected, masks)
    mask_logits(logits, masks)
    assert torch.equal(logits, expected)
    assert torch.equal(wide[:, vocabulary:], behind)


def test_reference_keeps_what_has_a_bit(generator: torch.Generator) -> None:
    vocabulary = 77
    logits = torch.randn(5, vocabulary, generator=generator)
    masks = _masks(vocabulary, generator)
    before = logits.clone()
    reference.mask_logits(logits, masks)
    for token in range(vocabulary):
        is_allowed = bool(int(masks[0, 2 + token // 32]) >> (token % 32) & 1)
        assert float(logits[3, token]) == (float(before[3, token]) if is_allowed else -torch.inf)
        assert float(logits[0, token]) == (0.0 if token == vocabulary - 1 else -torch.inf)
    assert bool((logits[2] == -torch.inf).all())
    assert torch.equal(logits[[1, 4]], before[[1, 4]])
