"""Models that relay, and what they relay to, without the server around them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from support.triton_harness import WAIT, responses_of
from support.triton_stub import FakeRequest, FakeSender, fake_pb_utils

from inflight_backend.triton.relay_server import RelayConnection, RelayListener
from inflight_backend.triton.relay_wire import (
    Message,
    RelayedRequest,
    RelayedResponse,
    Tensors,
    connect,
    pack,
    read_messages,
)
from inflight_backend.triton_models.relay_client import RelayModel
from inflight_backend.triton_models.vllm import TritonPythonModel
from inflight_protocol.tensors import make_inputs

Ask = Callable[..., FakeSender]


def load(
    model: RelayModel, name: str, parameters: Mapping[str, str], *, is_decoupled: bool = True
) -> None:
    """As Triton loads a model that relays."""
    config = {
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        "model_transaction_policy": {"decoupled": is_decoupled},
    }
    with fake_pb_utils():
        model.initialize({"model_config": json.dumps(config), "model_name": name})  # type: ignore[attr-defined]


@contextmanager
def vllm_model(**parameters: str) -> Iterator[Ask]:
    """``vllm_model`` in front of the server of this test: asks it and waits for the end."""
    model = TritonPythonModel()
    load(model, "vllm_model", parameters)

    def send(
        prompt: str | None = "1 2",
        settings: Any = None,
        parameters: Any = None,
        sender: FakeSender | None = None,
        **flags: bool,
    ) -> FakeSender:
        tensors: dict[str, Any] = {}
        if prompt is not None:
            tensors["text_input"] = np.array([prompt.encode()], dtype=object)
        if settings is not None:
            text = json.dumps(settings).encode()
            tensors["sampling_parameters"] = np.array([text], dtype=object)
        tensors |= {name: np.array([value]) for name, value in flags.items()}
        request = FakeRequest(tensors, parameters=json.dumps(parameters or {}), sender=sender)
        model.execute([request])
        assert request.sender.is_final.wait(WAIT)
        return request.sender

    try:
        yield send
    finally:
        model.finalize()


@contextmanager
def answering(
    answer: Callable[[RelayedRequest], Iterable[Tensors]], model: str = "tensorrt_llm"
) -> Iterator[RelayListener]:
    """Something in the place of ``model``: each request gets the tensors that ``answer`` gives."""

    def accept(request: RelayedRequest, way_back: RelayConnection) -> None:
        for tensors in answer(request):
            way_back.send(RelayedResponse(tensors))
        way_back.send(flags=1)

    listener = RelayListener(model, accept, on_room=lambda: None)
    try:
        yield listener
    finally:
        listener.close()


def tensors_of(sender: FakeSender) -> list[dict[str, Any]]:
    """The tensors of every response, as lists; none may be an error."""
    assert [response.error for response in sender.responses] == [None] * len(sender.responses)
    return [
        {name: tensor.tolist() for name, tensor in response.items()}
        for response in responses_of(sender)
    ]


def packed(num_tokens: int, **values: object) -> bytes:
    """A request for a stream of so many tokens, as it travels to ``tensorrt_llm``."""
    prompt = {"input_ids": [1], "streaming": True}
    inputs = make_inputs({**prompt, "request_output_len": num_tokens, **values})
    return pack(RelayedRequest(inputs, ["output_ids"]))


@contextmanager
def asking(message: bytes) -> Iterator[socket.socket]:
    """A connection to ``tensorrt_llm`` that has sent ``message``."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT)
        connect(connection, "tensorrt_llm")
        connection.sendall(message)
        yield connection


def answer_on(connection: socket.socket) -> list[RelayedResponse]:
    """All that comes, with the end."""
    answer = list(until_end(read_messages(connection)))
    assert answer[-1].is_final, "no end"
    return answer


def until_end(messages: Iterable[Message]) -> Iterator[RelayedResponse]:
    """The responses up to the one that is final."""
    for each in messages:
        assert isinstance(each, RelayedResponse)
        yield each
        if each.is_final:
            return


def answer_to(message: bytes) -> list[RelayedResponse]:
    """`answer_on` a connection of its own."""
    with asking(message) as connection:
        return answer_on(connection)


def ids_in(answer: Iterable[RelayedResponse]) -> list[int]:
    """The tokens of all responses."""
    return [int(i) for each in answer if each.tensors for i in np.ravel(each.tensors["output_ids"])]
