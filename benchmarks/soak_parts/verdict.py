"""What is wrong with what came of the requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soak_parts.traffic import HARM, SERVED_TWICE, Tally

_MAX_TOLD = 20  # of what is wrong, for each phase


def judge(
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
