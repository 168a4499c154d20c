"""How soon clients hear of a process that was killed, and whether anything else harms them."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Any

from soak_parts.traffic import Span

_RECONNECT_SECONDS = 15.0  # a connection that was refused is tried again after 1 s
_MAX_UNREAD_SECONDS = 1.0  # a client may still read what had come before; busy, it takes a while


def judge(
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
