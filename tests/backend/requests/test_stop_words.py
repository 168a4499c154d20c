"""Stop words as tokens: where an answer ends, and why, whatever happens on the way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manager_harness import MAX_UTILIZATION, Recorder, request, serve
from support.triton_stub import CountingEngine

from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_backend.requests.stop_words import StopWordWatch
from inflight_scheduler import FinishReason, LlmRequest

LETTERS = st.integers(0, 2)
WORD = st.lists(LETTERS, min_size=1, max_size=4).map(tuple)


def words_list(*words: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    ids = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return np.array([ids, ends + [-1] * (len(ids) - len(ends))], dtype=np.int32)


@given(
    prompt=st.lists(LETTERS, min_size=1, max_size=5),
    answer=st.lists(LETTERS, min_size=1, max_size=12),
    words=st.lists(WORD, min_size=1, max_size=3),
    num_at_once=st.integers(1, 3),
    end_id=st.sampled_from([-1, 2]),
)
def test_an_answer_ends_with_the_first_word_in_it(
    prompt: list[int],
    answer: list[int],
    words: list[tuple[int, ...]],
    num_at_once: int,
    end_id: int,
) -> None:
    """Or with the end id, if that comes first or ends the word."""
    expected, reason = answer, FinishReason.LENGTH
    for end in range(1, len(answer) + 1):
        is_word = any(tuple(answer[max(end - len(w), 0) : end]) == w for w in words)
        if is_word or answer[end - 1] == end_id:
            is_end = answer[end - 1] == end_id
            expected = answer[:end]
            reason = FinishReason.END_ID if is_end else FinishReason.STOP_WORDS
            break
    watch, llm_request = StopWordWatch(), LlmRequest(1, prompt, len(answer), end_id=end_id)
    watch.add(llm_request, words)
    for start in range(0, len(answer), num_at_once):
        if llm_request.is_finished:
            break
        for token in answer[start : start + num_at_once]:
            if not llm_request.is_finished:
                llm_request.add_new_token(token)
        watch.check()
    assert llm_request.tokens[len(prompt) :] == expected
    assert llm_request.finish_reason is reason


@pytest.mark.contract("tensorrt_llm input", "stop_words_list")
@pytest.mark.parametrize("overlap", [OverlapScheduler.OFF, OverlapScheduler.ON])
def test_requests_end_with_their_reason(overlap: OverlapScheduler) -> None:
    """The engine counts. Word by word, at the last token, at an end id, and cut by the limit."""
    recorder = Recorder(
        [
            request(1, [1], 50, stop_words_list=words_list([9, 11], [7, 8], [30])),
            request(2, [1], 5, stop_words_list=words_list([6]), streaming=False),
            request(3, [1], 50, stop_words_list=words_list([30]), end_id=20),
            request(4, [1], 5, stop_words_list=words_list([30])),
            request(5, [5, 6], 50, stop_words_list=words_list([6, 7], [8])),  # 6 is the prompt's
        ]
    )
    serve(recorder, overlap_scheduler=overlap)
    assert recorder.tokens(1) == [2, 3, 4, 5, 6, 7, 8]
    assert recorder.tokens(2) == [1, 2, 3, 4, 5, 6]
    assert recorder.tokens(3)[-1] == 19
    assert recorder.tokens(4) == [2, 3, 4, 5, 6]
    assert recorder.tokens(5) == [7, 8]
    reasons = [recorder.last(i, "finish_reason").decode() for i in range(1, 6)]
    assert reasons == ["stop_words", "stop_words", "end_id", "length", "stop_words"]


@pytest.mark.parametrize("num_blocks", [9, 64])
def test_pauses_do_not_hide_a_word(num_blocks: int) -> None:
    recorder = Recorder(
        [request(i, [i], 25, stop_words_list=words_list([i + 9, i + 10])) for i in range(1, 6)]
    )
    serve(recorder, CountingEngine(num_blocks=num_blocks), MAX_UTILIZATION)
    for i in range(1, 6):
        assert recorder.tokens(i) == list(range(i + 1, i + 11))
        assert recorder.last(i, "finish_reason") == b"stop_words"
