"""``tensorrt_llm_bls`` beside the real server's tests of it: which model it calls, and for whom."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from fakes import FakePbUtils, FakeRequest, FakeTensor

from inflight_backend.triton.bls_model import TritonPythonModel

WAIT = 10.0


class InnerResponse:
    """What ``pb_utils`` gives a caller: the same words as methods."""

    def __init__(self, text: str) -> None:
        self._text = text

    def has_error(self) -> bool:
        return False

    def output_tensors(self) -> list[FakeTensor]:
        return [FakeTensor("text_output", np.array([[self._text.encode()]], dtype=object))]


class InnerRequest:
    """``pb_utils.InferenceRequest`` as the relay makes it; answers with the name of its model."""

    def __init__(
        self,
        model_name: str,
        requested_output_names: list[str],
        inputs: list[FakeTensor],
        request_id: str,
        parameters: dict[str, bool],
    ) -> None:
        self.model_name, self.inputs, self._request_id = model_name, inputs, request_id

    def request_id(self) -> str:
        return self._request_id

    def exec(self, decoupled: bool) -> list[InnerResponse]:
        assert decoupled
        return [InnerResponse(self.model_name)]


class RelayUtils(FakePbUtils):
    InferenceRequest = InnerRequest


@pytest.mark.parametrize(
    ("parameters", "model"), [({}, "tensorrt_llm"), ({"tensorrt_llm_model_name": "mine"}, "mine")]
)
def test_it_calls_the_model_that_is_named(
    parameters: dict[str, str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", RelayUtils)
    relay = TritonPythonModel()
    config = {
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        "model_transaction_policy": {"decoupled": True},
    }
    relay.initialize({"model_config": json.dumps(config)})
    try:
        text = np.array([["1 2"]], dtype=object)
        request = FakeRequest({"text_input": text, "max_tokens": np.array([[4]], np.int32)})
        relay.execute([request])
        assert request.sender.is_final.wait(WAIT)
    finally:
        relay.finalize()
    (response,) = request.sender.responses
    assert response.output_tensors[0].as_numpy().item() == model.encode()
