"""Another model of the server as one that relays calls it, without the server between them."""

from __future__ import annotations

import json
from typing import Any

from fakes import FakePbUtils, FakeRequest, FakeResponse, FakeTensor
from triton_harness import WAIT, Server


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
