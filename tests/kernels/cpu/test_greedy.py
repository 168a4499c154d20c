"""The most likely token by a compiled kernel, beside what it means."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.cpu.greedy import greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy(generator: torch.Generator, dtype: torch.dtype) -> None:
    """Of numbers of all sizes, of equal ones the first; what is not finite, with either sign."""
    logits = torch.randn(9, 5000, generator=generator) - 4.0
    logits[0, [4321, 4500]] = 7.0
    logits[1] = -torch.inf
    logits[2, 17], logits[3, 4999], logits[4, 3000] = torch.nan, torch.inf, -torch.nan
    logits[5], logits[5, 2500:] = -0.0, 0.0
    logits[6], logits[6, 2222] = -torch.inf, -3.0
    logits = logits.to(dtype)
    logits[4, 3000] = torch.tensor(-64, dtype=torch.int16).view(torch.bfloat16)  # its sign is kept
    part = logits[:, :4800]  # rows that do not follow one another
    for each in (logits, part, logits[8:]):
        assert greedy(each).tolist() == reference.greedy(each).tolist()
    assert greedy(logits).tolist()[:7] == [4321, -1, -1, -1, -1, 0, 2222]
