"""Another model of the server as one that relays calls it, without the server between them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from fakes import FakePbUtils, FakeRequest, FakeResponse, FakeSender, FakeTensor
from triton_harness import WAIT, Server

from inflight_backend.triton.vllm_model import TritonPythonModel

Ask = Callable[..., FakeSender]


class Answer:
    """What ``pb_utils`` gives to one who calls another model."""

    def __init__(self, response: FakeResponse) -> None:
        self._response = response

    def has_error(self) -> bool:
        """True if it is an error."""
        return self._response.error is not None

    def error(self) -> Answer:
        """The error."""
        return self

    def message(self) -> str:
        """Its text."""
        return str(self._response.error)

    def output_tensors(self) -> list[FakeTensor]:
        """What else it is."""
        return self._response.output_tensors


def calling(server: Server) -> type[FakePbUtils]:
    """The ``pb_utils`` of a model beside ``server``, whose calls it answers."""

    class Inner(FakeRequest):
        def __init__(
            self,
            model_name: str,
            requested_output_names: list[str],
            inputs: list[FakeTensor],
            request_id: str,
            parameters: dict[str, bool],
        ) -> None:
            assert model_name == "tensorrt_llm"
            tensors = {tensor.name(): tensor.as_numpy() for tensor in inputs}
            super().__init__(
                tensors, request_id, tuple(requested_output_names), json.dumps(parameters)
            )

        def exec(self, decoupled: bool) -> list[Answer]:
            assert decoupled
            server.model.execute([self])
            assert self.sender.is_final.wait(WAIT)
            return [Answer(response) for response in self.sender.responses]

    class Utils(FakePbUtils):
        InferenceRequest: Any = Inner

    return Utils


@contextmanager
def vllm_model(server: Server, **parameters: str) -> Iterator[Ask]:
    """``vllm_model`` in front of ``server``: sends one request to it and waits for its end."""
    model = TritonPythonModel()
    config = {
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        "model_transaction_policy": {"decoupled": True},
    }
    with mock.patch.dict(sys.modules, {"triton_python_backend_utils": calling(server)}):
        model.initialize({"model_config": json.dumps(config), "model_name": "vllm_model"})

    def send(
        prompt: str = "1 2", settings: Any = None, parameters: Any = None, **flags: bool
    ) -> FakeSender:
        tensors: dict[str, Any] = {"text_input": np.array([prompt.encode()], dtype=object)}
        if settings is not None:
            text = json.dumps(settings).encode()
            tensors["sampling_parameters"] = np.array([text], dtype=object)
        tensors |= {name: np.array([value]) for name, value in flags.items()}
        request = FakeRequest(tensors, parameters=json.dumps(parameters or {}))
        model.execute([request])
        assert request.sender.is_final.wait(WAIT)
        return request.sender

    yield send
    model.finalize()


def tensors_of(sender: FakeSender) -> list[dict[str, Any]]:
    """The tensors of every response, as lists; none may be an error."""
    assert [response.error for response in sender.responses] == [None] * len(sender.responses)
    return [
        {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors}
        for response in sender.responses
    ]
