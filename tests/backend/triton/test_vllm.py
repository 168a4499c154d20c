"""``vllm_model`` in front of a loaded `tensorrt_llm`, and its ``logprobs``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.relay_harness import Ask, tensors_of, vllm_model
from support.triton_harness import Server, error_of
from support.triton_stub import FailingSender, FakePbUtils

from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_models import relay_client as relay
from inflight_backend.triton_models.vllm import LogProbs, TokenTexts
from inflight_server.serve.settings import DEMO_MODEL


@pytest.fixture
def ask(server: Server) -> Iterator[Ask]:
    """Send one request to ``vllm_model`` and wait for its end."""
    with vllm_model() as ask:
        yield ask


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("REPORT_CUSTOM_METRICS", "metrics of inflight's own are always reported: leave it out"),
        ("ENABLE_VLLM_HEALTH_CHECK", "tensorrt_llm always says whether it takes requests: leave"),
    ],
)
def test_what_configs_of_vllms_backend_say_is_told_what_is_in_its_place(
    key: str, hint: str
) -> None:
    with (
        pytest.raises(ConfigurationError, match=f"unknown setting '{key}': {hint}"),
        vllm_model(**{key: "true"}),
    ):
        pass


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_last_response_that_cannot_be_sent_is_an_error(ask: Ask, is_streaming: bool) -> None:
    sender = ask(settings={"max_tokens": 3}, stream=is_streaming, sender=FailingSender(flags=1))
    assert str(sender.responses[-1].error) == "the request could not be relayed"
    assert len(tensors_of(ask(settings={"max_tokens": 3}))) == 1


def test_several_answers_come_side_by_side(ask: Ask) -> None:
    settings = {"n": 3, "max_tokens": 2, "temperature": 0}
    wants = {"return_finish_reason": True, "return_num_output_tokens": True}
    assert tensors_of(ask(settings=settings, **wants)) == [
        {
            "text_output": [b"1 2 3 4"] * 3,
            "finish_reason": [b"length"] * 3,
            "num_output_tokens": [2] * 3,
        }
    ]
    pieces = tensors_of(ask(settings=settings, stream=True, **wants))
    assert [b"".join(each) for each in zip(*(p["text_output"] for p in pieces), strict=True)] == [
        b" 3 4"
    ] * 3
    assert pieces[0]["finish_reason"].count(b"None") >= 2  # whose first token has not come
    assert pieces[-1]["finish_reason"] == [b"length"] * 3


def test_why_an_answer_ended_is_said_in_vllms_words(ask: Ask) -> None:
    reasons = [
        tensors_of(ask(settings=settings, return_finish_reason=True))[0]["finish_reason"]
        for settings in ({"max_tokens": 2}, {"stop": "5"})
    ]
    assert reasons == [[b"length"], [b"stop"]]
    pieces = tensors_of(ask(settings={"max_tokens": 9}, stream=True, return_finish_reason=True))
    reasons = [piece["finish_reason"] for piece in pieces]
    assert reasons == [[b"None"]] * (len(pieces) - 1) + [[b"length"]]


def test_settings_may_be_parameters_of_the_request(ask: Ask, server: Server) -> None:
    [answer] = tensors_of(ask(parameters={"max_tokens": "3", "temperature": 0}))
    assert answer["text_output"] == [b"1 2 3 4 5"]
    assert len(tensors_of(ask())[0]["text_output"][0].split()) == 2 + 16  # vLLM's default


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"settings": {"surprise": 1}}, "'surprise' is not supported"),
        ({"parameters": {"surprise": 1}}, "'surprise' is not supported"),
        ({"settings": {"n": 3}, "parameters": {"n": 2}}, "'n' is not what 'sampling_parameters'"),
        ({"settings": {}, "parameters": {"n": 1}}, "'n' is not what 'sampling_parameters' says"),
        ({"settings": {"n": 10**6}}, "'n' is 1000000, outside 1..4"),
        ({"settings": {"n": 0}}, "'n' is 0"),
        ({"settings": {"max_tokens": 10**6}}, "+ max_tokens (1000000) = "),
        ({"settings": {"min_tokens": 17}}, "'min_tokens' is 17, outside 0..16"),
        ({"settings": {"top_p": 2}}, "'top_p' is 2"),
        ({"prompt": ""}, "'text_input' is empty"),
        ({"prompt": None, "stream": True}, "'text_input' is missing"),
        (
            {"stream": True, "exclude_input_in_output": False},
            "'exclude_input_in_output' must be true",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    ask: Ask, request_: dict[str, Any], message: str
) -> None:
    assert message in error_of(ask(**request_))[0]


@pytest.mark.parametrize(
    ("parameters", "prefix"), [({}, ""), ({"inflight_error_codes": True}, "[UNAVAILABLE] ")]
)
def test_errors_keep_their_code(ask: Ask, server: Server, parameters: Any, prefix: str) -> None:
    """... and carry it in the message for clients that ask for that."""
    server.model._queue.drain()
    message, code = error_of(ask(parameters=parameters))
    assert message.startswith(f"{prefix}the server is shutting down")
    assert code == FakePbUtils.TritonError.UNAVAILABLE


@pytest.fixture
def ends(tmp_path: Path, tokenizer: None) -> None:
    """The model of this folder ends texts with 8 or 9, its tokenizer with 99."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "99"}))


@pytest.mark.parametrize(
    ("settings", "answer", "reason"),
    [
        ({}, b" 3 4 5 6 7", b"stop"),
        ({"ignore_eos": True}, b" 3 4 5 6 7 8 9 10", b"length"),
        ({"stop_token_ids": [6, 7]}, b" 3 4 5", b"stop"),
        ({"stop_token_ids": [10], "ignore_eos": True}, b" 3 4 5 6 7 8 9", b"stop"),
        ({"stop_token_ids": ["6"]}, None, b"must be a list of token ids"),
        ({"stop_token_ids": [1000]}, None, b"outside the vocabulary"),
    ],
)
def test_ends_of_the_checkpoint_and_of_the_client(
    ends: None, ask: Ask, settings: dict[str, Any], answer: bytes | None, reason: bytes
) -> None:
    sender = ask(
        settings={"max_tokens": 8, "temperature": 0, **settings},
        stream=False,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
    )
    if answer is None:
        assert reason.decode() in error_of(sender)[0]
        return
    assert tensors_of(sender) == [
        {
            "text_output": [answer],
            "finish_reason": [reason],
            "num_output_tokens": [len(answer.split())],
        }
    ]


@pytest.mark.parametrize("is_asked_for", [True, False])
@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (21, "'sampling_parameters': logprobs is 21, outside 0..20"),
        (-1, "'sampling_parameters': logprobs is -1, outside 0..20"),
        (True, "'sampling_parameters': logprobs must be a whole number"),
        (1.5, "'sampling_parameters': logprobs must be a whole number"),
        ("many", "'sampling_parameters': logprobs must be a whole number"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(
    ask: Ask, logprobs: Any, message: str, is_asked_for: bool
) -> None:
    answer = ask(settings={"logprobs": logprobs}, return_logprobs=is_asked_for)
    assert error_of(answer)[0] == message


@pytest.mark.parametrize("num_left_out", [0, 1], ids=["whole", "cut in a character"])
def test_what_tokens_add_to_the_text_is_the_text(num_left_out: int) -> None:
    """Characters of several tokens, and special tokens, which have names there alone."""
    codec = TextCodec(DEMO_MODEL)
    ids = codec.encode_raw("a\u20ac b\u00e9\U0001f600", add_special_tokens=False)
    ids = ids[: len(ids) - num_left_out]
    texts = TokenTexts(codec, "1 2", skips_special_tokens=True)
    told = [text for token_id in ids[:-1] for text in texts.take([token_id], is_final=False)]
    told += texts.take(ids[-1:], is_final=True)
    assert "".join(told) == codec.decode(ids).rstrip("\ufffd")  # as the answer does
    assert told[1:4] == ["", "", "\u20ac"]
    name = codec.special_text(codec.end_id)
    assert name
    assert texts.take([codec.end_id], is_final=True) == [name]


def test_a_model_without_a_tokenizer_refuses_them_by_name(
    ask: Ask, server: Server, tmp_path: Any
) -> None:
    """One that was written by an older version has no parameters."""
    message = "'return_logprobs' needs a tokenizer: set gpt_model_path"
    assert error_of(ask(settings={"logprobs": 1}, return_logprobs=True))[0].startswith(message)
    with vllm_model(tokenizer_dir=str(tmp_path), gpt_model_path="unread") as ask_with_tokenizer:
        [answer] = tensors_of(
            ask_with_tokenizer(settings={"logprobs": 1, "max_tokens": 1}, return_logprobs=True)
        )
    assert json.loads(answer["logprobs"][0]) == [
        {
            "3": {"logprob": -1.0, "rank": 1, "decoded_token": " 3"},
            "0": {"logprob": -1.0, "rank": 1, "decoded_token": " 0"},
        }
    ]


def test_a_model_that_loads_a_tokenizer_looks_for_its_server(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that dies then leaves the process for ever: it would never know its parent."""
    looks: list[str] = []
    monkeypatch.setattr(relay, "exit_with_parent", looks.append)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError), vllm_model(gpt_model_path=str(tmp_path)):
        pass
    assert looks == ["vllm_model"]


def tensors(ids: list[int], **values: Any) -> dict[str, Any]:
    return {
        "output_ids": np.array([[ids]], dtype=np.int32),
        "output_log_probs": np.array([[values.pop("own")]], dtype=np.float32),
        "output_log_prob_ranks": np.array([[values.pop("ranks")]], dtype=np.int32),
        **{name: np.array([[value]]) for name, value in values.items()},
    }


def told(num_top: int, answer: dict[str, Any]) -> list[str]:
    """The objects of ``answer``, in which the text of a token is its id."""
    texts = [str(token_id) for token_id in answer["output_ids"].reshape(-1)]
    return LogProbs(num_top, str, Mock()).read(answer, texts)


def test_the_drawn_token_comes_first_then_the_likeliest() -> None:
    own = {"own": [-0.5, -3.0], "ranks": [1, 30]}
    assert [json.loads(row) for row in told(0, tensors([8, 9], **own))] == [
        {"8": {"logprob": -0.5, "rank": 1, "decoded_token": "8"}},
        {"9": {"logprob": -3.0, "rank": 30, "decoded_token": "9"}},
    ]
    top = {"top_log_prob_ids": [[8], [7]], "top_log_probs": [[-0.5], [-1.0]]}
    rows = [json.loads(row) for row in told(1, tensors([8, 9], **own, **top))]
    assert [list(row) for row in rows] == [["8"], ["9", "7"]]
    assert rows[1]["7"] == {"logprob": -1.0, "rank": 1, "decoded_token": "7"}


def test_of_equally_likely_tokens_the_place_counts() -> None:
    """The drawn token keeps the value that counts in its sum, which may be one among the filters'
    tokens only."""
    ties = {"top_log_prob_ids": [[7, 8]], "top_log_probs": [[-1.0, -1.0]]}
    [row] = told(2, tensors([8], own=[-0.5], ranks=[3], **ties))
    assert list(json.loads(row).items()) == [
        ("8", {"logprob": -0.5, "rank": 2, "decoded_token": "8"}),
        ("7", {"logprob": -1.0, "rank": 1, "decoded_token": "7"}),
    ]
