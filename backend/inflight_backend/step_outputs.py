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


def masks_of_rows(masks: TokenMasks, rows: slice) -> TokenMasks:
    """Those of ``masks`` that are for ``rows``, whose first one is row 0 then."""
    chosen: TokenMasks = masks[(rows.start <= masks[:, 0]) & (masks[:, 0] < rows.stop)]
    chosen[:, 0] -= rows.start
    return chosen


@dataclass(frozen=True, slots=True)
class ContextLogits:
    """Logits [n, vocab] of the tokens at ``start`` and after of a request's text."""

    request_id: int
    start: int
    logits: Logits


@dataclass(slots=True)
class StepOutputs:
    """By request id: log probability and logits [vocab] of each token drawn, both before anything
    was done to the logits; and the logits of prompts. ``candidates`` by slot: the likeliest tokens
    of rows that search, with their log probabilities.

    A request draws one token, or with drafts several, of which only the first may count.
    """

    log_probs: dict[int, list[float]] = field(default_factory=dict)
    generation_logits: dict[int, list[Logits]] = field(default_factory=dict)
    context_logits: list[ContextLogits] = field(default_factory=list)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


def as_array(tensor: Any) -> Logits:
    """A host tensor [...] float32 as numpy."""
    array: Logits = tensor.numpy()
    return array
