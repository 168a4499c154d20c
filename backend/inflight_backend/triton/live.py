"""What a live page shows: what is in flight, why it waits, and what has happened since last time.

Who looks on asks a few times a second, each time with the ``cursor`` of the answer before, and gets
one JSON object::

    cursor    for the next question
    is_new    true if this does not continue the answer before: it starts with ``standing``, the
              requests in flight before the first of ``steps``
    now_us    the time of the answer; all times ``t`` are microseconds since the server started
    steps     iterations since then (`inflight_recorder.schema.summarise`)
    first     seconds to the first token of each request since then
    gaps      ``[seconds, tokens]``: the time between two tokens of a request
    stats     the statistics of the last iteration
    requests  a row of `ROW` for each active request
    queued    ``[id, name, prompt_tokens, max_new_tokens, waited_us, reason]`` of those in the queue
              before them, the first `MAX_QUEUED`; ``num_queued``: all
    about     by id, of requests that came since then: their names and parameters; if ``is_new``, of
              all that are in flight, and the last ones before
    settings  of the scheduler, if ``is_new``
    blocks    if asked for: runs ``[owner, length]`` over all blocks, where -1 is free, -2 cached,
              -3 shared, and all others are ids of requests
    cost_us   what the answer has cost: the loop stood still for a part of that

No token and no text is in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from inflight_backend.manager.statistics import RequestParameters
from inflight_backend.manager.wait_reasons import PREPARING, WaitReasons, state_of
from inflight_recorder.recorder import NUM_CHUNKS
from inflight_recorder.schema import standing_requests, summarise
from inflight_recorder.settings import Settings, StartState
from inflight_scheduler import LlmRequest, WaitReason

if TYPE_CHECKING:
    from inflight_backend.manager.batcher import Batcher
    from inflight_backend.manager.statistics import IterationStats, RequestTimes
    from inflight_backend.triton.queue import RequestQueue

ROW = ("id", "state", "generated", "computed", "blocks", "pauses", "place", "reason")
"""Of an active request: prompt tokens that are computed, blocks that it holds, its place among
those that wait and why it does (0 and "" if it does not)."""

MAX_QUEUED = 100
MAX_STEPS = 512 * NUM_CHUNKS // 4
"""Iterations that one answer goes back."""


_Row: TypeAlias = tuple[int, str, int, int, int, int, int, str]
_QueuedRow: TypeAlias = tuple[int, int, int, int, str]


@dataclass(frozen=True, slots=True)
class LiveView:
    """One look at a batcher, to be written as JSON on another thread."""

    identity: str
    iteration: int
    num_observed: int
    now_us: int
    settings: Settings | None
    start: StartState | None
    packed: Sequence[bytes]
    observed: Sequence[tuple[bool, float, int]]
    stats: Mapping[str, float]
    parameters: Sequence[RequestParameters]
    rows: Sequence[_Row]
    queued: tuple[int, Sequence[_QueuedRow]]
    owners: Sequence[int] | None
    loop_seconds: float

    @classmethod
    def of(
        cls,
        batcher: Batcher,
        times: RequestTimes,
        stats: IterationStats,
        *,
        look_at_queue: Callable[[], tuple[int, Sequence[_QueuedRow]]],
        cursor: str = "",
        wants_blocks: bool = False,
    ) -> LiveView:
        """Call it on the thread of the batcher, between two iterations.

        Nothing leaves the queue for the active ones meanwhile, so each request is in one list.
        """
        began = time.perf_counter()
        recorder, active = batcher.recorder, list(batcher.active)
        number, num_before = _read_cursor(cursor, recorder.identity)
        start, packed = recorder.recent(number, MAX_STEPS)
        num_observed, observed = times.observed_since(num_before)
        waits, is_new = WaitReasons.of(batcher).by_id, number is None or start is not None
        return cls(
            recorder.identity,
            recorder.num_iterations,
            num_observed,
            recorder.now_us,
            recorder.settings if is_new else None,
            start,
            packed,
            observed,
            stats.values,
            [*times.parameters, *map(RequestParameters.of, active if is_new else ())],
            [_row(each, batcher, *waits.get(each.request_id, (0, None))) for each in active],
            look_at_queue(),
            batcher.block_manager.owners() if wants_blocks else None,
            time.perf_counter() - began,
        )

    def to_json(
        self, names: Mapping[int, str], name_of: Callable[[int], str | None] | None = None
    ) -> str:
        """The object of the module's docstring. ``names``: the ids of requests, by number;
        ``name_of`` an adapter, by its id."""
        began = time.perf_counter()
        num_queued, waiting = self.queued
        steps, is_new = summarise(self.packed), self.settings is not None
        arrivals = {own[0] for step in steps for own in step.get("a", ())}
        answer: dict[str, Any] = {
            "cursor": f"{self.identity}:{self.iteration}:{self.num_observed}",
            "is_new": is_new,
            "now_us": self.now_us,
            "steps": steps,
            "first": [round(value, 6) for is_first, value, _ in self.observed if is_first],
            "gaps": [[round(value, 6), n] for is_first, value, n in self.observed if not is_first],
            "stats": self.stats,
            "requests": self.rows,
            "queued": [[number, names.get(number, ""), *row] for number, *row in waiting],
            "num_queued": num_queued,
            "about": {
                each.request_id: {"name": names.get(each.request_id, ""), **_about(each, name_of)}
                for each in self.parameters
                if is_new or each.request_id in arrivals
            },
        }
        if self.settings is not None:
            answer["settings"] = _shown(self.settings)
            answer["standing"] = [] if self.start is None else standing_requests(self.start)
        if self.owners is not None:
            answer["blocks"] = [[own, len(list(run))] for own, run in groupby(self.owners)]
        seconds = self.loop_seconds + time.perf_counter() - began
        return json.dumps({**answer, "cost_us": round(seconds * 1e6)}, separators=(",", ":"))


def _row(request: LlmRequest, batcher: Batcher, place: int, reason: WaitReason | None) -> _Row:
    return (
        request.request_id,
        state_of(request, is_running=reason is None),
        request.num_generated_tokens,
        min(request.context_current_position, request.orig_prompt_len),
        batcher.block_manager.num_distinct_blocks_of(request.request_id),
        request.num_pauses,
        place,
        "" if reason is None else str(reason),
    )


def look_at_queue(
    queue: RequestQueue, why_queued: Callable[[], str]
) -> tuple[int, list[_QueuedRow]]:
    """How many requests wait before the batch manager, and ``(id, prompt_tokens, max_new_tokens,
    waited_us, reason)`` of the first ones."""
    reason, now, rows = why_queued(), time.monotonic_ns(), list[_QueuedRow]()
    for request in queue.first(MAX_QUEUED):
        own = request.llm_request
        assert own is not None, "validated before it was queued"
        waited_us = max(now - request.created_ns, 0) // 1000
        why = reason if request.is_ready else PREPARING
        rows.append((own.request_id, own.orig_prompt_len, own.max_new_tokens, waited_us, why))
    return len(queue), rows


def _read_cursor(cursor: str, identity: str) -> tuple[int | None, int]:
    """The last iteration and observation; None for the first if the cursor is of another recorder,
    or of none."""
    own, _, rest = cursor.partition(":")
    numbers = rest.split(":")
    if own != identity or len(numbers) != 2 or not all(each.isdecimal() for each in numbers):
        return None, 0
    return int(numbers[0]), int(numbers[1])


def _about(own: RequestParameters, name_of: Callable[[int], str | None] | None) -> dict[str, Any]:
    """The parameters of a request."""
    changed = dict(own.sampling)
    if "seed" in changed:
        changed["seed"] = str(changed["seed"] % 2**64)  # more than JavaScript's numbers hold
    shown: dict[str, Any] = {
        "prompt_tokens": own.prompt_tokens,
        "max_new_tokens": own.max_new_tokens,
        "priority": own.priority,
        "streaming": own.is_streaming,
        "sampling": changed,
    }
    if own.beam_width > 1:
        shown["beam_width"] = own.beam_width
    if own.lora_task_id is not None:
        name = None if name_of is None else name_of(own.lora_task_id)
        shown["lora"] = name or str(own.lora_task_id)
    return shown


def _shown(settings: Settings) -> dict[str, Any]:
    return {
        "policy": settings.policy_name,
        "scheduler_class": settings.scheduler_class,
        "num_blocks": settings.num_blocks,
        "tokens_per_block": settings.tokens_per_block,
        "max_batch_size": settings.max_batch_size,
        "max_num_tokens": settings.max_num_tokens,
        "enable_reuse": settings.enable_reuse,
        "windows": list(settings.windows),
        "lora_pages": settings.num_adapter_pages,
    }
