"""Drafts on the real server: looked up, and sent by a client."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e.test_sampling import generate, infer
from support.server_process import ServeProcess

pytestmark = pytest.mark.e2e

SETTINGS = {"speculative_decoding_mode": "ngram", "max_draft_len": 6}


def test_drafts_are_accepted_and_change_no_answer(
    server: ServeProcess, serve: Callable[..., ServeProcess]
) -> None:
    """The demo model counts, so its text repeats pairs of tokens."""
    own = serve(settings=SETTINGS)
    values = {"text_input": "1 2 3 4 5 6 7 8 9 1 2 3", "max_tokens": 60, "temperature": 0.0}
    answers = [generate(each, "tensorrt_llm", **values)["text_output"] for each in (server, own)]
    assert answers[0] == answers[1]
    (whole,) = infer(own, input_ids=[5, 6, 7], request_output_len=12, return_perf_metrics=True)
    tokens = whole["output_ids"].reshape(-1).tolist()[3:]
    (told,) = infer(
        own,
        input_ids=[5, 6, 7],
        request_output_len=12,
        draft_input_ids=[*tokens[:4], (tokens[4] + 1) % 10],
        return_perf_metrics=True,
    )
    assert told["output_ids"].reshape(-1).tolist()[3:] == tokens
    assert told["total_draft_tokens"].item() >= 5
    assert told["total_accepted_draft_tokens"].item() >= 4
    assert 0 < told["acceptance_rate"].item() <= 1
    with pytest.raises(Exception, match="holds 7 tokens, more than max_draft_len = 6"):
        list(infer(own, input_ids=[5], request_output_len=9, draft_input_ids=[1] * 7))
