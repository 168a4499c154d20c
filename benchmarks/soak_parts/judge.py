"""What is wrong with what the soak saw: answers, how soon clients hear of a killed process, and
memory, threads and descriptors over time.

A process grows for a while before its memory can be judged: the ring of the recorder fills (8,192
iterations) and is replaced, torch and malloc keep what was needed once. So the warm-up is kept
apart from the steady time, and only that is judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soak_parts.server import LAUNCHER, MODEL, RELAY, TRITONSERVER, Footprint
from soak_parts.traffic import HARM, SERVED_TWICE, Span, Tally

_MAX_TOLD = 20  # of what is wrong, for each phase


def judge_answers(
    calm: Tally, disturbed: Tally, questions: Tally, not_answered: Sequence[str]
) -> list[str]:
    """``calm``: of the load before any kill; ``disturbed``: of that while processes were killed."""
    failures: list[str] = []
    for wrong in (calm.wrong, disturbed.wrong, questions.wrong, not_answered):
        failures += wrong[:_MAX_TOLD]
    failures += _judge_finals({"load": calm, "kills": disturbed, "questions": questions})
    for outcome, times in calm.outcomes.items():
        if outcome.endswith(("transport error", *HARM, SERVED_TWICE)):
            failures.append(f"{times} times '{outcome}' before any kill")
    return failures


def _judge_finals(phases: Mapping[str, Tally]) -> list[str]:
    """Each request has one; only while processes are killed it may be that none was read to its
    end."""
    failures = []
    for phase, tally in phases.items():
        counts = {number for number, times in tally.finals.items() if times}
        if not counts <= {1} or not (counts or phase == "kills"):
            failures.append(f"{phase}: finals per request: {dict(tally.finals)}")
    return failures


_RECONNECT_SECONDS = 15.0  # a connection that was refused is tried again after 1 s
_MAX_UNREAD_SECONDS = 1.0  # a client may still read what had come before; busy, it takes a while


def judge_ends(
    spans: Collection[Span],
    sent_and_open: Collection[float],
    killed: float,
    served_again: float,
    limit: float,
) -> tuple[dict[str, Any], list[str]]:
    """The part of the report, and what is wrong; all times in seconds of the monotonic clock.

    ``sent_and_open``: when those were sent that have not ended yet. Whatever was open at ``killed``
    can only end with an error, and within ``limit``, unless its end was on the way by then. So soon
    must also end what was sent from then until ``served_again`` and never reached a server that
    lives.
    """
    were_open = [span for span in spans if span.began <= killed < span.ended]
    waited = [span.ended - killed for span in were_open]
    unharmed = [
        span.ended - killed
        for span in were_open
        if not (span.is_broken or span.is_refused) and span.ended - killed > _MAX_UNREAD_SECONDS
    ]
    meanwhile = [
        span.ended - span.began
        for span in spans
        if killed < span.began < served_again and span.is_broken
    ]
    still_open = sum(began <= killed for began in sent_and_open)
    report: dict[str, Any] = {
        "open_streams": len(waited) + still_open,
        "seconds_until_they_ended_p50": round(statistics.median(waited), 2) if waited else None,
        "seconds_until_they_ended_max": round(max(waited), 2) if waited else None,
        "sent_meanwhile_seconds_max": round(max(meanwhile), 2) if meanwhile else None,
    }
    failures = []
    if still_open:
        failures.append(f"{still_open} streams did not end")
    late = [seconds for seconds in (*waited, *meanwhile) if seconds > limit]
    if late:
        failures.append(f"{len(late)} streams ended after up to {max(late):.1f} s, not {limit:g}")
    if unharmed:
        failures.append(
            f"{len(unharmed)} streams ended without an error {max(unharmed):.1f} s later"
        )
    return report, failures


def judge_harm(harmed_at: Collection[float], outages: Sequence[tuple[float, float]]) -> list[str]:
    """What is wrong with when requests ended as if no healthy server was there.

    ``outages``: from each kill until it was served again. Whatever comes at another time is not
    what was done to the server, but what it did by itself.
    """
    stray = [
        at
        for at in harmed_at
        if not any(killed <= at <= back + _RECONNECT_SECONDS for killed, back in outages)
    ]
    if not stray:
        return []
    return [f"{len(stray)} requests were lost or refused while nothing was done to the server"]


MAX_MB_PER_HOUR = 2.0
"""Of each process of ours: at 100,000 requests an hour 21 bytes each, and no object is so small."""

MAX_BYTES_PER_CANCELLED_CALL = 600.0
"""That tritonserver may keep on top. Release 24.10 keeps up to some 500 bytes of a gRPC call that
its client cancels, in memory of its own that no model can reach; what it keeps of others counts
against `MAX_MB_PER_HOUR`."""

MIN_SECONDS = 600.0
"""Below that a slope says nothing: one allocation of torch is more than it."""

JUDGED_FROM_SECONDS = 1800.0
"""Of one policy, so an hour of two: from then on memory must have been judged."""

_QUIET_SECONDS = 60.0  # between the warm-up and the steady time; it takes some 3
_MAX_GROWTH_MB = 100.0  # where the time is too short for a slope
# The compiler of grammars has two threads, the second from when two grammars come at once; and
# tritonserver starts threads of its own for load and keeps them; so does who relays, one for each
# request at a time.
_MORE_THREADS = {MODEL: 1, LAUNCHER: 0, RELAY: 40}
_MORE_DESCRIPTORS = {MODEL: 0, LAUNCHER: 0, RELAY: 0}
_OTHERS_MORE = 8


@dataclass
class Samples:
    """Footprints over time, by program."""

    points: list[tuple[float, Mapping[str, Footprint]]] = field(default_factory=list)

    def add(self, at: float, footprints: Mapping[str, Footprint]) -> None:
        """Note what the programs held at ``at`` seconds."""
        self.points.append((at, footprints))

    @property
    def seconds(self) -> float:
        """From the first to the last."""
        return self.points[-1][0] - self.points[0][0] if self.points else 0.0

    def describe(self, program: str) -> dict[str, Any]:
        """First and last MB (means of a tenth of the points each), slope of a straight line."""
        points = [(at, held[program].resident_mb) for at, held in self.points if program in held]
        tenth = max(1, len(points) // 10)
        fit = statistics.linear_regression([at for at, _ in points], [mb for _, mb in points])
        return {
            "seconds": round(points[-1][0] - points[0][0]),
            "samples": len(points),
            "first_mb": round(statistics.fmean(mb for _, mb in points[:tenth]), 1),
            "last_mb": round(statistics.fmean(mb for _, mb in points[-tenth:]), 1),
            "slope_mb_per_hour": round(fit.slope * 3600, 1),
        }


def longest_warm_up(load_seconds: float) -> float:
    """How long the warm-up may take of ``load_seconds``, which the steady time is part of.

    All that leaves enough to judge, for what is not warm is not judged either; of a time that is
    too short for that, half.
    """
    return max(load_seconds / 2, load_seconds - MIN_SECONDS - _QUIET_SECONDS)


def judge_memory(
    warm_up: Samples,
    steady: Samples,
    is_warm: bool,
    num_requests: int,
    num_cancelled: int,
    seconds: float,
) -> tuple[dict[str, Any], list[str]]:
    """The part of the report, and what is wrong.

    ``is_warm``: the warm-up lasted until what fills up was full. ``num_requests``,
    ``num_cancelled``: all and the gRPC calls that were cancelled in the steady time. ``seconds``:
    of the policy, kills and all. A slope is judged only where it means something; the report says
    so, and for `JUDGED_FROM_SECONDS` it has to.
    """
    report: dict[str, Any] = {"is_judged": is_warm and steady.seconds >= MIN_SECONDS}
    failures: list[str] = []
    if seconds >= JUDGED_FROM_SECONDS and not report["is_judged"]:
        how = "was" if is_warm else "was not"
        failures.append(
            f"memory was not judged: the warm-up {how} over after {warm_up.seconds:.0f} s, "
            f"{steady.seconds:.0f} s of {MIN_SECONDS:.0f} s came after it"
        )
    for program in steady.points[-1][1] if len(steady.points) > 2 else ():
        after = steady.describe(program)
        growth = after["last_mb"] - after["first_mb"]
        slope, limit = after["slope_mb_per_hour"], MAX_MB_PER_HOUR
        grown_bytes = slope * steady.seconds / 3600 * 2**20
        after["bytes_per_request"] = round(grown_bytes / max(num_requests, 1), 1)
        if program == TRITONSERVER:
            after["bytes_per_cancelled_call"] = round(grown_bytes / max(num_cancelled, 1), 1)
            allowed = num_cancelled * MAX_BYTES_PER_CANCELLED_CALL / 2**20
            limit += allowed / steady.seconds * 3600
        before = warm_up.describe(program) if len(warm_up.points) > 2 else None
        report[program] = {
            "warm_up": before,
            "steady": after,
            "max_slope_mb_per_hour": round(limit, 1),
        }
        if report["is_judged"] and slope > limit:
            failures.append(
                f"{program}: memory grows by {slope:.1f} MB/h, more than {limit:.1f} MB/h"
            )
        if growth > _MAX_GROWTH_MB:
            failures.append(f"{program}: grew by {growth:.0f} MB")
    return report, failures


def compare(
    before: Mapping[str, Footprint], after: Mapping[str, Footprint]
) -> tuple[dict[str, Any], list[str]]:
    """Threads and descriptors of two quiet moments: what there is more of, and what is wrong."""
    report: dict[str, Any] = {}
    failures: list[str] = []
    for name in before:
        threads = after[name].num_threads - before[name].num_threads
        descriptors = after[name].num_descriptors - before[name].num_descriptors
        kinds = after[name].descriptors - before[name].descriptors
        report[name] = {"threads": threads, "descriptors": descriptors, "more_of": dict(kinds)}
        if threads > _MORE_THREADS.get(name, _OTHERS_MORE):
            failures.append(f"{name}: {threads} more threads")
        if descriptors > _MORE_DESCRIPTORS.get(name, _OTHERS_MORE):
            failures.append(f"{name}: {descriptors} more descriptors")
    return report, failures


def loads(values: Sequence[float]) -> dict[str, float]:
    """Of the machine's load averages (one minute): least, median and most."""
    return {
        "min": round(min(values), 1),
        "median": round(statistics.median(values), 1),
        "max": round(max(values), 1),
    }
