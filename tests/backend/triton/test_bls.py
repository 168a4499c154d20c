"""``tensorrt_llm_bls`` beside the real server's tests of it: which model it calls, and for whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.relay_harness import answering, load
from support.triton_harness import WAIT, responses_of, text_of
from support.triton_stub import FakePbUtils, FakeRequest, FakeSender

from inflight_backend.errors import ConfigurationError
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.relay_wire import RelayedRequest, RelayedResponse, Tensors
from inflight_backend.triton_io.inputs import RequestHead
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_backend.triton_models.bls import TritonPythonModel
from inflight_backend.triton_models.draft_rounds import DraftedCall, DraftModel
from inflight_server.serve.settings import DEMO_MODEL

Part = tuple[int, int, str]
"""Row, sequence, and what is new of it: the texts of beams with a blank between them."""


def relay_to(
    parts: Sequence[Part],
    outputs: Sequence[str] = ("text_output",),
    *,
    model: str = "tensorrt_llm",
    is_decoupled: bool = True,
    num_failures: int = 0,
    parameters: Any,
    **settings: Any,
) -> FakeRequest:
    """A request for four tokens after "1 2", in as many rows as a setting has, once it has ended:
    ``model`` answers ``parts``, with the indexes that were asked for. Its first translations
    fail."""

    def answer(request: RelayedRequest) -> list[Tensors]:
        made = []
        for row, sequence, texts in parts:
            indexes = {"batch_index": row, "sequence_index": sequence}
            tensors: Tensors = {
                name: np.array([[index]], np.int32)
                for name, index in indexes.items()
                if name in request.requested
            }
            made.append({"text_output": np.array(texts.encode().split(), object), **tensors})
        return made

    num_rows = max(map(len, settings.values()), default=1)
    tensors = {name: np.array(value, np.int32) for name, value in settings.items()}
    text = {"text_input": np.array([["1 2"]] * num_rows, object)}
    requests = [
        FakeRequest(
            {**text, "max_tokens": np.full((num_rows, 1), 4), **tensors}, "", tuple(outputs)
        )
        for _ in range(num_failures + 1)
    ]
    relay = TritonPythonModel()
    load(relay, "tensorrt_llm_bls", parameters, is_decoupled=is_decoupled)
    real = relay.translate

    def translate(request: Any, head: RequestHead) -> Any:
        if request is not requests[-1]:
            raise MemoryError("/a/path")
        return real(request, head)

    relay.translate = translate  # type: ignore[method-assign]
    with answering(answer, model):
        relay.execute(requests)
        assert all(request.sender.is_final.wait(WAIT) for request in requests)
    relay.finalize()
    for request in requests[:-1]:
        assert str(request.sender.responses[-1].error) == "the request could not be taken"
    return requests[-1]


@pytest.mark.contract("tensorrt_llm_bls parameter", "tensorrt_llm_model_name")
@pytest.mark.parametrize(
    ("parameters", "model"), [({}, "tensorrt_llm"), ({"tensorrt_llm_model_name": "mine"}, "mine")]
)
def test_it_calls_the_model_that_is_named(parameters: dict[str, str], model: str) -> None:
    """Behind a request that fails by a fault of ours, which ends alone."""
    asked = relay_to([(0, 0, "3")], model=model, num_failures=1, parameters=parameters)
    assert text_of(asked.sender) == "3"


@pytest.mark.parametrize(("number", "code"), [(4, "UNSUPPORTED"), (-1, "INVALID_ARG"), (0, "")])
def test_guesses_need_a_draft_model(number: int, code: str) -> None:
    asked = relay_to([(0, 0, "3")], parameters={}, num_draft_tokens=[[number]])
    error = asked.sender.responses[-1].error
    if not code:
        assert text_of(asked.sender) == "3"
        return
    assert "'num_draft_tokens'" in str(error)
    assert error is not None
    assert error.code == getattr(FakePbUtils.TritonError, code)


def test_a_relay_with_a_draft_model_needs_its_tokenizer() -> None:
    with pytest.raises(ConfigurationError, match="set gpt_model_path of this model"):
        load(TritonPythonModel(), "tensorrt_llm_bls", {"tensorrt_llm_draft_model_name": "small"})


DESCRIPTION = {
    "vocab_size": 258,
    "max_input_len": 99,
    "max_seq_len": 100,
    "max_draft_len": 8,
    "default_sampling": {},
    "start_ids": None,
}


@pytest.mark.parametrize(
    "change",
    [{"start_ids": [0]}, {"default_sampling": {"repetition_penalty": 1.2}}],
    ids=["encoder", "penalty of the checkpoint"],
)
def test_a_target_that_verifies_nothing_gets_the_request_as_it_is(change: dict[str, Any]) -> None:
    """The text of a second round would be another source for an encoder."""
    relay = TritonPythonModel()
    names = {"tensorrt_llm_draft_model_name": "small", "gpt_model_path": str(DEMO_MODEL)}
    load(relay, "tensorrt_llm_bls", names)
    asked: list[RelayedRequest] = []

    def answer(request: RelayedRequest) -> list[Tensors]:
        if "describe" in request.inputs:
            description = json.dumps({**DESCRIPTION, **change}).encode()
            return [{"description": np.array([description], object)}]
        asked.append(request)
        return [{"text_output": np.array([b"3"], object)}]

    inputs = {"text_input": np.array([["1 2"]], object), "max_tokens": np.array([[4]], np.int32)}
    inputs["num_draft_tokens"] = np.array([[4]], np.int32)
    request = FakeRequest(inputs, "", ("text_output",))
    with answering(answer):
        relay.execute([request])
        assert request.sender.is_final.wait(WAIT)
    relay.finalize()
    assert text_of(request.sender) == "3"
    assert [sorted(each.inputs) for each in asked] == [["max_tokens", "text_input"]]


@pytest.mark.parametrize("error", ["", "it is gone"])
def test_only_a_draft_model_that_fails_is_warned_of(
    error: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once; a client that leaves amid a guess is no news."""
    question = RelayedRequest({"text_input": np.array([["1"]], object)}, [])
    model = DraftModel("tensorrt_llm", "small", TextCodec.load(DEMO_MODEL, ""))  # type: ignore[arg-type]
    call = DraftedCall(
        model, ResponseSender(FakeSender(), ResponseFactory(FakePbUtils)), question, 4
    )
    response = RelayedResponse(None, error, is_final=True)
    monkeypatch.setattr(call, "ask", lambda *args: iter([response]))
    call._is_stopped = not error
    assert call.guess(question) == call.guess(question) == []
    assert caplog.text.count("small guesses nothing") == bool(error)
    call.close()


SEQUENCES = [(0, 0, "0a"), (0, 1, "1a"), (0, 0, "0b"), (0, 1, "1b")]
ROWS = [(0, 0, "0a"), (0, 0, "0b"), (1, 0, "1a 1b"), (1, 0, "1c 1d"), (2, 0, "2a"), (2, 0, "2b")]


@pytest.mark.parametrize("outputs", [("text_output",), ("text_output", "sequence_index")])
@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize(
    ("parts", "settings", "wanted"),
    [
        (SEQUENCES, {"num_return_sequences": [[2]]}, ["0a", "1a", "0a0b", "1a1b"]),
        (ROWS, {"beam_width": [[1], [2], [1]]}, ["0a", "0a0b", "1a 1b", "1c 1d", "2a", "2a2b"]),
        ([(0, 0, "x y"), (0, 0, "xz yz")], {"beam_width": [[2]]}, ["x y", "xz yz"]),
    ],
    ids=["sequences", "rows", "beams"],
)
def test_texts_accumulate_apart(
    parts: Sequence[Part],
    settings: dict[str, Any],
    wanted: list[str],
    is_decoupled: bool,
    outputs: tuple[str, ...],
) -> None:
    """Also for a client that does not ask which one a response belongs to; those of a search say
    everything anyway."""
    accumulates = {"accumulate_tokens": "true"}
    asked = relay_to(parts, outputs, is_decoupled=is_decoupled, parameters=accumulates, **settings)
    responses = responses_of(asked.sender)
    texts = [b" ".join(tensors["text_output"]).decode() for tensors in responses]
    assert texts == (wanted if is_decoupled else wanted[-1:])
    assert {tuple(tensors) for tensors in responses} == {outputs}
