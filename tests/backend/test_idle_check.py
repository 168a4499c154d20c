"""What is held when the last request has left is found, told once and made anew."""

from __future__ import annotations

import json

import pytest
from support.manager_harness import GUARANTEED, WAIT, Recorder, request, running
from support.triton_stub import CountingEngine

from inflight_backend.manager.batcher import Batcher
from inflight_backend.manager.gpt_manager import FULL_SECONDS, GptManager, IdleCheck
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_scheduler import BatchPlanner, BlockManager, LlmRequest

MADE_ANEW = "they are made anew"


def when_idle(manager: GptManager) -> Batcher:
    """The batcher of a loop that has come to rest: asked between two of its turns."""
    turns = [manager._questions.ask(lambda: manager._batcher).result(WAIT) for _ in range(3)]
    return turns[-1]


def repairs_of(manager: GptManager) -> int:
    """As the statistics tell it."""
    return int(json.loads(manager.stats_json).get("Repairs", 0))


@pytest.mark.case(89)
@pytest.mark.parametrize("overlap", [OverlapScheduler.OFF, OverlapScheduler.ON])
@pytest.mark.parametrize("what", ["blocks", "place"])
def test_what_a_request_leaves_behind_is_free_when_the_loop_rests(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    overlap: OverlapScheduler,
    what: str,
) -> None:
    owner, name = (BlockManager, "release") if what == "blocks" else (BatchPlanner, "release")
    real, forgotten = getattr(owner, name), [1, 2]

    def forget(self: object, leaving: LlmRequest) -> None:
        if leaving.request_id not in forgotten:
            real(self, leaving)
        else:
            forgotten.remove(leaving.request_id)
            if what == "place":
                leaving.drop_pending_tokens()
                self.block_manager.release(leaving)  # type: ignore[attr-defined]

    monkeypatch.setattr(owner, name, forget)
    recorder = Recorder([request(i, [100 * i], 9) for i in (1, 2)])
    params = TrtGptModelOptionalParams(max_batch_size=2, overlap_scheduler=overlap)
    with running(recorder, params=params) as manager:
        recorder.wait_for_finals(1, 2)
        batcher = when_idle(manager)
        assert forgotten == []
        assert batcher.is_idle_and_intact()
        recorder.pending += [request(i, [100 * i], 3) for i in (3, 4)]  # both have a place
        manager.wake()
        recorder.wait_for_finals(3, 4)
        assert recorder.tokens(3) == [301, 302, 303]
        assert when_idle(manager) is batcher
        assert repairs_of(manager) == 1
    assert caplog.text.count(MADE_ANEW) == 1


def test_an_idle_loop_that_lost_nothing_goes_on_with_its_books(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder([request(i, [100 * i], 9) for i in range(1, 5)])
    with running(recorder) as manager:
        batcher = manager._batcher
        recorder.wait_for_finals(1, 2, 3, 4)
        assert when_idle(manager) is batcher
        assert repairs_of(manager) == 0
    assert MADE_ANEW not in caplog.text


def test_all_books_are_compared_once_a_minute() -> None:
    """Numbers agree, the sum of the tables does not."""
    now = 1000.0
    batcher = Batcher(CountingEngine(), GUARANTEED, TrtGptModelOptionalParams())
    check = IdleCheck(lambda: now)

    def comes_to_rest() -> bool:
        assert not check.finds_fault(batcher, is_running=True)
        is_wrong = check.finds_fault(batcher, is_running=False)
        assert not check.finds_fault(batcher, is_running=False), "one look for each rest"
        return is_wrong

    assert not check.finds_fault(batcher, is_running=False), "nobody has been here yet"
    assert not comes_to_rest()
    batcher.block_manager._num_held += 1
    assert not comes_to_rest()
    now += FULL_SECONDS
    assert comes_to_rest()
    assert not comes_to_rest()
    batcher.planner.slots.assign()
    assert comes_to_rest(), "numbers are compared every time"
