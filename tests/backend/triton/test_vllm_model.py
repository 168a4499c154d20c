"""``vllm_model`` in front of a real `tensorrt_llm` that counts, without the server between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.relay_harness import Ask, answering, tensors_of, vllm_model
from support.triton_harness import Server, error_of
from support.triton_stub import FakePbUtils, FakeSender

from inflight_backend.errors import ConfigurationError


@pytest.fixture
def ask(server: Server) -> Iterator[Ask]:
    """Send one request to ``vllm_model`` and wait for its end."""
    with vllm_model() as ask:
        yield ask


def test_the_sample_client_of_vllms_backend(ask: Ask) -> None:
    """It sends its settings twice, and text: as a tensor and as parameters of the request."""
    settings = {"temperature": "0", "top_p": "0.95", "max_tokens": "4"}
    whole = ask(settings=settings, parameters=settings, stream=False, exclude_input_in_output=False)
    assert tensors_of(whole) == [{"text_output": [b"1 2 3 4 5 6"]}]
    short = ask(settings=settings, parameters=settings, stream=True, exclude_input_in_output=True)
    pieces = tensors_of(short)
    assert b"".join(piece["text_output"][0] for piece in pieces) == b" 3 4 5 6"


FRONTEND = {"frequency_penalty": 0, "ignore_eos": False, "n": 1, "presence_penalty": 0, "top_p": 1}
COMPLETION = {**FRONTEND, "temperature": 0, "best_of": 1, "max_tokens": 4}
CHAT = {**FRONTEND, "temperature": 0, "logprobs": False, "max_tokens": 4}


NEWER_COMPLETION = {**FRONTEND, "temperature": 0, "max_tokens": 4}
NO_LOG_PROBS = {"return_logprobs": False}


@pytest.mark.contract(
    "vllm_model input",
    "text_input stream sampling_parameters exclude_input_in_output return_finish_reason "
    "return_num_input_tokens return_num_output_tokens",
)
@pytest.mark.contract(
    "vllm_model output", "text_output finish_reason num_input_tokens num_output_tokens"
)
@pytest.mark.parametrize(
    ("settings", "more"), [(COMPLETION, {}), (CHAT, {}), (NEWER_COMPLETION, NO_LOG_PROBS)]
)
def test_tritons_openai_frontend(ask: Ask, settings: dict[str, Any], more: dict[str, bool]) -> None:
    """Counts per response: it adds them up. ``more``: what newer ones send as tensors."""
    wants = {"return_num_input_tokens": True, "return_num_output_tokens": True, **more}
    whole = ask(settings=settings, stream=False, exclude_input_in_output=True, **wants)
    [answer] = tensors_of(whole)
    assert answer == {
        "text_output": [b" 3 4 5 6"],
        "num_input_tokens": [2],
        "num_output_tokens": [4],
    }
    kinds = {each.name(): each.as_numpy().dtype for each in whole.responses[0].output_tensors}
    assert kinds["num_input_tokens"] == kinds["num_output_tokens"] == np.uint32
    pieces = tensors_of(ask(settings=settings, stream=True, exclude_input_in_output=True, **wants))
    assert sum(piece["num_output_tokens"][0] for piece in pieces) == 4
    assert {piece["num_input_tokens"][0] for piece in pieces} == {2}


def test_it_calls_the_model_that_is_named() -> None:
    """As ``tensorrt_llm_bls`` does: a deployment may have several, each with a model of its own."""
    said = {"text_output": np.array([b"it is mine"], dtype=object)}
    with (
        answering(lambda request: [said], "mine"),
        vllm_model(tensorrt_llm_model_name="mine") as ask,
    ):
        assert tensors_of(ask()) == [{"text_output": [b"1 2it is mine"]}]


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
@pytest.mark.parametrize("num_answers", [1, 2])
def test_the_last_response_says_that_it_is(ask: Ask, is_streaming: bool, num_answers: int) -> None:
    """As vLLM's: its clients may wait for that without asking for an empty response behind it."""
    sender = ask(settings={"n": num_answers, "max_tokens": 3}, stream=is_streaming)
    assert not sender.ends_empty
    assert any(tensors_of(sender)[-1]["text_output"])


class FullMemory(FakeSender):
    """Its last response finds no room; what comes then does."""

    num_failures = 0

    def send(self, response: Any = None, flags: int = 0) -> None:
        if flags and not self.num_failures:
            self.num_failures += 1
            raise RuntimeError("shm full")
        super().send(response, flags)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_last_response_that_cannot_be_sent_is_an_error(ask: Ask, is_streaming: bool) -> None:
    sender = ask(settings={"max_tokens": 3}, stream=is_streaming, sender=FullMemory())
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
        ({"settings": {"n": 10**6}}, "'num_return_sequences' is 1000000, outside 1..4"),
        ({"settings": {"n": 0}}, "'num_return_sequences' is 0"),
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
