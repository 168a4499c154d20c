"""What a request whose numbers failed leaves in the cache: its text is known on, with its salt."""

from __future__ import annotations

import pytest
from inflight_recorder.likeness import NO_LIKENESS, Likeness
from recorder.recorded import MAX_UTILIZATION, RecordedWorld, read

from inflight_recorder import likeness
from inflight_recorder.replay import replay
from inflight_recorder.settings import Settings
from inflight_scheduler import LlmRequest

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("is_paused", [False, True])
def test_whoever_is_like_a_failed_text_is_told_so_however_late(
    is_paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likeness, "_MIN_TOKENS", 0)
    monkeypatch.setattr(likeness, "_MIN_TEXTS", 0)
    world = RecordedWorld(Settings(MAX_UTILIZATION, 16, 2, 4, enable_reuse=True))
    first = LlmRequest(0, PROMPT, 8, cache_salt=b"mine")
    world.arrive(first)
    world.iterate()
    if is_paused:
        world.recorder.decided(world.active, [], [], [first])
        world.planner.plan([], [], [first])
        world.recorder.carried_out(world.manager.num_free_blocks)
        world.recorder.finish_iteration()
        world.iterate()
    world.iterate(fault="broken")
    assert first in world.finished
    for number in range(1, 301):  # twice as many texts as are remembered, each of one token
        world.arrive(LlmRequest(number, [100 + number], 1))
        world.iterate()
    assert world.manager.num_idle_blocks >= 2, "its prompt is not cached: the test shows nothing"
    world.arrive(LlmRequest(301, PROMPT, 1, cache_salt=b"mine"))
    world.arrive(LlmRequest(302, PROMPT, 1))
    world.iterate()
    arrivals = {a.request_id: a for iteration in read(world.text) for a in iteration.arrivals}
    assert arrivals[301].likeness == Likeness(0, 5)
    assert arrivals[302].likeness == NO_LIKENESS
    if not is_paused:  # nobody but the test would have paused it
        assert replay(read(world.text)).divergence is None
