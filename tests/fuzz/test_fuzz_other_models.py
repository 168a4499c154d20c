"""The models beside `tensorrt_llm`: whatever Triton lets through to them is answered or named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any
from unittest import mock

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzzing import TEXTS, arrays_of, assert_tells_nothing_internal, fuzzing
from support.relay_harness import load
from support.triton_harness import WAIT, Server
from support.triton_stories import loaded, stepped_demo
from support.triton_stub import FakePbUtils, FakeRequest
from tritonclient.grpc import model_config_pb2 as pb

from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_models import bls as bls_model
from inflight_backend.triton_models import relay_client as relay
from inflight_backend.triton_models import vllm as vllm_model
from inflight_backend.triton_models.postprocessing import Postprocessor
from inflight_backend.triton_models.preprocessing import Preprocessor
from inflight_backend.triton_models.text_base import Convert, respond
from inflight_protocol import DTYPE_TO_NUMPY
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = pytest.mark.slow

Tensors = dict[str, np.ndarray[Any, Any]]

REPOSITORY = Path(__file__).parents[2] / "model_repository"
CODEC = TextCodec(DEMO_MODEL)
AnyRelay = vllm_model.TritonPythonModel | bls_model.TritonPythonModel
OURS = ("could not be", "failed")
"""Words in the errors for unexpected exceptions."""


def config_of(model: str) -> Any:
    text = (REPOSITORY / model / "config.pbtxt").read_text()
    filled = Template(text).safe_substitute(triton_max_batch_size="4", decoupled_mode="true")
    return text_format.Parse(filled, pb.ModelConfig())


@st.composite
def tensors(draw: st.DrawFn, config: Any) -> Tensors:
    """What Triton's own checks leave: mandatory inputs, types, ranks and one size of the batch."""
    batch = (draw(st.sampled_from([1, 1, 2, 3])),) if config.max_batch_size else ()
    chosen = [each for each in config.input if not each.optional or draw(st.integers(0, 3)) == 0]
    return {
        each.name: draw(
            arrays_of(
                np.dtype(DTYPE_TO_NUMPY[pb.DataType.Name(each.data_type).removeprefix("TYPE_")]),
                batch + tuple(draw(st.integers(0, 4)) if dim < 0 else dim for dim in each.dims),
            )
        )
        for each in chosen
    }


def assert_is_named(error: object) -> None:
    message = str(error)
    assert_tells_nothing_internal(message)
    assert not [word for word in OURS if word in message], message


PREPROCESSING, POSTPROCESSING = config_of("preprocessing"), config_of("postprocessing")
QUERY = {
    "QUERY": np.array([[b"12"]], dtype=np.object_),
    "REQUEST_OUTPUT_LEN": np.array([[4]], np.int32),
}
ANSWER = {
    "TOKENS_BATCH": np.array([[[20, 21]]], np.int32),
    "SEQUENCE_LENGTH": np.array([[2]], np.int32),
}


def check_text_model(convert: Convert, config: Any, inputs: Tensors, good: Tensors) -> None:
    """One request beside a good one: an answer of the types and ranks promised, or a name."""
    [response, other] = [
        respond(FakePbUtils, FakeRequest(each), convert) for each in (inputs, good)
    ]
    assert other.error is None
    if response.error is not None:
        assert_is_named(response.error)
        assert response.error.code == FakePbUtils.TritonError.INVALID_ARG
        assert any(f"'{name}'" in str(response.error) for name in inputs)
        return
    promised = {each.name: each for each in config.output}
    (num_rows,) = {len(tensor) for tensor in inputs.values()}
    for tensor in response.output_tensors:
        spec, array = promised[tensor.name()], tensor.as_numpy()
        dtype = DTYPE_TO_NUMPY[pb.DataType.Name(spec.data_type).removeprefix("TYPE_")]
        assert array.dtype == np.dtype(dtype)
        if spec.name == "OUTPUT":  # a text for each beam of each row, one after the other
            num_rows, num_beams, _ = inputs["TOKENS_BATCH"].shape
            assert array.shape == (num_rows * num_beams,)
            continue
        assert (len(array), array.ndim) == (num_rows, 1 + len(spec.dims))
        assert all(dim in (-1, size) for dim, size in zip(spec.dims, array.shape[1:], strict=True))


@pytest.mark.case(6, 122, 123)
@fuzzing
@given(inputs=tensors(PREPROCESSING), adds_special_tokens=st.booleans())
def test_preprocessing(inputs: Tensors, adds_special_tokens: bool) -> None:
    convert = Preprocessor(CODEC, adds_special_tokens=adds_special_tokens)
    check_text_model(convert, PREPROCESSING, inputs, QUERY)


@pytest.mark.case(122, 123)
@fuzzing
@given(inputs=tensors(POSTPROCESSING), skips_special_tokens=st.booleans())
def test_postprocessing(inputs: Tensors, skips_special_tokens: bool) -> None:
    convert = Postprocessor(CODEC, skips_special_tokens=skips_special_tokens)
    check_text_model(convert, POSTPROCESSING, inputs, ANSWER)


class Relaying:
    """A model that relays to ``server``."""

    def __init__(self, model: AnyRelay, server: Server, **parameters: str) -> None:
        self.server = server
        self.model = model
        with mock.patch.object(relay, "exit_with_parent"):
            load(model, "added", parameters)

    def check(self, inputs: Tensors, parameters: Mapping[str, Any], good: Tensors) -> None:
        """One request beside a good one: an answer, or an error with a name."""
        requests = [FakeRequest(inputs, parameters=json.dumps(parameters)), FakeRequest(good)]
        self.model.execute(requests)
        for request in requests:
            assert request.sender.is_final.wait(WAIT), "a request without an end"
        errors = [each.error for each in requests[0].sender.responses if each.error is not None]
        for error in errors:
            assert_is_named(error)
            assert error.code != FakePbUtils.TritonError.INTERNAL
        assert requests[1].sender.responses[-1].error is None
        assert self.server.model._manager._batcher.is_idle_and_intact()


@pytest.fixture(scope="module")
def vllm() -> Iterator[Relaying]:
    """Over the demo model, which knows log probabilities; with room for several answers beside."""
    engine, steps = stepped_demo()
    steps.let_go()
    with loaded(engine, tokenizer_dir=str(DEMO_MODEL), max_queue_size="16") as server:
        relaying = Relaying(vllm_model.TritonPythonModel(), server, gpt_model_path=str(DEMO_MODEL))
        yield relaying
        relaying.model.finalize()
        server.model.finalize()


@pytest.fixture(scope="module", params=["false", "true"])
def bls(server: Server, request: pytest.FixtureRequest) -> Iterator[Relaying]:
    parameters = {"accumulate_tokens": request.param, "tensorrt_llm_model_name": "counting"}
    relaying = Relaying(bls_model.TritonPythonModel(), server, **parameters)
    yield relaying
    relaying.model.finalize()


VLLM, BLS = config_of("vllm_model"), config_of("tensorrt_llm_bls")
SETTINGS = ["max_tokens", "n", "temperature", "stop", "seed", "logprobs", "ignore_eos", "best_of"]
KEYS = st.one_of(st.sampled_from(SETTINGS), st.text(max_size=5))
VALUES = st.one_of(
    st.booleans(),
    st.sampled_from([0, 1, -1, 3, 2**31, 2**63 - 1, 0.5, 1e38, "4", "0.5", "true", "x", ""]),
)
PROMPT = np.array([b"1 2"], dtype=np.object_)


@pytest.mark.case(6, 122, 123)
@fuzzing
@given(
    inputs=tensors(VLLM),
    parameters=st.dictionaries(KEYS, VALUES, max_size=3),
    prompt=st.one_of(st.none(), TEXTS),
)
@example({"return_logprobs": np.array([True])}, {"n": 3, "logprobs": "4", "temperature": 9}, None)
def test_vllm_model(
    vllm: Relaying, inputs: Tensors, parameters: dict[str, Any], prompt: bytes | None
) -> None:
    inputs["text_input"] = PROMPT if prompt is None else np.array([prompt], dtype=np.object_)
    vllm.check(inputs, parameters, {"text_input": PROMPT})


@pytest.mark.case(6, 122, 123)
@fuzzing
@given(
    inputs=tensors(BLS),
    parameters=st.one_of(st.just({}), st.dictionaries(KEYS, VALUES, max_size=1)),
    is_served=st.booleans(),
)
def test_tensorrt_llm_bls(
    bls: Relaying, inputs: Tensors, parameters: dict[str, Any], is_served: bool
) -> None:
    good = {"text_input": PROMPT[None], "max_tokens": np.array([[3]], np.int32)}
    bls.check(inputs | good if is_served else inputs, parameters, good)
