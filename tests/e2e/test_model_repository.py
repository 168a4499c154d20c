"""Plain tritonserver on what `inflight model-repository` writes, with every model asked for."""

from __future__ import annotations

import itertools
import json
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from e2e.harness import assert_counts, temporary_folder
from e2e.plain import PlainServer, plain_server

from inflight_backend.serve.repository import OPTIONAL_MODELS

pytestmark = pytest.mark.e2e

WAIT = 60.0
KINDS = {"int32": "INT32", "object": "BYTES"}


@pytest.fixture(scope="module", params=["--decoupled", "--no-decoupled"])
def server(request: pytest.FixtureRequest) -> Iterator[PlainServer]:
    scratch = temporary_folder("plain")
    inflight = str(Path(sys.executable).parent / "inflight")
    options = [f"--add={name}" for name in OPTIONAL_MODELS]
    command = [inflight, "model-repository", str(scratch / "models"), request.param, *options]
    command += ["--set", "accumulate_tokens=true"]
    subprocess.run(command, check=True, capture_output=True)
    with plain_server(scratch, scratch / "models") as running:
        yield running
    shutil.rmtree(scratch)


@pytest.fixture
def is_decoupled(request: pytest.FixtureRequest, server: PlainServer) -> bool:
    return bool(request.node.callspec.params["server"] == "--decoupled")


def generate(server: PlainServer, model: str, **body: Any) -> dict[str, Any]:
    url = f"{server.http_url}/v2/models/{model}/generate"
    answer = httpx.post(url, json=body, timeout=WAIT, trust_env=False)
    content: dict[str, Any] = answer.json()
    return content


def generate_stream(server: PlainServer, model: str, **body: Any) -> list[dict[str, Any]]:
    url = f"{server.http_url}/v2/models/{model}/generate_stream"
    answer = httpx.post(url, json=body, timeout=WAIT, trust_env=False)
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]


def infer(server: PlainServer, model: str, **tensors: Any) -> dict[str, Any]:
    """One unary gRPC call; the response's tensors."""
    inputs = []
    for name, value in tensors.items():
        array = np.asarray(value)
        array = array.astype(np.int32 if array.dtype.kind == "i" else np.object_)
        tensor = grpcclient.InferInput(name, list(array.shape), KINDS[array.dtype.name])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, inputs, client_timeout=WAIT)
        return {out.name: result.as_numpy(out.name) for out in result.get_response().outputs}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm", "tensorrt_llm_bls"])
def test_whole_answers_with_http(server: PlainServer, model: str) -> None:
    answer = generate(
        server, model, text_input="1 2 3", max_tokens=20, exclude_input_in_output=True
    )
    assert_counts("1 2 3", answer["text_output"])


def test_streams_where_there_are_streams(server: PlainServer, is_decoupled: bool) -> None:
    events = generate_stream(server, "ensemble", text_input="1 2 3", max_tokens=20, stream=True)
    if is_decoupled:
        assert_counts("1 2 3", "".join(event["text_output"] for event in events))
    else:
        [event] = events
        assert "'streaming' needs a decoupled deployment" in event["error"]


def test_unary_calls_run_side_by_side(server: PlainServer, is_decoupled: bool) -> None:
    def ask(first: int) -> str:
        prompt = f"{first} {first + 1}"
        out = infer(server, "tensorrt_llm", text_input=[[prompt]], max_tokens=[[40]])
        return str(out["text_output"].item().decode())

    if not is_decoupled:
        with ThreadPoolExecutor(8) as pool:
            for text in pool.map(ask, range(100, 900, 100)):
                assert_counts("", text)
    else:
        with pytest.raises(Exception, match="decoupled"):
            ask(1)


def test_tokenising_generating_and_decoding_in_three_calls(
    server: PlainServer, is_decoupled: bool
) -> None:
    before = infer(server, "preprocessing", QUERY=[["1 2 3"], ["7"]], REQUEST_OUTPUT_LEN=[[9], [9]])
    assert before["REQUEST_INPUT_LEN"].tolist() == [[6], [2]]
    ids = before["INPUT_ID"][:1].tolist()
    if is_decoupled:
        body = {"input_ids": ids[0], "request_output_len": 9, "streaming": False}
        answer = generate(server, "tensorrt_llm", **body)
        tokens, length = [[answer["output_ids"]]], [[answer["sequence_length"]]]
    else:
        out = infer(server, "tensorrt_llm", input_ids=ids, request_output_len=[[9]])
        tokens, length = out["output_ids"].tolist(), out["sequence_length"].tolist()
    after = infer(server, "postprocessing", TOKENS_BATCH=tokens, SEQUENCE_LENGTH=length)
    assert after["OUTPUT"].tolist() == [[b"1 2 3 4 5 6 7 "]]


def test_a_bad_row_is_an_error_with_a_name(server: PlainServer) -> None:
    with pytest.raises(Exception, match="batch size does not match"):
        infer(server, "preprocessing", QUERY=[["1"]], REQUEST_OUTPUT_LEN=[[9], [9]])
    with pytest.raises(Exception, match="'SEQUENCE_LENGTH' must hold numbers from 0 to 1"):
        infer(server, "postprocessing", TOKENS_BATCH=[[[5]]], SEQUENCE_LENGTH=[[3]])


def test_settings_as_vllm_clients_send_them(server: PlainServer, is_decoupled: bool) -> None:
    settings = json.dumps({"max_tokens": "30", "temperature": "0", "top_k": -1})
    whole = generate(
        server,
        "vllm_model",
        text_input="1 2 3",
        stream=False,
        sampling_parameters=settings,
        exclude_input_in_output=True,
    )
    assert_counts("1 2 3", whole["text_output"])
    assert len(whole["text_output"]) == 30
    bad = generate(server, "vllm_model", text_input="1", sampling_parameters='{"surprise": 1}')
    assert "'surprise' is not supported" in bad["error"]
    if is_decoupled:
        events = generate_stream(
            server, "vllm_model", text_input="1 2 3", stream=True, sampling_parameters=settings
        )
        assert_counts("1 2 3", "".join(event["text_output"] for event in events))
        assert len(events) > 5


def test_the_relay_accumulates_and_passes_errors_on(
    server: PlainServer, is_decoupled: bool
) -> None:
    bad = generate(server, "tensorrt_llm_bls", text_input="1", max_tokens=0)
    assert "'max_tokens' must be a single value above 0" in bad["error"]
    bad = generate(server, "tensorrt_llm_bls", text_input="1", max_tokens=4, temperature=-1.0)
    assert "'temperature' is -1" in bad["error"]
    if is_decoupled:
        events = generate_stream(
            server, "tensorrt_llm_bls", text_input="1 2 3", max_tokens=20, stream=True
        )
        texts = [event["text_output"] for event in events]
        assert len(texts) > 5
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        assert_counts("1 2 3", texts[-1])
        assert len(texts[-1]) == 20


def test_a_client_of_the_relay_that_leaves_ends_its_request(
    server: PlainServer, is_decoupled: bool
) -> None:
    def wait_until_active(count: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            answer = generate(server, "tensorrt_llm", stats=True, streaming=False)
            if json.loads(answer["stats"])["Active Request Count"] == count:
                return
            assert time.monotonic() < deadline, f"not {count} requests run"

    wait_until_active(0, WAIT)
    if not is_decoupled:  # the only way to leave is to close a call, which Triton does not see
        return
    body = {"text_input": "1 2 3", "max_tokens": 8000, "stream": True}
    url = f"{server.http_url}/v2/models/tensorrt_llm_bls/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=WAIT, trust_env=False) as answer:
        lines = answer.iter_lines()  # dropping it would close the stream
        next(lines)
        wait_until_active(1, WAIT)
    wait_until_active(0, 5.0)  # 8,000 tokens take longer


# What load tools send, as recorded with the tools themselves: name -> (dtype, shape, value).
# genai-perf 0.0.16 with --backend tensorrtllm and --backend vllm, deterministic output length;
# perf_analyzer 2.51.0 with an --input-data file of text_input, max_tokens and stream.
TOOL_REQUESTS: dict[str, tuple[str, dict[str, tuple[type, object]]]] = {
    "genai-perf tensorrtllm": (
        "ensemble",
        {
            "text_input": (np.object_, b"1 2 3"),
            "max_tokens": (np.int32, 16),
            "min_length": (np.int32, 16),
            "stream": (np.bool_, True),
            "exclude_input_in_output": (np.bool_, True),
        },
    ),
    "genai-perf vllm": (
        "vllm_model",
        {
            "text_input": (np.object_, b"1 2 3"),
            "stream": (np.bool_, True),
            "exclude_input_in_output": (np.bool_, True),
            "sampling_parameters": (np.object_, b'{"max_tokens": "16", "min_tokens": "16"}'),
        },
    ),
    "perf_analyzer": (
        "tensorrt_llm",
        {
            "text_input": (np.object_, b"1 2 3"),
            "max_tokens": (np.int32, 16),
            "stream": (np.bool_, True),
        },
    ),
}


@pytest.mark.parametrize("tool", TOOL_REQUESTS)
def test_load_tools_get_what_they_ask_for(
    server: PlainServer, is_decoupled: bool, tool: str
) -> None:
    model, tensors = TOOL_REQUESTS[tool]
    inputs = []
    for name, (dtype, value) in tensors.items():
        array: np.ndarray[Any, Any] = np.array([[value]], dtype=dtype)
        kind = {np.object_: "BYTES", np.int32: "INT32", np.bool_: "BOOL"}[dtype]  # type: ignore[index]
        inputs.append(grpcclient.InferInput(name, [1, 1], kind))
        inputs[-1].set_data_from_numpy(array)
    results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        # The tools ask these before they send anything.
        config = client.get_model_config(model, as_json=True)["config"]
        assert config["max_batch_size"] == 64
        metadata = client.get_model_metadata(model)
        assert set(tensors) <= {each.name for each in metadata.inputs}
        assert client.get_inference_statistics(model).model_stats[0].name == model
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        texts, is_final = [], False
        while not is_final:
            result, error = results.get(timeout=WAIT)
            if not is_decoupled:
                assert "needs a decoupled deployment" in str(error)
                break
            assert error is None
            output = result.as_numpy("text_output")
            texts.append("" if output is None else output.item().decode())
            is_final = result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    if is_decoupled:
        assert_counts("1 2 3", "".join(texts))
        assert len("".join(texts)) == 16
