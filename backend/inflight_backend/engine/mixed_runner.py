"""Mixed steps, contexts and drafts beside generations, recorded for a few sizes and replayed.

As with steps of generations alone (`graph_runner`), nothing of the host may enter a recording but
what lies at fixed addresses. Here that is a second packed copy (`mixed_step.MixedBuffer`), and what
is recorded is the decoder: the draw behind it, a small part of such a step, runs as ever. A step
that fits no size, or whose contexts' logits are wanted, runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from inflight_backend.engine.graph_runner import Capture
from inflight_backend.engine.mixed_step import MixedBuffer, MixedSizes, MixedWords, sizes_of
from inflight_scheduler import ScheduledBatch

MixedForward: TypeAlias = Callable[[MixedWords], Tensor]
"""Words at fixed addresses -> hidden states [num_draws, hidden_size]."""


@dataclass(frozen=True, slots=True)
class _Recording:
    sizes: MixedSizes
    replay: Callable[[], Any]
    hidden: Tensor


class MixedRunner:
    """Owner of the recordings; the largest is made first, so that the others fit its memory."""

    def __init__(
        self,
        forward: MixedForward,
        sizes: list[MixedSizes],
        generation_slots: Tensor,
        device: str,
        capture: Capture,
    ) -> None:
        """``sizes`` ascend. ``generation_slots`` [max_batch_size] int32 keeps its address; now it
        holds padding only."""
        self._buffer = MixedBuffer(sizes[-1], generation_slots, device)
        self._recordings: list[_Recording] = []
        self._buffer.send(ScheduledBatch(0), sizes[-1])
        for each in reversed(sizes):
            replay, hidden = capture(partial(forward, self._buffer.words(each)))
            self._recordings.insert(0, _Recording(each, replay, hidden))

    @property
    def num_recordings(self) -> int:
        """Sizes of steps that are recorded."""
        return len(self._recordings)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return self._buffer.pinned_bytes

    def forward(self, batch: ScheduledBatch) -> Tensor | None:
        """Replay the smallest size that holds ``batch``: the hidden states of all that draw
        [num_samples, hidden_size], in plan order, until the next replay. None if there is none."""
        wanted = sizes_of(batch)
        for recording in self._recordings:
            if recording.sizes.hold(wanted):
                self._buffer.send(batch, recording.sizes)
                recording.replay()
                return recording.hidden[: wanted.num_draws]
        return None
