"""Runs a recording through the same scheduler code and compares every decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight_recorder.schema import Chunk, Decision, Iteration
from inflight_recorder.settings import Lists
from inflight_recorder.simulator import MakeScheduler, Simulation, default_scheduler
from inflight_recorder.storage import RecordingReader
from inflight_recorder.timeline import count


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference: in iteration ``number`` the recording says one thing, we another."""

    number: int
    what: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"iteration {self.number} differs in {self.what}\n"
            f"  recorded: {self.recorded}\n"
            f"  replayed: {self.replayed}"
        )


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """How far a replay came. ``divergence`` None: identical to the end."""

    num_iterations: int
    num_requests: int
    num_pauses: int
    divergence: Divergence | None = None

    def __str__(self) -> str:
        if self.divergence is not None:
            return str(self.divergence)
        return (
            f"identical, {count(self.num_iterations, 'iteration')} "
            f"({count(self.num_requests, 'request')}, {count(self.num_pauses, 'pause')})"
        )


def replay(
    reader: RecordingReader, make_scheduler: MakeScheduler = default_scheduler
) -> ReplayResult:
    """Decide again what was decided, up to the first difference.

    `RecordingError` when the recording cannot be read, or tells of something impossible.
    """
    header = reader.header
    with reader.named_place():
        simulation = Simulation(reader.settings, make_scheduler, header)
    num_iterations = num_pauses = 0
    num_requests = len(header.active)
    for iteration in reader:
        with reader.named_place():
            divergence = _replay_iteration(simulation, iteration)
        num_iterations += 1
        num_requests += len(iteration.arrivals)
        num_pauses += len(iteration.decision.paused) if iteration.decision else 0
        if divergence is not None:
            return ReplayResult(num_iterations, num_requests, num_pauses, divergence)
    return ReplayResult(num_iterations, num_requests, num_pauses)


def _replay_iteration(simulation: Simulation, iteration: Iteration) -> Divergence | None:
    simulation.arrivals(iteration)
    if iteration.decision is not None:
        simulation.begin(iteration)
        lists = simulation.decide()
        divergence = _compare(iteration.number, iteration.decision, _as_decision(lists))
        if divergence is not None:
            return divergence
        plan = simulation.plan(lists, iteration)
        num_free_blocks = simulation.block_manager.num_free_blocks
        if num_free_blocks != iteration.num_free_blocks:
            return Divergence(
                iteration.number,
                "free blocks",
                str(iteration.num_free_blocks),
                str(num_free_blocks),
            )
        simulation.run(plan, iteration)
    elif iteration.is_settled:
        simulation.settle(iteration)
    simulation.end(iteration)
    return None


def _as_decision(lists: Lists) -> Decision:
    """The ids and sizes of a decision."""
    context, generation, paused = lists
    return Decision(
        tuple([Chunk(request.request_id, request.context_chunk_size) for request in context]),
        tuple([request.request_id for request in generation]),
        paused=tuple([request.request_id for request in paused]),
    )


def _compare(number: int, recorded: Decision, replayed: Decision) -> Divergence | None:
    for what, old, new in (
        ("context requests", recorded.context, replayed.context),
        ("generation requests", recorded.generation, replayed.generation),
        ("paused requests", recorded.paused, replayed.paused),
    ):
        if old != new:
            return Divergence(number, what, _excerpt(old, new), _excerpt(new, old))
    return None


def _excerpt(items: Sequence[int] | Sequence[Chunk], other: Sequence[int] | Sequence[Chunk]) -> str:
    """The list around the first place where it differs from ``other``."""
    place = next((k for k, (x, y) in enumerate(zip(items, other, strict=False)) if x != y), None)
    if place is None:
        place = min(len(items), len(other))
    start = max(0, place - 3)
    shown = [_name(item) for item in items[start : place + 5]]
    before = ["..."] if start else []
    after = [f"... {len(items)} in all"] if place + 5 < len(items) else []
    return "[" + ", ".join([*before, *shown, *after]) + "]"


def _name(item: int | Chunk) -> str:
    if isinstance(item, Chunk):
        return f"{item.request_id} ({item.num_tokens} tokens)"
    return str(item)
