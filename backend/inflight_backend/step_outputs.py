"""What crosses between host and engine beside plans and tokens, for the requests that asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

TokenMasks = npt.NDArray[np.int32]
"""What rows may draw, [num_masks, 2 + ceil(vocab / 32)]: see `inflight_kernels.reference`."""

MaskSource = Callable[[], TokenMasks]
"""Asked once, when the decoder of a step has been started and its draw has not."""

LogitsEdit = Callable[[Any, int | None], None]
"""(logits [1, 1, vocab] of a row on the device, stream, None on a CPU) -> None: changes them in
place."""

LogitsEdits = Sequence[tuple[int, LogitsEdit]]
"""With the row of each, counted among those that draw."""

EditSource = Callable[[], LogitsEdits]
"""Asked like a `MaskSource`, before anything is done to the logits of the step."""


def masks_of_rows(masks: TokenMasks, rows: slice) -> TokenMasks:
    """Those of ``masks`` that are for ``rows``, whose first one is row 0 then."""
    chosen: TokenMasks = masks[(rows.start <= masks[:, 0]) & (masks[:, 0] < rows.stop)]
    chosen[:, 0] -= rows.start
    return chosen


def edits_of_rows(edits: LogitsEdits, rows: slice) -> LogitsEdits:
    """Those of ``edits`` that are for ``rows``, whose first one is row 0 then."""
    return [(row - rows.start, edit) for row, edit in edits if rows.start <= row < rows.stop]


@dataclass(frozen=True, slots=True)
class ContextLogits:
    """Logits [n, vocab] of the tokens at ``start`` and after of a request's text."""

    request_id: int
    start: int
    logits: Logits


TopLogProbs = tuple[list[int], list[float]]


@dataclass(slots=True)
class StepOutputs:
    """By request id: log probability and logits [vocab] of each token drawn, both before anything
    was done to the logits, its rank by them (how many tokens are at least as likely), and ids and
    log probabilities of the likeliest tokens in its place, from the likeliest; and the logits of
    prompts. ``candidates`` by slot: the likeliest tokens of rows that search, with their log
    probabilities.

    A request draws one token, or with drafts several, of which only the first may count.
    """

    log_probs: dict[int, list[float]] = field(default_factory=dict)
    ranks: dict[int, list[int]] = field(default_factory=dict)
    top_log_probs: dict[int, list[TopLogProbs]] = field(default_factory=dict)
    generation_logits: dict[int, list[Logits]] = field(default_factory=dict)
    context_logits: list[ContextLogits] = field(default_factory=list)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


def as_array(tensor: Any) -> Logits:
    """A host tensor [...] float32 as numpy."""
    array: Logits = tensor.numpy()
    return array
