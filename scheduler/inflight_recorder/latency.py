"""What the clients notice: time to the first token, between tokens, throughput, pauses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight_scheduler.request import LlmRequest

_WHOLE = 2**62
"""A context that was complete once: from then on all of a text has been computed."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in milliseconds; 0 where nothing was measured.

    ``max_batch``: requests in the largest iteration. ``num_unanswered`` of ``num_requests`` ended
    without a token.
    """

    num_requests: int
    num_tokens: int
    seconds: float
    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    num_pauses: int
    num_recomputed_tokens: int
    num_refused: int = 0
    max_batch: int = 0
    num_unanswered: int = 0


@dataclass(slots=True)
class Latencies:
    """Collects the times of one run, in microseconds of its clock."""

    _arrivals: dict[int, int] = field(default_factory=dict)
    _last_token: dict[int, int] = field(default_factory=dict)
    _num_tokens_of: dict[int, int] = field(default_factory=dict)
    _first: array[int] = field(default_factory=lambda: array("q"))
    _gaps: array[int] = field(default_factory=lambda: array("q"))
    _first_us: int | None = None
    _last_us: int = 0
    _num_tokens: int = 0
    _num_ended: int = 0
    _num_unanswered: int = 0
    _num_pauses: int = 0
    _num_recomputed: int = 0
    _computed: dict[int, int] = field(default_factory=dict)  # tokens of each context, at most
    _max_batch: int = 0

    def arrived(self, request_id: int, time_us: int) -> None:
        """A request came."""
        self._arrivals[request_id] = time_us
        if self._first_us is None:
            self._first_us = time_us

    def found(self, request_id: int, num_generated: int, time_us: int) -> None:
        """A request was in flight before, and had so many tokens when the run began."""
        self._num_tokens_of[request_id] = num_generated
        if self._first_us is None:
            self._first_us = time_us

    def decided(
        self, lists: tuple[Sequence[LlmRequest], Sequence[LlmRequest], Sequence[LlmRequest]]
    ) -> None:
        """A decision that is planned: who is paused, what is computed once more.

        Of a context that was paused in the middle that is no more than what it had computed.
        """
        context, generation, paused = lists
        self._max_batch = max(self._max_batch, len(context) + len(generation))
        self._num_pauses += len(paused)
        for request in context:
            start = request.context_current_position
            end = start + request.context_chunk_size
            # Who was paused before this run began had computed all, for all that is known.
            before = self._computed.get(request.request_id, _WHOLE if request.num_pauses else 0)
            if request.num_pauses:
                self._num_recomputed += max(min(end, before) - start, 0)
            now = _WHOLE if end == request.prompt_len else end
            self._computed[request.request_id] = max(before, now)

    def advanced(self, request_id: int, time_us: int, num_generated: int) -> None:
        """A request has got tokens, so that it has ``num_generated``.

        Those that come at once share the time since the last one. What beams generate again after
        a pause is no news.
        """
        num_new = num_generated - self._num_tokens_of.get(request_id, 0)
        if num_new <= 0:
            return
        self._last_us = time_us
        self._num_tokens += num_new
        self._num_tokens_of[request_id] = num_generated
        last = self._last_token.get(request_id)
        if last is not None:
            gap, rest = divmod(time_us - last, num_new)
            self._gaps.extend([gap + (place < rest) for place in range(num_new)])
        elif request_id in self._arrivals:
            self._first.append(time_us - self._arrivals[request_id])
            self._gaps.extend([0] * (num_new - 1))
        self._last_token[request_id] = time_us

    def has_token(self, request_id: int) -> bool:
        """Whether a request that has not ended got one."""
        return request_id in self._last_token

    def ended(self, request_id: int) -> int:
        """A request ended; how many tokens it had."""
        num_tokens = self._num_tokens_of.pop(request_id, 0)
        self._num_ended += 1
        self._num_unanswered += num_tokens == 0
        self._arrivals.pop(request_id, None)
        self._computed.pop(request_id, None)
        self._last_token.pop(request_id, None)
        return num_tokens

    def summary(self, num_refused: int = 0) -> Summary:
        """The numbers of the whole run."""
        seconds = max(self._last_us - (self._first_us or 0), 0) / 1e6
        return Summary(
            num_requests=self._num_ended,
            num_tokens=self._num_tokens,
            seconds=seconds,
            tokens_per_second=self._num_tokens / seconds if seconds > 0 else 0.0,
            ttft_p50=_percentile(self._first, 50),
            ttft_p99=_percentile(self._first, 99),
            itl_p50=_percentile(self._gaps, 50),
            itl_p99=_percentile(self._gaps, 99),
            num_pauses=self._num_pauses,
            num_recomputed_tokens=self._num_recomputed,
            num_refused=num_refused,
            max_batch=self._max_batch,
            num_unanswered=self._num_unanswered,
        )


def _percentile(microseconds: array[int], percent: int) -> float:
    """Milliseconds that so many percent do not exceed (nearest rank)."""
    if not microseconds:
        return 0.0
    ordered = sorted(microseconds)
    rank = max(-(-len(ordered) * percent // 100), 1)
    return ordered[rank - 1] / 1000
