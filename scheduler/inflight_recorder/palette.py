"""Colours and words that all pictures share.

Grey for those who wait, blue for contexts, green for generation; amber and violet for the cost of
a pause. The five can be told apart with each of the common colour deficiencies.
"""

from __future__ import annotations

from inflight_recorder.history import ACTIVITY_NAMES, Activity, History
from inflight_recorder.records import BAD_ENDS

COLOURS = {
    Activity.WAITING: "#d5dae1",
    Activity.CONTEXT: "#2f7fd1",
    Activity.GENERATION: "#46a876",
    Activity.PAUSED: "#f0a83a",
    Activity.RESUMED: "#8656c7",
    Activity.IDLE: "#93a1b0",
}
ERROR_COLOUR = "#d64545"


def title(history: History) -> str:
    """One line that says what is shown."""
    settings = history.settings
    scheduler = settings.scheduler_class or settings.policy.name.lower()
    budget = "" if settings.max_num_tokens is None else f", {settings.max_num_tokens:,} tokens"
    return (
        f"{scheduler}: {count(len(history.rows), 'request')}, "
        f"{count(history.num_iterations, 'iteration')}, "
        f"{settings.num_blocks:,} blocks of {settings.tokens_per_block} tokens, "
        f"batch of {settings.max_batch_size}{budget}"
    )


def shown_activities(history: History) -> list[Activity]:
    """Activities that occur, in the order of the legend."""
    present = {span.activity for row in history.rows for span in row.spans}
    return [activity for activity in ACTIVITY_NAMES if activity in present]


def crosses(history: History) -> str:
    """What a cross means, for the legend; "" where there is none."""
    is_any = any(row.end_reason in BAD_ENDS for row in history.rows)
    return "stopped, failed or expired" if is_any else ""


def count(number: int, what: str) -> str:
    """``3 requests``, with a separator for thousands."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def seconds(microseconds: int) -> str:
    """A duration for people."""
    if microseconds < 1000:
        return f"{microseconds} µs"
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:.3g} ms"
    if microseconds < 180_000_000:
        return f"{microseconds / 1_000_000:.3g} s"
    return f"{microseconds / 60_000_000:,.0f} min"
