"""What crosses between host and engine beside plans and tokens, for the requests that asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

TokenMasks = npt.NDArray[np.int32]
"""What rows may draw, [num_masks, 2 + ceil(vocab / 32)]: see `inflight_kernels.reference`."""

MaskSource = Callable[[], TokenMasks]
"""Asked once, when the decoder of a step has been started and its draw has not."""


@dataclass(frozen=True, slots=True)
class ContextLogits:
    """Logits [n, vocab] of the tokens at ``start`` and after of a request's text."""

    request_id: int
    start: int
    logits: Logits


@dataclass(slots=True)
class StepOutputs:
    """By request id: log probability and logits [vocab] of the token drawn, both before anything
    was done to the logits; and the logits of prompts. ``candidates`` by slot: the likeliest tokens
    of rows that search, with their log probabilities."""

    log_probs: dict[int, float] = field(default_factory=dict)
    generation_logits: dict[int, Logits] = field(default_factory=dict)
    context_logits: list[ContextLogits] = field(default_factory=list)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


def as_array(tensor: Any) -> Logits:
    """A host tensor [...] float32 as numpy."""
    array: Logits = tensor.numpy()
    return array
