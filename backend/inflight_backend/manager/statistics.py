"""The statistics of one iteration under the names of TensorRT-LLM's batch manager.

Keys and meaning: `docs/source/batch_manager.md` (in-flight batching or V1), plus those its Triton
backend reads for its metrics. One flat JSON object per iteration, keys in alphabetical order.
Counters that Triton's metrics add up (events, token lengths) are collected here until read.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from inflight_backend.manager.responses import num_shown
from inflight_backend.speculative.drafter import DraftStats
from inflight_scheduler import BeamSearch, FinishReason, LlmRequest, ScheduledBatch


class EventCounter:
    """Counts events by kind; any thread adds, another one takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, number: int = 1) -> None:
        """Count ``number`` events."""
        if number:
            with self._lock:
                self._counts[kind] += number

    def take(self) -> Mapping[str, int]:
        """The counts since the last call, by kind."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts


_MAX_UNREAD = 65_536
"""Requests kept until they are read; the oldest are dropped."""


class LengthHistograms:
    """Token lengths of ended requests; the loop's thread adds, another one takes."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=_MAX_UNREAD)
        self._unsent: dict[int, tuple[int, int]] | None = None

    def await_senders(self) -> None:
        """From now on requests count when their answers are `sent`: the sender may leave out
        tokens behind a stop word."""
        self._unsent = {}

    def ended(self, request: LlmRequest) -> None:
        """Keep the lengths of ``request``: tokens of all beams, without end ids."""
        if isinstance(request.beams, BeamSearch):
            num_output = sum(map(num_shown, request.beams.hypotheses()))
        else:
            num_output = request.num_drawn_tokens - request.orig_prompt_len
            num_output -= request.finish_reason == FinishReason.END_ID
        lengths = (request.orig_prompt_len, num_output)
        if self._unsent is None:
            self._lengths.append(lengths)
        else:
            self._unsent[request.request_id] = lengths

    def sent(self, request_id: int, num_left_out: int) -> None:
        """Count a request that ended without an error; from any thread."""
        lengths = None if self._unsent is None else self._unsent.pop(request_id, None)
        if lengths is not None:
            self._lengths.append((lengths[0], lengths[1] - num_left_out))

    def take(self) -> list[tuple[int, int]]:
        """Prompt and answer tokens of each request since the last call."""
        return [self._lengths.popleft() for _ in range(len(self._lengths))]


class StaticBatchTally:
    """The numbers of a V1 batch, and the size that it had when it was formed."""

    def __init__(self) -> None:
        self._batch_size = self._num_generating = self._num_empty_slots = 0

    def count(self, batch: ScheduledBatch, num_passed: int) -> None:
        """Count a plan that is not empty. ``num_passed`` more requests generate but do not run in
        it, as they have another beam width: their slots are not empty."""
        self._num_generating = batch.num_generation_requests
        if self._num_generating == 0:
            self._batch_size, self._num_empty_slots = len(batch.context_chunks), 0
        else:
            self._num_empty_slots = self._batch_size - self._num_generating - num_passed

    def values(self, batch: ScheduledBatch) -> dict[str, int]:
        """The keys of V1 for the iteration that ran ``batch``, the plan counted last or an empty
        one; the sums over its steps are TensorRT-LLM's numbers of the batch."""
        is_idle = batch.is_empty
        return {
            "Empty Generation Slots": 0 if is_idle else self._num_empty_slots,
            "Total Generation Tokens": 0 if is_idle else self._num_generating,
        }


def values_of_drafts(drafts: DraftStats) -> dict[str, float]:
    """The keys of an iteration that verified drafts."""
    return {
        "Acceptance Length": drafts.acceptance_length,
        "Accepted Draft Tokens": drafts.num_accepted_tokens,
        "Draft Tokens": drafts.num_draft_tokens,
        "Requests with Draft Tokens": drafts.num_requests,
    }


@dataclass(frozen=True, slots=True)
class IterationStats:
    """Counts at the end of an iteration, by key (see `Batcher.measure`).

    ``measured_at``: seconds since 1970, which tell a reader how old the numbers are, as while a
    step hangs.
    """

    values: Mapping[str, float]
    measured_at: float = field(default_factory=time.time)

    def describe_load(self) -> str:
        """Taken places, waiting requests and free blocks, for an error message."""
        values = self.values
        return (
            f"{values['Active Request Count']} of {values['Max Request Count']} places are taken, "
            f"{values['Waiting Requests']} of those requests wait, and "
            f"{values['Free KV cache blocks']} of {values['Max KV cache blocks']} KV blocks are "
            "free"
        )

    def to_json(self) -> str:
        """The flat object that `ReturnBatchManagerStatsCallback` receives."""
        moment = datetime.fromtimestamp(self.measured_at).strftime("%m-%d-%Y %H:%M:%S")
        return json.dumps({**self.values, "Timestamp": moment}, sort_keys=True)
