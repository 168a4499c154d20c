"""What goes into a request and what comes out of a response, against the table of the wire."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

from inflight_client.errors import InvalidArgument, ServerError
from inflight_client.grpc_transport import encode_request
from inflight_client.http_transport import encode_body
from inflight_client.options import (
    FINISH_OUTPUT,
    INDEX_OUTPUT,
    OPTION_TO_INPUT,
    TEXT_OUTPUTS,
    TOKEN_OUTPUTS,
    AnswerCollector,
    GenerateChunk,
    GenerateOptions,
    Request,
    Response,
    generate_request,
    question,
    read_chunk,
    read_objects,
)
from inflight_protocol import INPUT_BY_NAME, OUTPUT_BY_NAME

EVERY_OPTION: GenerateOptions = {
    "temperature": 0.75,
    "top_k": 5,
    "top_p": 0.5,
    "seed": 2**64 - 1,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "no_repeat_ngram_size": 3,
    "stop_words": ["a", "bé"],
    "bad_words": ["c"],
    "stop_token_ids": [7, 2**31 - 1],
    "min_tokens": 1,
    "end_id": -1,
    "pad_id": 0,
    "exclude_input_in_output": False,
    "priority": 0.25,
    "cache_salt": "tenant",
    "max_queue_time_ms": 1,
    "allotted_time_ms": 2**31 - 1,
    "guide_type": "regex",
    "guide": "[é]+",
    "n": 2,
    "logits_processor": "digits",
    "lora": "french",
}


def make_call(
    prompt: Any = "1 2 3", max_tokens: Any = 4, *, is_streaming: bool = True, **options: Any
) -> Request:
    return generate_request(
        "tensorrt_llm",
        prompt,
        max_tokens,
        "",
        cast(GenerateOptions, options),
        is_streaming=is_streaming,
    )


ALL_CALLS = {
    "text": make_call(**EVERY_OPTION),
    "tokens": make_call([1, 2, 3], **EVERY_OPTION),
    "one token": make_call([1]),
    "whole text": make_call(is_streaming=False),
    "stop": question("tensorrt_llm", "stop", "x"),
    "stats": question("tensorrt_llm", "stats", stream=True),
}


def test_every_option_is_sent() -> None:
    assert set(EVERY_OPTION) == set(OPTION_TO_INPUT) == set(GenerateOptions.__annotations__)


@pytest.mark.parametrize("name", ALL_CALLS)
def test_message_agrees_with_the_table(name: str) -> None:
    call = ALL_CALLS[name]
    message = encode_request(call)

    assert {tensor.name for tensor in message.inputs} == set(call.values)
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        spec = INPUT_BY_NAME[tensor.name]
        assert spec.is_honoured
        assert tensor.datatype == ("BYTES" if spec.dtype == "STRING" else spec.dtype)
        batch, *dims = tensor.shape
        assert batch == 1
        assert len(dims) == len(spec.dims)
        fits = zip(dims, spec.dims, strict=True)
        assert all(want in (-1, have) for have, want in fits)
        if tensor.datatype != "BYTES":
            assert len(raw) == np.dtype(spec.dtype.lower().replace("fp", "float")).itemsize * (
                math.prod(tensor.shape)
            )


@pytest.mark.parametrize("name", ALL_CALLS)
def test_json_carries_the_same_values(name: str) -> None:
    call = ALL_CALLS[name]
    body = encode_body(call)

    assert body.pop("id", "") == call.request_id
    assert body == call.values
    for key, value in body.items():
        assert isinstance(value, list) == (INPUT_BY_NAME[key].dims == (-1,))


def test_only_the_outputs_needed_are_requested() -> None:
    assert ALL_CALLS["text"].outputs == (*TEXT_OUTPUTS, INDEX_OUTPUT)  # two answers
    assert ALL_CALLS["one token"].outputs == TOKEN_OUTPUTS
    assert ALL_CALLS["whole text"].outputs == (*TEXT_OUTPUTS, FINISH_OUTPUT)
    assert ALL_CALLS["tokens"].outputs == (*TOKEN_OUTPUTS, INDEX_OUTPUT)
    assert ALL_CALLS["stop"].outputs == ()
    for call in ALL_CALLS.values():
        assert all(OUTPUT_BY_NAME[name].is_honoured for name in call.outputs)
        assert [output.name for output in encode_request(call).outputs] == list(call.outputs)


def test_numpy_values_are_values() -> None:
    call = make_call(np.array([1, 2]), np.int64(4), temperature=np.float32(0.5), top_k=np.uint8(3))

    assert call.values == {
        "input_ids": [1, 2],
        "input_lengths": 2,
        "request_output_len": 4,
        "streaming": True,
        "exclude_input_in_output": True,
        "temperature": 0.5,
        "runtime_top_k": 3,
    }
    assert all(type(value) in (int, float, bool, list) for value in call.values.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 2**31}, r"max_tokens = 2147483648 does not fit INT32: give -2147483648 to"),
        ({"max_tokens": 1.5}, r"max_tokens = 1\.5: give a whole number"),
        ({"seed": -1}, r"seed = -1 does not fit UINT64: give 0 to 18446744073709551615"),
        ({"temperature": math.nan}, r"temperature = nan: give a finite number"),
        ({"temperature": 10**400}, r"temperature = inf: give a finite number"),
        ({"top_p": math.inf}, r"^top_p = inf: give a finite number"),
        ({"temperature": "warm"}, r"temperature = 'warm': give a number"),
        ({"exclude_input_in_output": 1}, r"exclude_input_in_output = 1: give True or False"),
        ({"cache_salt": 7}, r"cache_salt = 7: give a string"),
        ({"cache_salt": "\ud800"}, r"cache_salt is not valid Unicode text \(position 0\)"),
        ({"temprature": 1.0}, r"temprature is not an option .* known are temperature, top_k"),
        ({"prompt": [1, 2**31]}, r"prompt = 2147483648 does not fit INT32"),
        ({"prompt": [1, "2"]}, r"prompt = '2': give a whole number"),
        ({"stop_token_ids": 7}, r"^stop_token_ids = 7: give a sequence of token ids"),
        ({"stop_token_ids": [1.5]}, r"^stop_token_ids = 1\.5: give a whole number"),
        ({"stop_token_ids": [2**31]}, r"^stop_token_ids = 2147483648 does not fit INT32"),
        ({"prompt": 7}, r"prompt = 7: give text \(str\) or a sequence of token ids"),
        ({"prompt": "\ud800"}, r"prompt is not valid Unicode text \(position 0\)"),
    ],
)
def test_what_the_wire_cannot_carry(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make_call(**arguments)


def test_request_id_must_be_text() -> None:
    with pytest.raises(InvalidArgument, match="request_id = 7: give a string"):
        generate_request("m", "1", 1, 7, {}, is_streaming=True)  # type: ignore[arg-type]


def test_padding_behind_the_count_is_dropped() -> None:
    response = Response({"output_ids": [4, 5, -1, -1], "sequence_length": [2]})

    assert read_chunk(response) == GenerateChunk(token_ids=(4, 5))


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "is no JSON object")])
def test_an_answer_that_is_no_object_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ServerError, match=f"the server sent why that {message}"):
        read_objects(Response({"why": [text]}), "why")


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_id", "stop"),
        ("stop_words", "stop"),
        ("length", "length"),
        ("timed_out", "timed_out"),
        ("cancelled", "cancelled"),
        ("not_finished", None),
    ],
)
def test_the_server_says_why_it_ended(reason: str, finish: str | None) -> None:
    answer = AnswerCollector(make_call([1], 1, is_streaming=False))
    tensors: dict[str, Any] = {"output_ids": [7], "sequence_length": [1], "finish_reason": [reason]}
    answer.add(Response(tensors))
    assert answer.results()[0].finish == finish


@pytest.mark.parametrize("words", ["one string", [1], 7])
def test_words_must_be_a_list_of_strings(words: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"stop_words = .*: give a list of strings"):
        make_call(stop_words=words)
