"""Errors of the inference server as OpenAI's clients read them."""

from __future__ import annotations

import pytest

from inflight_client.errors import ServerError
from inflight_openai.errors import TENSOR_TO_FIELD, from_server
from inflight_protocol import INPUT_BY_NAME


def test_an_unsupported_feature_is_a_bad_request() -> None:
    error = from_server(ServerError("'random_seed' is not supported", "UNSUPPORTED"))
    assert (error.status, error.param) == (400, "seed")


def test_a_field_unknown_to_an_older_server_is_a_bad_request() -> None:
    """Triton names the input; other errors of its own say nothing about the request."""
    words = "unexpected inference input '{}' for model 'tensorrt_llm'"
    error = from_server(ServerError(words.format("stop_token_ids")))
    assert (error.status, error.param) == (400, "stop_token_ids")
    assert "its config.pbtxt, is too old" in error.message
    assert from_server(ServerError(words.format("what"))).status == 503


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("the prompt has 101 tokens, more than max_input_len = 99", "context_length_exceeded"),
        (
            "prompt (9 tokens) + request_output_len (99) = 108, more than max_seq_len = 100",
            "context_length_exceeded",
        ),
        (
            "prompt of 90 plus 1 output tokens needs 3 KV blocks of 32 tokens, but there are 2; "
            "ask for less or raise max_tokens_in_paged_kv_cache",
            "context_length_exceeded",
        ),
        (
            "prompt of 90 tokens exceeds max_num_tokens=60; shorten the prompt",
            "context_length_exceeded",
        ),
        ("'random_seed' is not supported", None),
    ],
)
def test_a_text_that_does_not_fit_has_openai_s_code_and_words(
    message: str, code: str | None
) -> None:
    error = from_server(ServerError(message, "INVALID_ARG"))
    assert error.code == code
    assert error.message.startswith("This model's maximum context length is") == bool(code)


@pytest.mark.parametrize(
    "message",
    [
        "Maximum queue size of 4096 has been reached (max_queue_size); try again later; 8 of 8 "
        "places are taken, 0 of those requests wait, and 0 of 64 KV blocks are free",
        "not started before its deadline: place 1 of 1 in the queue, and 8 of 8 places are taken, "
        "0 of those requests wait, and 0 of 64 KV blocks are free",
    ],
)
def test_a_full_server_does_not_ask_for_a_shorter_text(message: str) -> None:
    error = from_server(ServerError(message, "UNAVAILABLE"))
    assert (error.status, error.code) == (503, None)


def test_translated_names_are_tensors() -> None:
    assert set(TENSOR_TO_FIELD) <= set(INPUT_BY_NAME)
