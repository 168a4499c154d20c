"""Plain tritonserver on what `inflight model-repository` writes, with every model asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from support.calls import (
    WAIT_SECONDS,
    assert_counts,
    generate,
    generate_stream,
    infer,
    make_inputs,
    stream_infer,
    stream_text,
    tensors_of,
    wait_for_active,
)
from support.checkpoints import load_oracle
from support.load_tools import run_genai_perf, run_perf_analyzer
from support.plain_triton import PlainServer, repository_server
from tritonclient.utils import np_to_triton_dtype
from write_compatibility_docs import absent

from inflight_backend.text.tokenizer import TextCodec
from inflight_server.serve.repository import OPTIONAL_MODELS
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LOAD_TOOL_SECONDS = 200  # genai-perf imports for 10 s of processor time


@pytest.fixture(scope="module", params=["--decoupled", "--no-decoupled"])
def server(request: pytest.FixtureRequest) -> Iterator[PlainServer]:
    options = [f"--add={name}" for name in OPTIONAL_MODELS]
    options += ["--set", "accumulate_tokens=true", "--set", "max_beam_width=3"]
    with repository_server(request.param, *options) as running:
        yield running


@pytest.fixture
def is_decoupled(request: pytest.FixtureRequest, server: PlainServer) -> bool:
    return bool(request.node.callspec.params["server"] == "--decoupled")


@pytest.mark.contract("tensorrt_llm parameter", "triton_max_batch_size decoupled_mode")
@pytest.mark.contract("ensemble input", "exclude_input_in_output")
@pytest.mark.contract("ensemble output", "text_output")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm", "tensorrt_llm_bls"])
def test_whole_answers_with_http(server: PlainServer, model: str) -> None:
    answer = generate(
        server, model, text_input="1 2 3", max_tokens=20, exclude_input_in_output=True
    )
    assert_counts("1 2 3", answer["text_output"], 20)


def test_unary_calls_run_side_by_side(server: PlainServer, is_decoupled: bool) -> None:
    def ask(first: int) -> tuple[str, str]:
        prompt = f"{first} {first + 1}"
        out = infer(server, "tensorrt_llm", text_input=[[prompt]], max_tokens=[[40]])
        text = str(out["text_output"].item().decode())
        assert text.startswith(prompt)
        return prompt, text.removeprefix(prompt)

    if not is_decoupled:
        with ThreadPoolExecutor(8) as pool:
            for prompt, text in pool.map(ask, range(100, 900, 100)):
                assert_counts(prompt, text, 40)
    else:
        with pytest.raises(Exception, match="decoupled"):
            ask(1)


def test_a_bad_row_is_an_error_with_a_name(server: PlainServer) -> None:
    with pytest.raises(Exception, match="batch size does not match"):
        infer(server, "preprocessing", QUERY=[["1"]], REQUEST_OUTPUT_LEN=[[9], [9]])
    with pytest.raises(Exception, match="'SEQUENCE_LENGTH' must hold numbers from 0 to 1"):
        infer(server, "postprocessing", TOKENS_BATCH=[[[5]]], SEQUENCE_LENGTH=[[3]])


def ask_vllm(
    server: PlainServer,
    settings: dict[str, Any] | None,
    *,
    stream: bool,
    outputs: Sequence[str] = (),
    parameters: dict[str, Any] | None = None,
    **flags: Any,
) -> list[dict[str, Any]]:
    """What `tritonclient.grpc.aio` gets for tensors as the samples of vLLM's backend make them:
    without a batch dimension."""
    tensors: dict[str, Any] = {"text_input": ["1 2 3"], "stream": [stream]}
    if settings is not None:
        tensors["sampling_parameters"] = [json.dumps(settings)]
    inputs = make_inputs(**tensors, **{name: [value] for name, value in flags.items()})
    request: dict[str, Any] = {"model_name": "vllm_model", "request_id": "0", "inputs": inputs}
    request["outputs"] = [grpcclient.InferRequestedOutput(name) for name in outputs] or None

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {**request, "parameters": parameters}

    async def ask() -> list[dict[str, Any]]:
        responses = []
        async with aioclient.InferenceServerClient(server.grpc_url) as client:
            async for result, error in client.stream_infer(requests(), stream_timeout=WAIT_SECONDS):
                assert error is None, error.message()
                names = [out.name for out in result.get_response().outputs]
                responses.append({name: result.as_numpy(name).tolist() for name in names})
        return responses

    return asyncio.run(ask())


@pytest.mark.contract(
    "vllm_model input",
    "text_input stream sampling_parameters exclude_input_in_output return_finish_reason "
    "return_num_input_tokens return_num_output_tokens",
)
@pytest.mark.contract(
    "vllm_model output", "text_output finish_reason num_input_tokens num_output_tokens"
)
def test_the_sample_client_of_vllms_backend(server: PlainServer, is_decoupled: bool) -> None:
    """Its `samples/client.py`: settings as a tensor and once more as parameters of the request."""
    settings = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}
    common: dict[str, Any] = {"outputs": ["text_output"], "parameters": settings}
    [answer] = ask_vllm(server, settings, stream=False, exclude_input_in_output=False, **common)
    assert answer["text_output"][0].startswith(b"1 2 3 4 ")
    assert_counts("1 2 3", answer["text_output"][0].decode().removeprefix("1 2 3"), 100)
    if is_decoupled:
        answers = ask_vllm(server, settings, stream=True, exclude_input_in_output=True, **common)
        assert len(answers) > 5
        text = b"".join(each["text_output"][0] for each in answers).decode()
        assert_counts("1 2 3", text, 100)
        # No tensor: then the parameters are the settings.
        flags: Any = {"return_num_output_tokens": True, "return_finish_reason": True}
        answers = ask_vllm(server, None, stream=True, parameters=settings, **flags)
        assert sum(each["num_output_tokens"][0] for each in answers) == 100
        reasons = [each["finish_reason"] for each in answers]
        assert reasons == [[b"None"]] * (len(answers) - 1) + [[b"length"]]


@pytest.mark.contract("vllm_model input", "return_cumulative_logprob")
@pytest.mark.contract("vllm_model output", "cumulative_logprob")
def test_vllms_sums_of_log_probabilities(server: PlainServer, is_decoupled: bool) -> None:
    """One for each answer, of all its tokens so far."""
    num_answers = 2 if is_decoupled else 1
    settings = {"temperature": 1, "seed": 3, "n": num_answers, "max_tokens": 5}
    [answer] = ask_vllm(server, settings, stream=False, return_cumulative_logprob=True)
    sums = answer["cumulative_logprob"]
    assert len(sums) == num_answers
    assert max(sums) < 0
    if is_decoupled:
        pieces = ask_vllm(server, settings, stream=True, return_cumulative_logprob=True)
        growing = np.array([piece["cumulative_logprob"] for piece in pieces])
        assert (np.diff(growing, axis=0) <= 0).all()
        np.testing.assert_allclose(growing[-1], sums, rtol=1e-4)


@pytest.mark.contract("vllm_model input", "return_logprobs")
@pytest.mark.contract("vllm_model output", "logprobs")
@torch.inference_mode()
def test_vllms_log_probabilities_of_tokens(server: PlainServer, is_decoupled: bool) -> None:
    """Those of transformers; the likeliest of a greedy answer read as its text."""
    prompt = TextCodec(DEMO_MODEL).encode("1 2 3", 100)
    for temperature, num_top in ((9, 0), (9, 2), (0, 20)):
        settings = {"temperature": temperature, "seed": 4, "max_tokens": 12, "logprobs": num_top}
        names = ("return_logprobs", "return_num_output_tokens", "exclude_input_in_output")
        flags: dict[str, Any] = dict.fromkeys(names, True)
        responses = ask_vllm(server, settings, stream=is_decoupled, **flags)
        told = [json.loads(response["logprobs"][0]) for response in responses]
        assert [[len(rows)] for rows in told] == [each["num_output_tokens"] for each in responses]
        rows = [row for rows in told for row in rows]
        ids = [int(next(iter(row))) for row in rows]
        logits = load_oracle(DEMO_MODEL)(torch.tensor([prompt + ids])).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1).tolist()
        for token, row, values in zip(ids, rows, expected, strict=True):
            assert num_top <= len(row) <= num_top + 1
            for each, entry in row.items():
                assert entry["logprob"] == pytest.approx(values[int(each)], abs=1e-3)
            # The demo model has many equally likely tokens, which differ in the last bit only.
            own, rank = values[token], row[str(token)]["rank"]
            assert sum(value > own + 1e-3 for value in values) < rank
            assert rank <= sum(value > own - 1e-3 for value in values)
        if temperature == 0:
            likeliest = [each for row in rows for each in row.values() if each["rank"] == 1]
            text = b"".join(response["text_output"][0] for response in responses)
            assert "".join(each["decoded_token"] for each in likeliest) == text.decode()


@pytest.mark.parametrize("is_binary", [True, False])
def test_tritonclients_http_client(
    server: PlainServer, is_decoupled: bool, is_binary: bool
) -> None:
    """`tritonclient.http`: tensors as bytes behind the JSON head, and as JSON."""
    values = {"text_input": "1 2 3", "max_tokens": 20, "temperature": 0.0}
    inputs = []
    for name, array in tensors_of(**values, exclude_input_in_output=True).items():
        inputs.append(httpclient.InferInput(name, [1, 1], np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array, binary_data=is_binary)
    outputs = [httpclient.InferRequestedOutput("text_output", binary_data=is_binary)]
    url = server.http_url.removeprefix("http://")
    with httpclient.InferenceServerClient(url, network_timeout=WAIT_SECONDS) as client:
        if is_decoupled:
            with pytest.raises(Exception, match="decoupled"):
                client.infer("tensorrt_llm", inputs, outputs=outputs)
        else:
            result = client.infer("tensorrt_llm", inputs, outputs=outputs, request_id="7")
            text = result.as_numpy("text_output").item()
            assert_counts("1 2 3", text.decode() if is_binary else text, 20)
            assert result.get_response()["id"] == "7"


@pytest.mark.contract("tensorrt_llm_bls input", "*")
@pytest.mark.contract("tensorrt_llm_bls output", "*")
@pytest.mark.contract("tensorrt_llm_bls parameter", "accumulate_tokens")
def test_the_relay_accumulates_and_passes_errors_on(
    server: PlainServer, is_decoupled: bool
) -> None:
    bad = generate(server, "tensorrt_llm_bls", text_input="1", max_tokens=0)
    assert "'max_tokens' must be above 0" in bad["error"]
    bad = generate(server, "tensorrt_llm_bls", text_input="1", max_tokens=4, temperature=-1.0)
    assert "'temperature' is -1" in bad["error"]
    if is_decoupled:
        texts = list(stream_text(server, "1 2 3", 100, model="tensorrt_llm_bls"))
        assert len(texts) > 5
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        assert_counts("1 2 3", texts[-1], 100)


def test_the_relay_accumulates_every_sequence_by_itself(
    server: PlainServer, is_decoupled: bool
) -> None:
    """Also for clients that do not ask which one it is; beams come whole anyway."""
    prompt = {"text_input": [["1 2 3"]], "max_tokens": [[12]]}
    text = {"text_input": "1 2 3", "max_tokens": 12}
    beams = generate(server, "tensorrt_llm_bls", beam_width=3, **text)["text_output"]
    assert beams == generate(server, "ensemble", beam_width=3, **text)["text_output"]
    assert len(beams) == 3
    if not is_decoupled:
        return

    def relay(name: str, value: int) -> list[dict[str, Any]]:
        tensors = {**prompt, "stream": [[True]], name: [[value]]}
        return stream_infer(server, "tensorrt_llm_bls", tensors, ["text_output"])

    relayed = relay("beam_width", 3)
    assert all(response["text_output"].shape == (3,) for response in relayed)
    assert relayed[-1]["text_output"].tolist() == [
        beam.removeprefix("1 2 3").encode() for beam in beams
    ]
    relayed = relay("num_return_sequences", 2)
    assert all(list(response) == ["text_output"] for response in relayed)
    texts = [response["text_output"][0].decode() for response in relayed]
    for each in texts:
        assert_counts("1 2 3", each, len(each))
    assert sorted(len(each) for each in texts)[-2:] == [12, 12]


def test_a_client_of_the_relay_that_leaves_ends_its_request(
    server: PlainServer, is_decoupled: bool
) -> None:
    before = wait_for_active(server, 0)["Iteration Counter"]
    if not is_decoupled:  # the only way to leave is to close a call, which Triton does not see
        return
    stream = generate_stream(
        server, "tensorrt_llm_bls", text_input="1 2 3", max_tokens=8000, stream=True
    )
    next(stream)
    wait_for_active(server, 1)
    stream.close()
    assert wait_for_active(server, 0)["Iteration Counter"] - before < 8000, "it ran to its end"


PERF_DATA = {"data": [{"text_input": ["1 2 3"], "max_tokens": [60], "stream": [True]}]}


def test_perf_analyzer(server: PlainServer, is_decoupled: bool, tmp_path: Path) -> None:
    """gRPC streams where there are streams, as for any decoupled model; whole answers by HTTP."""
    data = {"data": [{**PERF_DATA["data"][0], "stream": [is_decoupled]}]}
    (tmp_path / "data.json").write_text(json.dumps(data))
    common = ["--service-kind=triton", f"--input-data={tmp_path / 'data.json'}"]
    common += ["--shape=text_input:1", "--shape=max_tokens:1"]
    common += ["--concurrency-range=4", "--request-count=12"]
    way = ["-i", "http", "-u", server.http_url.removeprefix("http://")]
    if is_decoupled:
        way = ["-i", "grpc", "--streaming", "--async", "-u", server.grpc_url]
    for model in ("ensemble", "tensorrt_llm"):
        printed, requests = run_perf_analyzer(tmp_path, ["-m", model, *way, *common])
        assert "Request count: 12" in printed
        assert len(requests) >= 12
        num_responses = [len(request["response_timestamps"]) for request in requests]
        if is_decoupled:
            assert min(num_responses) > 1  # of 60 tokens; those that pile up travel together
        else:
            assert set(num_responses) == {1}


GENAI_PERF = {"tensorrtllm": "ensemble", "vllm": "vllm_model"}


@pytest.mark.contract("ensemble input", "min_length")
@pytest.mark.timeout(2 * LOAD_TOOL_SECONDS)
def test_genai_perf(server: PlainServer, is_decoupled: bool, tmp_path: Path) -> None:
    """Both shapes in which it speaks to Triton, with the demo model's own tokenizer."""
    if not is_decoupled:  # its Triton client streams always
        return
    options = [f"--tokenizer={DEMO_MODEL}", "--streaming", "-u", server.grpc_url]
    options += ["--synthetic-input-tokens-mean=24", "--output-tokens-mean=16"]
    options += ["--output-tokens-mean-deterministic", "--concurrency=2"]
    options += ["--request-count=6"]
    options += ["--warmup-request-count=2"]  # one for each stream, or it never ends
    for backend, model in GENAI_PERF.items():
        arguments = ["-m", model, f"--backend={backend}", *options]
        results = run_genai_perf(tmp_path / backend, arguments, LOAD_TOOL_SECONDS)
        assert results["request_count"]["avg"] == 6
        # The text that came, by the tokenizer: exactly as much as min_length and max_tokens say;
        # in vLLM's shape it is drawn, and a byte that is no character counts as three.
        slack = 2 if backend == "vllm" else 0
        assert results["output_sequence_length"]["min"] >= 16 - slack
        assert results["output_sequence_length"]["max"] <= 16 + slack
        assert results["time_to_first_token"]["avg"] > 0
        assert results["inter_token_latency"]["avg"] > 0


@pytest.mark.contract("refusal", "absent absent-output")
def test_what_a_model_lacks_is_refused_by_name(server: PlainServer, is_decoupled: bool) -> None:
    """Every tensor of docs/compatibility.md that a model of ours does not have."""
    questions: list[tuple[str, str, list[str], list[str]]]
    questions = [(model, name, [name], []) for model, name in absent("input")]
    questions += [(model, name, [], [name]) for model, name in absent("output")]
    assert len(questions) > 40
    for model, name, inputs, outputs in questions:
        first = "QUERY" if model == "preprocessing" else "text_input"
        tensors = {each: [["1"]] for each in inputs or [first]}
        [answer] = stream_infer(server, model, tensors, outputs)
        assert f"'{name}'" in answer["error"], (model, name)


REQUIRED: dict[str, dict[str, Any]] = {
    "tensorrt_llm": {"text_input": "1", "max_tokens": 4},
    "ensemble": {"text_input": "1", "max_tokens": 4},
    "tensorrt_llm_bls": {"text_input": "1", "max_tokens": 4},
    "vllm_model": {"text_input": "1"},
    "preprocessing": {"QUERY": "1", "REQUEST_OUTPUT_LEN": 4},
}


@pytest.mark.contract("refusal", "absent")
def test_unknown_fields_and_parameters_are_refused_by_name(
    server: PlainServer, is_decoupled: bool
) -> None:
    """Triton takes both; only the model can refuse them."""
    surprises = [(model, "surprise") for model in REQUIRED]
    sent = [each for each in absent("input") if each[0] in REQUIRED]  # no table of tokens
    for model, name in [*sent, *surprises]:
        answer = generate(server, model, **REQUIRED[model], **{name: 1})
        assert f"'{name}'" in answer["error"], (model, name)
    tensors: dict[str, dict[str, Any]] = {
        model: {name: [[value]] for name, value in values.items()}
        for model, values in REQUIRED.items()
    }
    tensors["vllm_model"] = {"text_input": ["1"]}  # no batch dimension
    tensors["postprocessing"] = {"TOKENS_BATCH": [[[5]]], "SEQUENCE_LENGTH": [[1]]}
    for model, each in tensors.items():
        [answer] = stream_infer(server, model, each, parameters={"surprise": "3"})
        assert "'surprise'" in answer["error"], model
    url = f"{server.http_url}/v2/models/ensemble/generate"
    body = b'{"text_input": "1", "max_tokens": 4, "surprise": "\xff"}'
    error = httpx.post(url, content=body, timeout=WAIT_SECONDS, trust_env=False).json()["error"]
    assert error.endswith("the request parameters are not valid UTF-8")
    # What Triton itself puts beside them is none: the id of a body, and what ends a stream.
    sound = generate(server, "ensemble", id="mine", **REQUIRED["ensemble"])
    assert_counts("1", sound["text_output"].removeprefix("1"), 4)
