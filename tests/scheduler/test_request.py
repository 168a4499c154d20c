"""What a request knows about itself."""

from __future__ import annotations

import pytest
from support.scheduler_world import make_request

from inflight_scheduler import LlmRequestState, SamplingParams


def test_states_have_the_published_values_in_chronological_order() -> None:
    assert [(state.name, state.value) for state in sorted(LlmRequestState)] == [
        ("UNKNOWN", 0),
        ("ENCODER_INIT", 1),
        ("DISAGG_GENERATION_INIT", 8),
        ("DISAGG_GENERATION_TRANS_IN_PROGRESS", 9),
        ("CONTEXT_INIT", 10),
        ("DISAGG_CONTEXT_INIT_AND_TRANS", 11),
        ("DISAGG_GENERATION_TRANS_COMPLETE", 12),
        ("GENERATION_IN_PROGRESS", 13),
        ("GENERATION_TO_COMPLETE", 14),
        ("GENERATION_COMPLETE", 20),
        ("DISAGG_CONTEXT_TRANS_IN_PROGRESS", 21),
        ("DISAGG_CONTEXT_COMPLETE", 22),
    ]


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplingParams(), True),
        (SamplingParams(top_k=1, top_p=0.9), True),
        (SamplingParams(top_k=5, temperature=0.0), True),
        (SamplingParams(top_k=5), False),
        (SamplingParams(top_p=0.9), False),
    ],
)
def test_greedy_rule(params: SamplingParams, is_greedy: bool) -> None:
    assert params.is_greedy is is_greedy


def test_repr_says_what_one_wants_to_know_and_no_text() -> None:
    request = make_request(4, num_prompt=3, max_new=5)
    request.add_new_token(9)
    assert repr(request) == "LlmRequest(4, CONTEXT_INIT, prompt=3, generated=1, left=4)"


def test_a_pause_throws_away_what_beams_have_generated() -> None:
    request = make_request(1, 3, 8, beam_width=2)
    request.move_to_next_context_chunk()
    for token in (1, 2):
        request.add_new_token(token)
    request.num_sent_tokens = 2
    request.pause()
    assert (request.num_tokens, request.prompt_len, request.max_new_tokens) == (3, 3, 8)
    assert (request.context_chunk_size, request.num_sent_tokens) == (3, 2)
