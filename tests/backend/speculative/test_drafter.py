"""Drafts of the server: the look-up, and the requests that get some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manager_harness import Recorder, request, running, serve
from support.triton_stub import CountingEngine

from inflight_backend.errors import ConfigurationError
from inflight_backend.speculative.drafter import Drafter, SpeculativeDecodingConfig
from inflight_backend.speculative.ngram import NgramIndex
from inflight_scheduler import (
    ActiveRequests,
    BatchPlanner,
    BlockManager,
    LlmRequest,
    SamplingParams,
)

NGRAM = SpeculativeDecodingConfig("ngram", 4, 3, 2)


def looked_up(tokens: Sequence[int], num_tokens: int, max_size: int) -> list[int]:
    """The rule of `NgramIndex`, by looking everywhere (texts are short: all places count)."""
    end = len(tokens)
    sizes = {}
    for place in range(2, end):
        size = 0
        while size < min(max_size, place) and tokens[place - size - 1] == tokens[end - size - 1]:
            size += 1
        if size >= 2:
            sizes[place] = size
    if not sizes:
        return []
    best = max(sizes, key=lambda place: (sizes[place], place))
    text = list(tokens)
    for place in range(best, best + num_tokens):
        text.append(text[place])
    return text[end:]


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=17),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    num_tokens=st.integers(1, 6),
    max_size=st.integers(2, 5),
)
def test_the_index_finds_the_latest_of_the_longest(
    tokens: list[int], steps: list[int], num_tokens: int, max_size: int
) -> None:
    text: list[int] = []
    index = NgramIndex(text, max_size)
    for step in steps:  # however the text grows
        text += tokens[len(text) : len(text) + step]
        assert index.guess(num_tokens) == looked_up(text, num_tokens, max_size)


def test_a_guess_repeats_itself() -> None:
    assert NgramIndex([9, 1, 2, 3, 1, 2], 4).guess(7) == [3, 1, 2, 3, 1, 2, 3]
    assert NgramIndex([1, 2, 3, 4], 4).guess(3) == []
    assert NgramIndex([1, 2], 4).guess(3) == []


class World:
    """Requests that generate, in few blocks of 4 tokens."""

    def __init__(self, num_blocks: int = 64, max_num_tokens: int = 64) -> None:
        self.manager = BlockManager(num_blocks, 4)
        self.active = ActiveRequests(self.manager)
        self.planner = BatchPlanner(self.manager, 8, self.active)
        self.guided: set[int] = set()
        self.drafter = Drafter(
            NGRAM, self.manager, max_num_tokens, lambda each: each.request_id in self.guided
        )

    def add(self, request_id: int, max_new: int = 40, **values: Any) -> LlmRequest:
        """One whose text is 1, 2, 3, 1, 2, 3, 1 and which has drawn the 2 that follows."""
        added = LlmRequest(request_id, [1, 2, 3, 1, 2, 3, 1], max_new, **values)
        self.active.add(added)
        self.planner.update(self.planner.plan([added], []), [2])
        return added

    def guess(self) -> list[int]:
        """How many drafts each gets."""
        self.drafter.guess(self.active)
        return [len(each.draft_tokens) for each in self.active]

    def run(self, *drawn: int) -> None:
        """A step of all requests."""
        self.planner.update(self.planner.plan([], self.active.generation), drawn)


def test_few_requests_that_generate_get_drafts() -> None:
    world = World()
    first = world.add(1)
    assert world.guess() == [4]
    assert first.draft_tokens == (3, 1, 2, 3)
    waiting = LlmRequest(2, [1, 2, 1], 4)
    world.active.add(waiting)
    assert not world.drafter.is_on(world.active), "a context comes first"
    world.active.remove(waiting)
    world.add(2)
    assert world.guess() == [4, 4]
    world.add(3)
    assert not world.drafter.is_on(world.active), "too many"


def test_requests_whose_sampling_looks_back_get_no_drafts() -> None:
    for sampling in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(no_repeat_ngram_size=3),
        SamplingParams(bad_words=((1, 2),)),
        SamplingParams(top_p=0.9, top_p_decay=0.9),
    ):
        world = World()
        world.add(1, sampling=sampling)
        assert world.guess() == [0]
    for sampling in (SamplingParams(bad_words=((1,),)), SamplingParams(top_p=0.9, min_p=0.1)):
        world = World()
        world.add(1, sampling=sampling)
        assert world.guess() == [4]
    world.guided = {1}
    assert world.guess() == [0]


def test_number_of_drafts_follows_the_last_result() -> None:
    world = World()
    request = world.add(1)
    world.guess()
    world.run(9, 1, 1, 1, 1)  # none was right, and what came is new
    assert world.guess() == [0]
    world.run(1)
    world.run(2)
    assert world.guess() == [2]
    assert request.draft_tokens == (9, 1)
    world.run(9, 1, 2)
    assert (world.guess(), request.tokens[-3:]) == ([4], [9, 1, 2])
    world.run(9, 5, 0, 0, 0)  # some
    world.run(1)
    world.run(2)
    assert world.guess() == [4]


def test_drafting_pauses_while_all_drafts_are_wrong() -> None:
    world = World()
    request = world.add(1)
    numbers = []
    for new in range(20, 35):
        for token in (new, 1, 2):
            numbers += world.guess()
            world.run(token, *[0] * len(request.draft_tokens))
    guessed = [number for number in numbers if number]
    assert guessed[:3] == [4, 2, 1]
    assert set(guessed[3:]) == {1}
    assert len(guessed) < 8, "every third step would do with a pair that was seen"


def test_drafts_take_only_spare_tokens_and_blocks() -> None:
    """Of the answer, of the token budget, and of the blocks."""
    world = World()
    world.add(1, max_new=3)
    assert world.guess() == [1], "one token comes in any case"
    world = World(max_num_tokens=5)
    world.add(1)
    world.add(2)
    assert world.guess() == [3, 0]
    world = World(num_blocks=5)  # 7 tokens are cached, so each has one place left
    world.add(1, max_new=9)
    world.add(2, max_new=9)
    assert world.manager.num_free_blocks == 1
    assert world.guess() == [4, 0]


def test_invalid_settings_are_refused() -> None:
    for values, message in (
        ({"mode": "medusa"}, "speculative_decoding_mode must be one of none, ngram, not 'medusa'"),
        ({"max_draft_len": -1}, "max_draft_len must be at least 0"),
        ({"max_matching_ngram_size": 1}, "max_matching_ngram_size must be at least 2"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size must be at least 1"),
        ({"mode": "ngram", "max_draft_len": 0}, "max_draft_len is 0: no draft could be verified"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            replace(SpeculativeDecodingConfig(), **values)


def test_an_engine_that_verifies_nothing_is_asked_for_no_drafts() -> None:
    engine = CountingEngine()
    engine.supports_drafts = False
    with pytest.raises(ConfigurationError, match="the engine verifies no drafts"):
        running(Recorder(), engine, speculative_decoding_config=NGRAM).__enter__()
    recorder = serve([request(1, [5], 4, draft_input_ids=[6])], engine)
    assert "but max_draft_len is 0 on this server" in recorder.responses[1][0][2]


def test_several_tokens_of_a_step_are_one_response() -> None:
    drafts = [6, 7, 8, 0, 10]  # of 6, 7, 8, 9, 10, ...
    recorder = serve(
        [
            request(1, [5], 12, draft_input_ids=drafts),
            request(2, [5], 12, draft_input_ids=drafts, end_id=7),
            request(3, [5], 12, draft_input_ids=drafts, stop_words_list=[[7, 8], [1, 2]]),
            request(4, [5], 4, draft_input_ids=[6, 7, 8]),
        ]
    )
    sent = {i: [ids for ids, _, _ in recorder.responses[i]] for i in range(1, 5)}
    assert sent[1] == [[5, 6, 7, 8, 9], *([token] for token in range(10, 18))] or sent[1] == [
        [6, 7, 8, 9],
        *([token] for token in range(10, 18)),
    ]
    assert (sent[2], sent[3], sent[4]) == ([[6]], [[6, 7]], [[6, 7, 8, 9]])
    drafted = [stats for stats in recorder.stats if "Draft Tokens" in stats]
    assert [stats["Draft Tokens"] for stats in drafted] == [18]
    assert drafted[0]["Requests with Draft Tokens"] == 4
