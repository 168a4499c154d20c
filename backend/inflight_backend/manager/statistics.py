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

from inflight_backend.engine.interface import MemoryUsage
from inflight_backend.manager.responses import num_shown
from inflight_backend.speculative.drafter import DraftStats
from inflight_scheduler import BeamSearch, FinishReason, LlmRequest, ReuseStats, ScheduledBatch


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


@dataclass(frozen=True, slots=True)
class StaticBatchStats:
    """One step of a V1 batch; the sums over its steps are TensorRT-LLM's numbers of the batch.

    ``num_empty_slots``: requests of the batch that have finished while others still generate.
    """

    num_generation_tokens: int = 0
    num_empty_slots: int = 0


@dataclass(frozen=True, slots=True)
class IterationStats:
    """Counts at the end of the iteration that ran ``batch``.

    Active requests are those still in flight then; waiting ones were active when it was scheduled
    and did not run. ``num_repairs``: how often the batcher was rebuilt since something was held
    with no request active; 0, unless we have a bug. ``reuse`` is None without block reuse, and then
    its values are 0. ``static_batch`` is None for in-flight batching; for V1 its keys replace
    `Generation Requests`, `MicroBatch ID` and `Paused Requests`. ``drafts`` is None, and its keys
    are absent, if none were verified. ``measured_at``: seconds since 1970, which tell a reader how
    old the numbers are, as while a step hangs.
    """

    iteration: int
    batch: ScheduledBatch
    num_active_requests: int
    max_num_requests: int
    num_paused_requests: int
    num_waiting_requests: int
    num_repairs: int
    max_num_blocks: int
    num_free_blocks: int
    tokens_per_block: int
    memory: MemoryUsage
    reuse: ReuseStats | None = None
    static_batch: StaticBatchStats | None = None
    drafts: DraftStats | None = None
    measured_at: float = field(default_factory=time.time)

    def describe_load(self) -> str:
        """Taken places, waiting requests and free blocks, for an error message."""
        return (
            f"{self.num_active_requests} of {self.max_num_requests} places are taken, "
            f"{self.num_waiting_requests} of those requests wait, and {self.num_free_blocks} of "
            f"{self.max_num_blocks} KV blocks are free"
        )

    def to_json(self) -> str:
        """The flat object that `ReturnBatchManagerStatsCallback` receives."""
        num_used = self.max_num_blocks - self.num_free_blocks
        num_context = len(self.batch.context_chunks)
        return json.dumps(
            {
                "Active Request Count": self.num_active_requests,
                "Context Requests": num_context,
                "Fraction used KV cache blocks": num_used / max(self.max_num_blocks, 1),
                "Free KV cache blocks": self.num_free_blocks,
                "Iteration Counter": self.iteration,
                "KV cache hit rate": 0 if self.reuse is None else self.reuse.hit_rate,
                "KV cache transfer time": 0,  # of disaggregated serving, as "Request count"
                "Max KV cache blocks": self.max_num_blocks,
                "Max Request Count": self.max_num_requests,
                "Request count": 0,
                "Reused KV cache blocks": 0 if self.reuse is None else self.reuse.num_reused_blocks,
                "Runtime CPU Memory Usage": self.memory.cpu,
                "Runtime GPU Memory Usage": self.memory.gpu,
                "Runtime Pinned Memory Usage": self.memory.pinned,
                "Scheduled Requests": num_context + self.batch.num_generation_requests,
                "Timestamp": datetime.fromtimestamp(self.measured_at).strftime("%m-%d-%Y %H:%M:%S"),
                "Tokens per KV cache block": self.tokens_per_block,
                "Total Context Tokens": self.batch.num_context_tokens,
                "Used KV cache blocks": num_used,
                "Waiting Requests": self.num_waiting_requests,
                **self._of_batching(),
                **self._of_drafts(),
                **({"Repairs": self.num_repairs} if self.num_repairs else {}),
            },
            sort_keys=True,
        )

    def _of_drafts(self) -> dict[str, float]:
        """The keys of an iteration that verified drafts."""
        if self.drafts is None:
            return {}
        return {
            "Acceptance Length": self.drafts.acceptance_length,
            "Accepted Draft Tokens": self.drafts.num_accepted_tokens,
            "Draft Tokens": self.drafts.num_draft_tokens,
            "Requests with Draft Tokens": self.drafts.num_requests,
        }

    def _of_batching(self) -> dict[str, int]:
        """The keys that only one kind of batching has."""
        if self.static_batch is not None:
            return {
                "Empty Generation Slots": self.static_batch.num_empty_slots,
                "Total Generation Tokens": self.static_batch.num_generation_tokens,
            }
        return {
            "Generation Requests": self.batch.num_generation_requests,
            "MicroBatch ID": 0,
            "Paused Requests": self.num_paused_requests,
        }
