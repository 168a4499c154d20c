"""What the guard refuses, and that refusing changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.scheduler_world import make_request

from inflight_scheduler import (
    BatchPlanner,
    BlockManager,
    FinishReason,
    InvalidDecision,
    LlmRequest,
    PeftPages,
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

    def check(self, decision: object, **limits: Any) -> object:
        """With 8 places and 100 tokens, and contexts that may be cut, unless ``limits`` differ."""
        defaults: dict[str, Any] = {
            "block_manager": self.manager,
            "num_free_slots": self.planner.num_free_slots,
            "max_batch_size": 8,
            "max_num_tokens": 100,
            "may_chunk": True,
        }
        return check_decision(decision, self.active, **(defaults | limits))


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


def drafting(request: LlmRequest, num_drafts: int, num_in_chunk: int) -> LlmRequest:
    request.set_draft_tokens([7] * num_drafts)
    request.num_chunk_drafts = num_in_chunk
    return request


def with_adapters(s: Situation) -> object:
    s.three.lora_task_id = 3
    return [s.three], [], []


Bad = tuple[str, Callable[[Situation], Any], dict[str, Any], str]
TWO_PAGES = {"resources": [PeftPages(2, lambda task_id: task_id)]}
BAD: list[Bad] = [
    ("not three", lambda s: ([], []), {}, "not tuple"),
    ("nothing", lambda s: None, {}, "not NoneType"),
    ("not lists", lambda s: (iter(()), [], []), {}, "not tuple_iterator"),
    ("not requests", lambda s: ([3], [], []), {}, "not int"),
    ("unknown", lambda s: ([make_request(9)], [], []), {}, "request 9 is not active"),
    ("a copy", lambda s: ([make_request(3)], [], []), {}, "request 3 is not active"),
    ("twice", lambda s: ([], [s.two, s.two], []), {}, "request 2 is named twice"),
    ("run and paused", lambda s: ([], [s.two], [s.two]), {}, "request 2 is named twice"),
    ("context in generation", lambda s: ([], [s.three], []), {}, "not in its generation phase"),
    ("generation in context", lambda s: ([s.two], [], []), {}, "not in its context phase"),
    ("no chunk", chunk_of(0), {}, "a chunk of 0 tokens with 4 left"),
    ("past the end", chunk_of(5), {}, "a chunk of 5 tokens with 4 left"),
    ("half a chunk", chunk_of(4 / 2), {}, "a chunk of 2.0 tokens with 4 left; it must be an int"),
    (
        "true as a chunk",
        chunk_of(True),
        {},
        "a chunk of True tokens with 4 left; it must be an int",
    ),
    (
        "a cut without chunked context",
        chunk_of(3),
        {"may_chunk": False},
        "a chunk of 3 tokens with 4 left; it must be 4, since contexts are not cut",
    ),
    ("paused while waiting", lambda s: ([], [], [s.three]), {}, "it holds no slot"),
    ("paused when finished", finished, {}, "request 2 cannot be paused"),
    (
        "a pause without resume",
        lambda s: ([], [], [s.two]),
        {"max_num_tokens": 5, "may_chunk": False},
        "its 6 tokens could never run again with max_num_tokens=5",
    ),
    ("beam widths", beam_of_two, {}, r"beam widths \[1, 2\]"),
    (
        "blocks",
        lambda s: ([s.three], [s.one], []),
        {},
        "2 blocks are scheduled, but free blocks is 1",
    ),
    (
        "blocks of drafts",
        lambda s: ([], [s.one, drafting(s.two, 7, 0)], []),
        {},
        "2 blocks are scheduled, but free blocks is 1",
    ),
    (
        "pages",
        with_adapters,
        TWO_PAGES,
        "3 adapter pages are scheduled, but free adapter pages is 2",
    ),
    (
        "slots",
        lambda s: ([s.three, s.four], [], []),
        {"block_manager": BlockManager(9, 4)},
        "2 new requests are scheduled, but free slots is 1",
    ),
    (
        "still in flight",
        lambda s: ([], [s.two], []),
        {"inflight_request_ids": [2]},
        "request 2 is still running in another step",
    ),
    (
        "batch size",
        lambda s: ([], [s.one, s.two], []),
        {"max_batch_size": 1},
        "2 requests are scheduled, but max_batch_size is 1",
    ),
    (
        "tokens",
        lambda s: ([s.three], [s.two], []),
        {"max_num_tokens": 4},
        "5 tokens are scheduled, but max_num_tokens is 4",
    ),
    (
        "drafts of a last chunk",
        lambda s: ([drafting(s.three, 3, 3)], [], []),
        {"max_num_tokens": 6},
        "7 tokens are scheduled, but max_num_tokens is 6",
    ),
    (
        "drafts of a generation step",
        lambda s: ([], [drafting(s.two, 3, 0)], []),
        {"max_num_tokens": 3},
        "4 tokens are scheduled, but max_num_tokens is 3",
    ),
]


@pytest.mark.parametrize(
    ("decide", "limits", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_refused(
    decide: Callable[[Situation], object], limits: dict[str, Any], message: str
) -> None:
    situation = Situation()
    decision = decide(situation)
    with pytest.raises(InvalidDecision, match=message):
        situation.check(decision, **limits)
    situation.manager.check_integrity()
    assert situation.manager.num_free_blocks == 1
    assert situation.planner.num_free_slots == 1


GOOD: list[tuple[str, Callable[[Situation], Any], dict[str, Any]]] = [
    ("a cut", chunk_of(3), {}),
    ("a whole context", chunk_of(4), {"may_chunk": False}),
    ("a pause", lambda s: ([s.three], [], [s.two]), {"max_num_tokens": 6, "may_chunk": False}),
    ("a pause of more than a step", lambda s: ([s.three], [], [s.two]), {"max_num_tokens": 5}),
    # A chunk that keeps one draft: the other two will be dropped.
    ("a draft", lambda s: ([drafting(s.three, 3, 1)], [], [s.two]), {"max_num_tokens": 5}),
    ("pages", lambda s: ([s.three], [], []), TWO_PAGES),
    ("tuples", lambda s: ((s.three,), (), ()), {}),
]


@pytest.mark.parametrize(
    ("decide", "limits"), [each[1:] for each in GOOD], ids=[each[0] for each in GOOD]
)
def test_accepted(decide: Callable[[Situation], Any], limits: dict[str, Any]) -> None:
    situation = Situation()
    decision = decide(situation)
    assert situation.check(decision, **limits) == tuple(map(list, decision))


def test_blocks_and_slots_of_the_paused_count_as_free() -> None:
    s = Situation()
    decision: tuple[list[LlmRequest], ...] = ([s.three, s.four], [s.one], [s.two])
    assert s.check(decision) == decision
    batch = s.planner.plan(*decision)
    assert len(batch.new_blocks) == 3
    assert s.manager.num_free_blocks == 0
