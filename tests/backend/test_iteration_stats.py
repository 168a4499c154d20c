"""What the statistics of an iteration say by themselves."""

from __future__ import annotations

import json
from datetime import datetime

from inflight_backend.engine.interface import MemoryUsage
from inflight_backend.manager.statistics import IterationStats


def test_numbers_that_are_asked_for_later_tell_when_they_were_measured() -> None:
    """Those of a loop that hangs would look as new as those of one that runs."""
    measured_at = datetime(2026, 1, 2, 3, 4, 5).timestamp()
    stats = IterationStats(
        iteration=1,
        num_active_requests=0,
        max_num_requests=1,
        num_scheduled_requests=0,
        num_context_requests=0,
        num_generation_requests=0,
        num_paused_requests=0,
        num_waiting_requests=0,
        num_repairs=0,
        num_context_tokens=0,
        max_num_blocks=1,
        num_free_blocks=1,
        tokens_per_block=4,
        memory=MemoryUsage(),
        measured_at=measured_at,
    )
    assert json.loads(stats.to_json())["Timestamp"] == "01-02-2026 03:04:05"
