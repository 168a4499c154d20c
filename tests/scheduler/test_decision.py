"""What the guard refuses, and that refusing changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.scheduler_world import ids, make_request

from inflight_scheduler import (
    BatchPlanner,
    BlockManager,
    FinishReason,
    InvalidDecision,
    LlmRequest,
    check_decision,
)


class Situation:
    """Requests 1 and 2 generate (1 at a block border), 3 and 4 wait; 3 blocks of 4 are held."""

    def __init__(self) -> None:
        self.manager = BlockManager(num_blocks=4, tokens_per_block=4)
        self.planner = BatchPlanner(self.manager, num_slots=3)
        self.one, self.two = make_request(1, 4), make_request(2, 5)
        self.three, self.four = make_request(3, 4), make_request(4, 4)
        self.active = [self.one, self.two, self.three, self.four]
        self.planner.update(self.planner.plan([self.one, self.two], []), [1, 1])

    def check(self, decision: object, *inflight: int, **limits: int) -> object:
        return check_decision(
            decision,
            self.active,
            inflight,
            block_manager=self.manager,
            num_free_slots=self.planner.num_free_slots,
            max_batch_size=limits.get("max_batch_size", 8),
            max_num_tokens=limits.get("max_num_tokens", 100),
            may_chunk=bool(limits.get("may_chunk", True)),
        )


def beam_of_two(s: Situation) -> object:
    s.two.beam_width = 2
    return [], [s.one, s.two], []


def chunk_of(num_tokens: Any) -> Callable[[Situation], object]:
    def decision(s: Situation) -> object:
        s.three.context_chunk_size = num_tokens
        return [s.three], [], []

    return decision


def finished(s: Situation) -> object:
    s.two.finish(FinishReason.CANCELLED)
    return [], [], [s.two]


BAD: list[tuple[str, Callable[[Situation], Any], str]] = [
    ("not three", lambda s: ([], []), "not tuple"),
    ("nothing", lambda s: None, "not NoneType"),
    ("not lists", lambda s: (iter(()), [], []), "not tuple_iterator"),
    ("not requests", lambda s: ([3], [], []), "not int"),
    ("unknown", lambda s: ([make_request(9)], [], []), "request 9 is not active"),
    ("a copy", lambda s: ([make_request(3)], [], []), "request 3 is not active"),
    ("twice", lambda s: ([], [s.two, s.two], []), "request 2 is named twice"),
    ("run and paused", lambda s: ([], [s.two], [s.two]), "request 2 is named twice"),
    ("context in generation", lambda s: ([], [s.three], []), "not in its generation phase"),
    ("generation in context", lambda s: ([s.two], [], []), "not in its context phase"),
    ("no chunk", chunk_of(0), "a chunk of 0 tokens with 4 left"),
    ("chunk past the end", chunk_of(5), "a chunk of 5 tokens with 4 left"),
    ("half a chunk", chunk_of(4 / 2), "a chunk of 2.0 tokens with 4 left; it must be an int"),
    ("true as a chunk", chunk_of(True), "a chunk of True tokens with 4 left; it must be an int"),
    ("paused while waiting", lambda s: ([], [], [s.three]), "it holds no slot"),
    ("paused when finished", finished, "request 2 cannot be paused"),
    ("beam widths", beam_of_two, r"beam widths \[1, 2\]"),
    ("blocks", lambda s: ([s.three], [s.one], []), "2 blocks are scheduled, but free blocks is 1"),
    ("slots", lambda s: ([s.three, s.four], [], []), "blocks"),
]


@pytest.mark.parametrize(("decide", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_refused(decide: Callable[[Situation], object], message: str) -> None:
    situation = Situation()
    decision = decide(situation)
    with pytest.raises(InvalidDecision, match=message):
        situation.check(decision)
    situation.manager.check_integrity()
    assert situation.manager.num_free_blocks == 1
    assert situation.planner.num_free_slots == 1


def test_refused_while_in_flight() -> None:
    s = Situation()
    with pytest.raises(InvalidDecision, match="request 2 is still running in another step"):
        s.check(([], [s.two], []), 2)


def test_refused_over_the_batch_size() -> None:
    s = Situation()
    with pytest.raises(InvalidDecision, match="2 requests are scheduled, but max_batch_size is 1"):
        s.check(([], [s.one, s.two], []), max_batch_size=1)


def test_refused_over_the_token_budget() -> None:
    s = Situation()
    with pytest.raises(InvalidDecision, match="5 tokens are scheduled, but max_num_tokens is 4"):
        s.check(([s.three], [s.two], []), max_num_tokens=4)


def test_drafts_run_with_a_last_chunk_and_count_in_the_token_budget() -> None:
    s = Situation()
    s.three.set_draft_tokens([7, 7, 7])
    with pytest.raises(InvalidDecision, match="7 tokens are scheduled, but max_num_tokens is 6"):
        s.check(([s.three], [], []), max_num_tokens=6)
    decision = chunk_of(3)(s)
    s.three.num_chunk_drafts = 1
    s.three.context_chunk_size = 4
    in_place_of_two: tuple[list[LlmRequest], ...] = ([s.three], [], [s.two])
    assert s.check(in_place_of_two, max_num_tokens=5), "the other two drafts will be dropped"
    s.three.context_chunk_size = 3
    assert s.check(([], [s.two], []), max_num_tokens=1)
    with pytest.raises(InvalidDecision, match="3 tokens are scheduled, but max_num_tokens is 2"):
        s.check(decision, max_num_tokens=2)


def test_refused_pause_that_could_never_resume() -> None:
    s = Situation()
    with pytest.raises(InvalidDecision, match="its 6 tokens could never run again"):
        s.check(([], [], [s.two]), max_num_tokens=5, may_chunk=False)
    s.check(([s.three], [], [s.two]), max_num_tokens=5)
    s.check(([s.three], [], [s.two]), max_num_tokens=6, may_chunk=False)


def test_refused_cut_without_chunked_context() -> None:
    s = Situation()
    assert s.check(chunk_of(1)(s))
    decision = chunk_of(3)(s)
    assert s.check(decision) == decision
    message = "a chunk of 3 tokens with 4 left; it must be 4, since contexts are not cut"
    with pytest.raises(InvalidDecision, match=message):
        s.check(decision, may_chunk=False)
    s.three.context_chunk_size = 4
    assert s.check(decision, may_chunk=False) == decision


def test_refused_without_a_slot() -> None:
    s = Situation()
    manager = BlockManager(num_blocks=9, tokens_per_block=4)
    with pytest.raises(InvalidDecision, match="2 new requests are scheduled, but free slots is 1"):
        check_decision(
            ([s.three, s.four], [], []),
            s.active,
            block_manager=manager,
            num_free_slots=1,
            max_batch_size=8,
        )


def test_blocks_and_slots_of_the_paused_count_as_free() -> None:
    s = Situation()
    decision: tuple[list[LlmRequest], ...] = ([s.three, s.four], [s.one], [s.two])
    assert s.check(decision) == decision
    batch = s.planner.plan(*decision)
    assert len(batch.new_blocks) == 3
    assert s.manager.num_free_blocks == 0


def test_lists_and_tuples_are_both_accepted() -> None:
    s = Situation()
    context, generation, paused = check_decision(
        [(s.three,), [], ()],
        s.active,
        block_manager=s.manager,
        num_free_slots=1,
        max_batch_size=8,
    )
    assert ids(context, generation, paused) == ([3], [], [])
