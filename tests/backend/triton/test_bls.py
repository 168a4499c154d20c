"""``tensorrt_llm_bls`` beside the real server's tests of it: which model it calls, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.relay_harness import answering, load
from support.triton_harness import WAIT, text_of
from support.triton_stub import FakeRequest

from inflight_backend.triton.relay_wire import RelayedRequest, Tensors
from inflight_backend.triton_io.inputs import RequestHead
from inflight_backend.triton_models.bls import TritonPythonModel

Relay = Callable[..., TritonPythonModel]
ALL = ("text_output", "sequence_index")


def part(texts: tuple[str, ...], index: int | None = None, row: int | None = None) -> Tensors:
    """A response with these texts; ``index`` and ``row`` only if they were asked for."""
    tensors = {"text_output": np.array([text.encode() for text in texts], dtype=object)}
    if index is not None:
        tensors["sequence_index"] = np.array([[index]], np.int32)
    if row is not None:
        tensors["batch_index"] = np.array([[row]], np.int32)
    return tensors


def answer(request: RelayedRequest, model: str) -> list[Tensors]:
    """What ``model`` says: its name.

    For several sequences their pieces come in turns, for rows one after the other; for beams every
    response is complete.
    """
    rows = {name: tensor.reshape(-1).tolist() for name, tensor in request.inputs.items()}
    values = {name: row[0] for name, row in rows.items()}
    num_beams = values.get("beam_width", 1)
    num_sequences = values.get("num_return_sequences", 1)
    if len(rows["text_input"]) > 1:
        asked = "batch_index" in request.requested
        return [
            part((f"{row}{step}",) * width, row=row if asked else None)
            for row, width in enumerate(rows["beam_width"])
            for step in "ab"
        ]
    if num_beams > 1:
        steps = [tuple(f"{beam}{'+' * step}" for beam in range(num_beams)) for step in (0, 1)]
        return [part(texts) for texts in steps]
    if num_sequences > 1:
        asked = "sequence_index" in request.requested
        turns = [(step, index) for step in "ab" for index in range(num_sequences)]
        return [part((f"{index}{step}",), index if asked else None) for step, index in turns]
    return [part((model,))]


@pytest.fixture
def make_relay() -> Iterator[Relay]:
    """A factory of loaded relays with the parameters given; unloads what it made."""
    made: list[TritonPythonModel] = []

    def make(*, is_decoupled: bool = True, **parameters: str) -> TritonPythonModel:
        made.append(TritonPythonModel())
        load(made[-1], "tensorrt_llm_bls", parameters, is_decoupled=is_decoupled)
        return made[-1]

    with (
        answering(partial(answer, model="tensorrt_llm")),
        answering(partial(answer, model="mine"), "mine"),
    ):
        yield make
        for relay in made:
            relay.finalize()


def ask(
    relay: TritonPythonModel,
    outputs: tuple[str, ...] = ("text_output",),
    parameters: str = "{}",
    **settings: Any,
) -> Any:
    """The sender of a request for four tokens after "1 2", once it has ended; in as many rows as a
    setting has."""
    tensors = {
        name: value if isinstance(value, np.ndarray) else np.array([[value]], np.int32)
        for name, value in settings.items()
    }
    num_rows = max(map(len, tensors.values()), default=1)
    prompts = np.array([["1 2"]] * num_rows, dtype=object)
    text = {"text_input": prompts, "max_tokens": np.full((num_rows, 1), 4)}
    request = FakeRequest({**text, **tensors}, "", outputs, parameters)
    relay.execute([request])
    assert request.sender.is_final.wait(WAIT)
    return request.sender


def texts_of(sender: Any) -> list[list[str]]:
    """The texts of each response."""
    tensors = [tensor for response in sender.responses for tensor in response.output_tensors]
    named = [tensor.as_numpy() for tensor in tensors if tensor.name() == "text_output"]
    return [[text.decode() for text in array] for array in named]


@pytest.mark.contract("tensorrt_llm_bls parameter", "tensorrt_llm_model_name")
@pytest.mark.parametrize(
    ("parameters", "model"), [({}, "tensorrt_llm"), ({"tensorrt_llm_model_name": "mine"}, "mine")]
)
def test_it_calls_the_model_that_is_named(
    parameters: dict[str, str], model: str, make_relay: Relay
) -> None:
    assert text_of(ask(make_relay(**parameters))) == model


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_beams_are_passed_on_whole(make_relay: Relay, is_decoupled: bool) -> None:
    """Each of their responses says everything, so there is nothing to accumulate."""
    relay = make_relay(accumulate_tokens="true", is_decoupled=is_decoupled)
    whole = [["0", "1", "2"], ["0+", "1+", "2+"]]
    assert texts_of(ask(relay, beam_width=3)) == (whole if is_decoupled else whole[1:])


@pytest.mark.parametrize("outputs", [("text_output",), ALL])
def test_sequences_accumulate_apart(make_relay: Relay, outputs: tuple[str, ...]) -> None:
    """Also for a client that does not ask which one a response belongs to."""
    sender = ask(make_relay(accumulate_tokens="true"), outputs, num_return_sequences=2)
    assert texts_of(sender) == [["0a"], ["1a"], ["0a0b"], ["1a1b"]]
    names = [
        tuple(each.name() for each in response.output_tensors) for response in sender.responses
    ]
    assert names == [outputs] * 4


@pytest.mark.parametrize("outputs", [("text_output",), ("text_output", "batch_index")])
def test_rows_accumulate_apart(make_relay: Relay, outputs: tuple[str, ...]) -> None:
    """Each by itself, and those that search not at all."""
    widths = np.array([[1], [2], [1]], np.int32)
    sender = ask(make_relay(accumulate_tokens="true"), outputs, beam_width=widths)
    assert texts_of(sender) == [["0a"], ["0a0b"], ["1a"] * 2, ["1b"] * 2, ["2a"], ["2a2b"]]
    names = {
        tuple(each.name() for each in response.output_tensors) for response in sender.responses
    }
    assert names == {outputs}


def test_a_failure_of_ours_ends_one_request_and_loses_none_behind_it(
    make_relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = make_relay()
    real, failures = relay.translate, [MemoryError("/a/path")]

    def fail_once(request: Any, head: RequestHead) -> Any:
        if failures:
            raise failures.pop()
        return real(request, head)

    monkeypatch.setattr(relay, "translate", fail_once)
    text = {"text_input": np.array([["1 2"]], dtype=object), "max_tokens": np.array([[4]])}
    requests = [FakeRequest(dict(text), "", ("text_output",), "{}") for _ in range(2)]
    relay.execute(requests)
    assert all(request.sender.is_final.wait(WAIT) for request in requests)
    assert str(requests[0].sender.responses[-1].error) == "the request could not be taken"
    assert text_of(requests[1].sender) == "tensorrt_llm"
