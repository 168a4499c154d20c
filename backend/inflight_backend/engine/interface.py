"""The engine interface of the batch manager, and the types that cross it beside plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from inflight_scheduler import ScheduledBatch

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


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes: resident memory of this process, GPU memory held by it, and pinned host memory."""

    cpu: int = 0
    gpu: int = 0
    pinned: int = 0


class PendingStep(Protocol):
    """A step that may still run."""

    def read(self) -> list[int]:
        """Wait for it; one token per last context chunk, then one per generation slot. -1 for a row
        without finite logits. It may be called again."""

    def read_outputs(self) -> StepOutputs | None:
        """What a step whose tokens were read has brought beside them; None if no request asked."""


class StepEngine(Protocol):
    """What the batch manager needs of an engine; `inflight_backend.engine.Engine` is one."""

    @property
    def device_name(self) -> str:
        """Where it runs, for people."""

    @property
    def dtype_name(self) -> str:
        """Type of weights and KV, for people."""

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens of one block."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def max_seq_len(self) -> int:
        """Prompt plus new tokens of a request, at most."""

    @property
    def max_num_tokens(self) -> int:
        """Tokens of one plan, at most."""

    @property
    def max_beam_width(self) -> int:
        """Beams of a request, at most."""

    @property
    def is_asynchronous(self) -> bool:
        """True when `submit` returns before the step has run."""

    @property
    def supports_drafts(self) -> bool:
        """True when drafts may be verified."""

    def prepare_thread(self) -> None:
        """Called once, first of all in the thread that runs the steps."""

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step; at most two may be unread, and they are read in order."""

    def mask_next(self, source: MaskSource) -> None:
        """The next plan draws under the masks of ``source``, whose rows count the tokens of the
        plan in order. It is asked while the decoder runs, so it may wait for the step before."""

    def edit_next(self, source: EditSource) -> None:
        """Have the edits of ``source`` done to the logits of the next plan, before anything else.
        It is asked as that of `mask_next` is."""

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use now; cheap enough for every iteration."""
