"""Who comes while another one leaves, and goes on with what that one has generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import pytest
from scheduler.recording.recorded import GUARANTEED, RecordedWorld, read

from inflight_recorder.history import build_history
from inflight_recorder.records import Settings
from inflight_recorder.replay import replay
from inflight_recorder.workload import read_workload
from inflight_scheduler import FinishReason, LlmRequest

PROMPT = [5, 6, 7, 8]


def both_expire(world: RecordedWorld, leaves: LlmRequest, comes: LlmRequest) -> None:
    """Before anything is decided."""
    world.arrive(comes)
    for request in (leaves, comes):
        request.finish(FinishReason.TIMED_OUT)
        world.end(request)
    world.iterate()


def one_ends_with_its_step(world: RecordedWorld, leaves: LlmRequest, comes: LlmRequest) -> None:
    """Beside which nothing is decided."""
    world.arrive(comes)
    world.recorder.settled(world.active)
    batch, world.running = world.running, None
    assert batch is not None
    world.planner.apply_tokens(batch, world._draw(batch))
    leaves.finish(FinishReason.CANCELLED)
    world.end(leaves)
    world.recorder.finish_iteration()


@pytest.mark.parametrize(
    ("is_overlapped", "leave"), [(False, both_expire), (True, one_ends_with_its_step)]
)
def test_a_text_goes_on_like_one_that_has_grown_in_the_same_record(
    is_overlapped: bool, leave: Callable[[RecordedWorld, LlmRequest, LlmRequest], None]
) -> None:
    """What was generated is like an earlier text, and known to be so before the prompt is."""
    settings = Settings(GUARANTEED, 32, 2, 4, enable_reuse=True, is_overlapped=is_overlapped)
    world = RecordedWorld(settings)
    first = LlmRequest(1, PROMPT, 4)
    world.arrive(first)
    while first not in world.finished:
        world.iterate()
    second, holder = LlmRequest(2, PROMPT, 40), LlmRequest(3, [*first.tokens, 9], 30)
    world.arrive(second)
    world.arrive(holder)
    while second.num_drawn_tokens < 12:
        world.iterate()
    assert second.tokens[:8] == first.tokens
    prompt = [*second.tokens[:11], 9, 9, 9]
    leave(world, second, LlmRequest(4, prompt, 5))
    last = LlmRequest(5, prompt, 2)
    world.arrive(last)
    while not world.manager.table_of(5):
        world.iterate()
    assert set(world.manager.table_of(5)) & set(world.manager.table_of(3)), "nothing is shared"
    while world.active:
        world.iterate()
    assert str(replay(read(world.text))).startswith("identical")
    assert len(build_history(read(world.text)).rows) == 5
    workload = read_workload(read(world.text))
    assert workload.book is not None
    numbers = [job.text_number for job in workload.jobs]
    assert len(numbers) == 5
    held, new = numbers[2], numbers[4]
    assert held is not None
    assert new is not None
    made = [workload.book.tokens(number, 0, len(prompt)) for number in (held, new)]
    assert num_alike(*made) == num_alike(holder.tokens, prompt) >= 8


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
