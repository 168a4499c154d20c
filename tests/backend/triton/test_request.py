"""Request parameters: known ones count, all others are refused by name, on every model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.triton_harness import WAIT, Server, error_of, ids_of
from support.triton_stub import FakePbUtils, FakeRequest

import inflight_protocol as protocol
from inflight_backend.errors import InvalidRequest
from inflight_backend.triton_io.inputs import read_head
from inflight_protocol.aliases import LLM_API_INPUT_MAP
from inflight_protocol.tensors import make_inputs

UNKNOWN = "'surprise' came as a request parameter"


class Unreadable(FakeRequest):
    """Its id or its parameters cannot be asked for."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__({"input_ids": [[1]]}, "7")
        self._where, self._error = where, error

    def request_id(self) -> str:
        return self._read("id", super().request_id())

    def parameters(self) -> str:
        return self._read("parameters", super().parameters())

    def _read(self, part: str, text: str) -> str:
        if part == self._where:
            raise self._error
        return text


def head_of(parameters: str, request_id: str = "7") -> Any:
    return read_head(FakeRequest({}, request_id, parameters=parameters))


def test_what_triton_and_our_clients_add_is_no_setting() -> None:
    head = head_of('{"id":"7","inflight_error_codes":true}')
    assert (head.request_id, head.asks_for_codes, head.settings) == ("7", True, {})
    head.refuse_settings()
    assert not head_of('{"inflight_error_codes":false}').asks_for_codes


def test_settings_keep_their_kind_and_order() -> None:
    head = head_of('{"n":3,"temperature":0.9,"name":"x","flag":true,"id":"8"}')
    expected = [("n", 3), ("temperature", 0.9), ("name", "x"), ("flag", True), ("id", "8")]
    assert list(head.settings.items()) == expected
    head.check()
    with pytest.raises(InvalidRequest, match=r"^'n' came as a request parameter"):
        head.refuse_settings()


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ('{"n":3,"n":3}', "'n' is given twice"),
        ('{"inflight_error_codes":"yes"}', "'inflight_error_codes' must be true or false"),
    ],
)
def test_faults_are_found_when_asked_for(parameters: str, reason: str) -> None:
    head = head_of(parameters)
    for look in (head.check, head.refuse_settings):
        with pytest.raises(InvalidRequest, match=reason):
            look()


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ("", "not readable"),
        ('{"a": ', "not readable"),
        ('{"a": nan}', "not readable"),
        ("[" * 100_000, "not readable"),
        ("[]", "no JSON object"),
        ('[["inflight_error_codes", true]]', "no JSON object"),
        ("null", "no JSON object"),
    ],
)
def test_parameters_that_are_no_json_end_their_request_only(
    server: Server, parameters: str, reason: str
) -> None:
    first = FakeRequest(make_inputs({"input_ids": [1]}), parameters=parameters)
    second = FakeRequest(make_inputs({"input_ids": [1], "request_output_len": 2}))
    server.model.execute([first, second])
    assert error_of(first.sender) == (
        f"the request parameters are {reason}",
        FakePbUtils.TritonError.INVALID_ARG,
    )
    assert second.sender.is_final.wait(WAIT)
    assert ids_of(second.sender) == [1, 2, 3]


@pytest.mark.parametrize("part", ["id", "parameters"])
def test_a_head_that_cannot_be_asked_for_is_a_fault(part: str) -> None:
    head = read_head(Unreadable(part, RuntimeError("shared memory")))
    assert head.request_id == ("" if part == "id" else "7")
    with pytest.raises(InvalidRequest, match=r"^the request (id is|parameters are) not readable$"):
        head.check()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("sampling_param_max_tokens", "; the input is called 'max_tokens'"),
        ("top_k", "; the input is called 'runtime_top_k' in tensorrt_llm, 'top_k' in ensemble"),
        ("len_penalty", "'len_penalty' in tensorrt_llm, 'length_penalty' in ensemble"),
        ("sampling_param_top_p", "'runtime_top_p' in tensorrt_llm, 'top_p' in ensemble"),
        ("max_tokens", "no parameter of that name is known"),
        ("surprise", "no parameter of that name is known"),
    ],
)
def test_a_name_of_another_model_is_told_what_it_is_here(key: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        head_of(f'{{"{key}":1}}').refuse_settings()
    assert str(caught.value).startswith(f"'{key}' came as a request parameter")
    assert str(caught.value).endswith(hint)


def test_every_name_of_the_llm_api_is_of_an_input_that_is_honoured() -> None:
    for ours in LLM_API_INPUT_MAP.values():
        assert protocol.INPUT_BY_NAME[ours].is_honoured


@pytest.mark.parametrize("inputs", [{"input_ids": [1], "request_output_len": 3}, {"stats": True}])
def test_the_llm_refuses_them_by_name(server: Server, inputs: dict[str, Any]) -> None:
    parameters = '{"inflight_error_codes":true,"surprise":1}'
    request = FakeRequest(make_inputs(inputs), parameters=parameters)
    server.model.execute([request])
    message, code = error_of(request.sender)
    assert message.startswith(f"[INVALID_ARG] {UNKNOWN}")
    assert code == FakePbUtils.TritonError.INVALID_ARG


@pytest.mark.parametrize("where", ["id", "parameters"])
def test_bytes_that_are_no_text_end_only_their_request(server: Server, where: str) -> None:
    """Triton's binding decodes them when asked."""
    broken = Unreadable(where, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text"))
    sound = FakeRequest(make_inputs({"input_ids": [1], "request_output_len": 3}))
    server.model.execute([broken, sound])
    message, code = error_of(broken.sender)
    assert message.endswith("not valid UTF-8")
    assert code == FakePbUtils.TritonError.INVALID_ARG
    assert sound.sender.is_final.wait(WAIT)
    assert ids_of(sound.sender)[-3:] == [2, 3, 4]


def test_rows_repeat_it_too(server: Server) -> None:
    rows = {
        "input_ids": np.array([[1], [5]], dtype=np.int32),
        "request_output_len": np.array([[2], [2]], dtype=np.int32),
        "streaming": np.array([[True], [True]]),
    }
    right = FakeRequest(rows, parameters='{"Streaming":true}')
    wrong = FakeRequest(rows, parameters='{"Streaming":false}')
    server.model.execute([right, wrong])
    assert error_of(wrong.sender)[0].startswith("request parameter 'Streaming' must say")
    assert right.sender.is_final.wait(WAIT)
    assert sorted(ids_of(right.sender)) == [2, 3, 6, 7]
