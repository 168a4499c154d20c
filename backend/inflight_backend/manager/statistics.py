"""The statistics of one iteration under the names of TensorRT-LLM's batch manager.

Keys and meaning: `docs/source/batch_manager.md` (in-flight batching or V1), plus those its Triton
backend reads for its metrics. One flat JSON object per iteration, keys in alphabetical order.
Counters that Triton's metrics add up (events, token lengths) are collected here until read.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import accumulate, islice
from typing import Any

from inflight_backend.manager.responses import num_shown
from inflight_backend.speculative.drafter import DraftStats
from inflight_protocol import (
    GENERATION_TOKENS,
    HISTOGRAMS,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    SUCCESSES,
)
from inflight_scheduler import BeamSearch, FinishReason, LlmRequest, ScheduledBatch
from inflight_scheduler.sampling import SamplingParams


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


_FIRST, _GAP, _QUEUE, _WHOLE, _PROMPT, _ANSWER, _PREFILL, _DECODE, _INFERENCE = HISTOGRAMS
_BOUNDS = {each.name: each.buckets for each in HISTOGRAMS}

_MAX_UNREAD = 65_536
"""Requests kept until they are read; the oldest are dropped."""

NUM_PARAMETERS = 512

NUM_OBSERVATIONS = 4096
"""Of first tokens and of gaps between tokens, so many are kept for who looks on."""


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


_FINISHED = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "length",
    FinishReason.CANCELLED: "abort",
}
"""vLLM's word for what ended a request."""


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """What a request asked for, without its tokens; of its sampling what is not the default."""

    request_id: int
    prompt_tokens: int
    max_new_tokens: int
    priority: float
    is_streaming: bool
    beam_width: int
    lora_task_id: int | None
    sampling: Mapping[str, Any]

    @classmethod
    def of(cls, request: LlmRequest) -> RequestParameters:
        """Of a request that has come; from any thread, as they never change."""
        return cls(
            request.request_id,
            request.orig_prompt_len,
            request.max_num_tokens - request.orig_prompt_len,
            request.priority,
            request.is_streaming,
            request.beam_width,
            request.lora_task_id,
            {
                name: _without_tokens(value)
                for name, default in _SAMPLING_DEFAULTS
                if (value := getattr(request.sampling, name)) != default
            },
        )


_SAMPLING_DEFAULTS = [
    (each.name, getattr(SamplingParams(), each.name)) for each in fields(SamplingParams)
]


def _without_tokens(value: Any) -> Any:
    """Words, and tokens with a bias, are text, and may be many: how many there are."""
    return f"{len(value)} of them" if isinstance(value, tuple) else value


class RequestTimes:
    """Times and lengths of requests, counted for the histograms of `inflight_protocol`; the loop's
    thread adds, another one takes.

    Nearly all requests have a token in each step, so those of the last step are one set with one
    time, and only who comes or goes is looked at.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, Counter[int]] = {each.name: Counter() for each in HISTOGRAMS}
        self._sums: dict[str, float] = dict.fromkeys(self._buckets, 0.0)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._running: set[int] = set()  # that had a token in the last step that drew some
        self._stepped_at = 0.0  # when that was
        self._num_steps = 0
        self._runs_since: dict[int, int] = {}  # of those running: steps before their first in a row
        self._token_at: dict[int, float] = {}  # the last token of others in flight
        self._arrived_at: dict[int, float] = {}
        self._waiting: set[int] = set()
        self._started_at: dict[int, float] = {}
        self._first_at: dict[int, float] = {}
        self._new: set[int] = set()  # without a token
        self._num_counted: Counter[int] = Counter()  # tokens of requests in flight, before that
        self._observed: deque[tuple[bool, float, int]] = deque(maxlen=NUM_OBSERVATIONS)
        self._num_observed = 0
        self.parameters: deque[RequestParameters] = deque(maxlen=NUM_PARAMETERS)
        """Of the last requests that came."""

    def arrived(self, request_id: int, created_ns: int) -> None:
        """A request is admitted; ``created_ns``: of the clock `time.monotonic_ns`."""
        self._arrived_at[request_id] = created_ns / 1e9
        self._waiting.add(request_id)
        self._new.add(request_id)

    def stepped(self, batch: ScheduledBatch, advanced: Sequence[LlmRequest], paused: int) -> None:
        """A step was planned, another has run, and ``advanced`` have a new token."""
        now = time.monotonic()
        with self._lock:
            for setup in batch.setups if self._waiting else ():
                if setup.request_id in self._waiting:
                    self._waiting.discard(setup.request_id)
                    self._observe(_QUEUE.name, now - self._arrived_at[setup.request_id])
                    self._started_at[setup.request_id] = now
            if advanced:
                self._count_tokens({each.request_id for each in advanced}, now)
            self._counts[PREEMPTIONS.name, ""] += paused

    def _count_tokens(self, numbers: set[int], now: float) -> None:
        """Each of these requests has one, as far as it has not ended; drafts that count, too, are
        added at the end."""
        for number in self._running - numbers:
            self._stop_running(number)
        if num_same := len(self._running):
            self._observe(_GAP.name, now - self._stepped_at, num_same)
        for number in numbers - self._running:
            if number not in self._arrived_at:
                continue
            if number in self._new:
                self._new.discard(number)
                self._observe(_FIRST.name, now - self._arrived_at[number])
                self._first_at[number] = now
            else:
                self._observe(_GAP.name, now - self._token_at.pop(number))
            self._running.add(number)
            self._runs_since[number] = self._num_steps
        self._stepped_at = now
        self._num_steps += 1
        self._counts[GENERATION_TOKENS.name, ""] += len(self._running)

    def _stop_running(self, number: int) -> None:
        self._running.remove(number)
        self._token_at[number] = self._stepped_at
        self._num_counted[number] += self._num_steps - self._runs_since.pop(number)

    def ended(self, request: LlmRequest, error: str) -> None:
        """A request leaves; one with an error is forgotten."""
        number, reason = request.request_id, request.finish_reason
        if number in self._running:
            self._stop_running(number)
        arrived = self._arrived_at.pop(number, None)
        last_at = self._token_at.pop(number, None)
        started_at = self._started_at.pop(number, None)
        first_at = self._first_at.pop(number, None)
        num_counted = self._num_counted.pop(number, 0)
        self._waiting.discard(number)
        self._new.discard(number)
        if error or arrived is None or reason is None:
            return
        num_output = request.num_drawn_tokens - request.orig_prompt_len
        with self._lock:
            now = time.monotonic()
            self._observe(_WHOLE.name, now - arrived)
            if started_at is not None:
                self._observe(_INFERENCE.name, now - started_at)
            if started_at is not None and first_at is not None:
                self._observe(_PREFILL.name, first_at - started_at)
            if first_at is not None and last_at is not None:
                self._observe(_DECODE.name, last_at - first_at)
            self._observe(_PROMPT.name, request.orig_prompt_len)
            self._observe(_ANSWER.name, num_output)
            num_prompt = request.orig_prompt_len
            self._counts[PROMPT_TOKENS.name, ""] += num_prompt
            self._counts[PREFIX_QUERIES.name, ""] += num_prompt
            # After a pause its answer was looked for as well.
            self._counts[PREFIX_HITS.name, ""] += min(request.num_reused_tokens, num_prompt)
            self._counts[GENERATION_TOKENS.name, ""] += max(num_output - num_counted, 0)
            self._counts[SUCCESSES.name, _FINISHED[reason]] += 1

    def take(self) -> dict[str, dict[str, float]]:
        """What has come since the last call, by name of the family and value of its label."""
        found: dict[str, dict[str, float]] = {}
        with self._lock:
            for (name, value), number in self._counts.items():
                if number:
                    found.setdefault(name, {})[value] = number
            self._counts.clear()
            for spec in HISTOGRAMS:
                buckets, name = self._buckets[spec.name], spec.name
                if not buckets:
                    continue
                bounds = [*(f"{each:g}" for each in spec.buckets), "+Inf"]
                sizes = list(accumulate(buckets[place] for place in range(len(bounds))))
                found[f"{name}_bucket"] = {
                    bound: size for bound, size in zip(bounds, sizes, strict=True) if size
                }
                found[f"{name}_sum"] = {"": self._sums[name]}
                found[f"{name}_count"] = {"": sizes[-1]}
                buckets.clear()
                self._sums[name] = 0.0
        return found

    def observed_since(self, number: int) -> tuple[int, list[tuple[bool, float, int]]]:
        """How many observations there were of first tokens and gaps, and those behind ``number``,
        as far as they are kept: whether it is of a first token, the seconds, and of how many tokens
        it is."""
        with self._lock:
            num_new = min(max(self._num_observed - number, 0), len(self._observed))
            return self._num_observed, list(islice(reversed(self._observed), num_new))[::-1]

    def _observe(self, name: str, value: float, num: int = 1) -> None:
        self._buckets[name][bisect_left(_BOUNDS[name], value)] += num
        self._sums[name] += num * value
        if name in (_FIRST.name, _GAP.name):
            self._observed.append((name == _FIRST.name, value, num))
            self._num_observed += 1


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
