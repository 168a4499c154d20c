"""Sampling inputs and outputs on the real server: over gRPC and HTTP, both models."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from e2e.conftest import ServeFactory
from support.server_process import ServeProcess
from tritonclient.utils import InferenceServerException

from inflight_protocol import ENSEMBLE_INPUT_MAP, INPUT_BY_NAME
from inflight_protocol.tensors import make_inputs

pytestmark = pytest.mark.e2e

PROMPT = "1 2 3 4"
WAIT = 60.0


def infer(
    server: ServeProcess,
    *outputs: str,
    model: str = "tensorrt_llm",
    **values: Any,
) -> Iterator[dict[str, Any]]:
    """The tensors of each response over a gRPC stream; an error raises."""
    inner = {name: ENSEMBLE_INPUT_MAP.get(name, name) for name in values}
    tensors = make_inputs({inner[name]: value for name, value in values.items()})
    inputs = []
    for name in values:
        dtype, array = INPUT_BY_NAME[inner[name]].dtype, tensors[inner[name]]
        tensor = grpcclient.InferInput(
            name, list(array.shape), "BYTES" if dtype == "STRING" else dtype
        )
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    wanted = [grpcclient.InferRequestedOutput(name) for name in outputs]
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer(
            model, inputs, outputs=wanted or None, enable_empty_final_response=True
        )
        is_final = False
        while not is_final:
            result, error = results.get(timeout=WAIT)
            if error is not None:
                raise error
            response = result.get_response()
            is_final = response.parameters["triton_final_response"].bool_param
            yield {out.name: result.as_numpy(out.name) for out in response.outputs}


def generate(server: ServeProcess, model: str, **values: Any) -> dict[str, Any]:
    """One whole answer over HTTP; an error is in ``error``."""
    url = f"{server.http_url}/v2/models/{model}/generate"
    answer = httpx.post(url, json=values, timeout=WAIT, trust_env=False).json()
    assert isinstance(answer, dict)
    return answer


@pytest.mark.contract("ensemble input", "stop_words")
@pytest.mark.contract("tensorrt_llm of the LLM API output", "finish_reason")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_stop_words_over_http(server: ServeProcess, model: str) -> None:
    """The demo model counts; "9 1" spans tokens, and nothing of it is to be seen."""
    answer = generate(
        server,
        model,
        text_input=PROMPT,
        max_tokens=200,
        stop_words=["9 1", "zz"],
        exclude_input_in_output=True,
    )
    assert answer == {**answer, "text_output": " 5 6 7 8 "}
    url = f"{server.http_url}/v2/models/{model}/generate_stream"
    body = {"text_input": PROMPT, "max_tokens": 200, "stop_words": ["9 1"], "stream": True}
    text = ""
    with httpx.stream("POST", url, json=body, timeout=WAIT, trust_env=False) as response:
        for line in filter(None, response.iter_lines()):
            text += json.loads(line.removeprefix("data:"))["text_output"]
    assert text == " 5 6 7 8 "


@pytest.mark.contract(
    "tensorrt_llm output",
    "cum_log_probs output_log_probs context_logits generation_logits "
    "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks "
    "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns "
    "acceptance_rate total_accepted_draft_tokens total_draft_tokens",
)
@pytest.mark.contract(
    "ensemble input",
    "return_log_probs return_context_logits return_generation_logits return_perf_metrics "
    "return_num_input_tokens return_num_output_tokens",
)
@pytest.mark.contract("ensemble output", "*")
@pytest.mark.contract("tensorrt_llm of the LLM API output", "*")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_named_outputs_arrive(server: ServeProcess, model: str) -> None:
    outputs = (
        "text_output",
        "finish_reason",
        "output_log_probs",
        "output_log_prob_ranks",
        "cum_log_probs",
        "generation_logits",
        "context_logits",
        "arrival_time_ns",
        "last_token_time_ns",
        "kv_cache_alloc_total_blocks",
        "num_input_tokens",
        "num_output_tokens",
        "sequence_index",
        "batch_index",
    )
    (answer,) = infer(
        server,
        *outputs,
        model=model,
        text_input=PROMPT,
        max_tokens=5,
        return_log_probs=True,
        return_log_prob_ranks=True,
        return_generation_logits=True,
        return_context_logits=True,
        return_perf_metrics=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert set(answer) == set(outputs)
    assert answer["finish_reason"].item() == b"length"
    assert answer["num_input_tokens"].item() == len(PROMPT) + 1  # bytes, and what begins a text
    assert answer["num_output_tokens"].item() == 5
    assert answer["output_log_probs"].shape == (1, 1, 5)
    assert answer["output_log_prob_ranks"].tolist() == [[[1] * 5]], "of a greedy answer"
    np.testing.assert_allclose(answer["cum_log_probs"], answer["output_log_probs"].sum(-1))
    vocab_size = answer["generation_logits"].shape[-1]
    assert answer["generation_logits"].shape == (1, 1, 5, vocab_size)
    assert answer["context_logits"].shape[::2] == (1, vocab_size)
    # The last row of the prompt's logits is what the first token was drawn by.
    np.testing.assert_array_equal(
        answer["context_logits"][0, -1], answer["generation_logits"][0, 0, 0]
    )
    assert 0 < answer["arrival_time_ns"].item() < answer["last_token_time_ns"].item()
    assert answer["kv_cache_alloc_total_blocks"].item() >= 1


def test_a_client_that_names_no_output_gets_what_it_asked_for(server: ServeProcess) -> None:
    values: dict[str, Any] = {"input_ids": [5, 6], "request_output_len": 3}
    (plain,) = infer(server, **values)
    assert list(plain)[:3] == ["output_ids", "sequence_length", "batch_index"]
    unasked = ("output_log_probs", "cum_log_probs", "context_logits", "generation_logits")
    assert set(list(plain)[3:]) == set(unasked)
    assert not any(plain[name].any() for name in unasked)
    (more,) = infer(server, **values, return_log_probs=True, return_num_output_tokens=True)
    assert set(more) == {*plain, "num_output_tokens"}
    assert more["output_log_probs"].all()
    assert more["cum_log_probs"].all()


@pytest.mark.contract("tensorrt_llm input", "return_kv_cache_reuse_stats")
@pytest.mark.contract("ensemble input", "return_kv_cache_reuse_stats")
def test_the_older_name_of_return_perf_metrics(server: ServeProcess) -> None:
    """That of v0.16 to v0.18."""
    for model, prompt in (
        ("tensorrt_llm", {"input_ids": [5, 6], "request_output_len": 3}),
        ("ensemble", {"text_input": PROMPT, "max_tokens": 3}),
    ):
        asked: dict[str, Any] = {**prompt, "model": model, "return_kv_cache_reuse_stats": True}
        (answer,) = infer(server, **asked)
        names = ("kv_cache_alloc_total_blocks", "kv_cache_reused_blocks")
        assert sum(answer[name].item() for name in names) >= 1  # an earlier test's may be reused
        with pytest.raises(InferenceServerException, match="'return_perf_metrics' is given twice"):
            list(infer(server, **asked, return_perf_metrics=True))


@pytest.mark.slow
def test_a_response_for_every_token(serve: ServeFactory) -> None:
    """For clients that take no two tokens in one response, as the harness of MLPerf; many streams,
    since few have one each anyway."""
    running = serve(settings={"merge_responses": "false"})
    num_streams, num_tokens = 48, 40
    sizes: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(result: Any, error: Any) -> None:
        sizes.put(error or result.as_numpy("sequence_length").item())

    values = {"input_ids": [5, 6], "request_output_len": num_tokens, "streaming": True}
    inputs = []
    for name, array in make_inputs(values).items():
        inputs.append(grpcclient.InferInput(name, array.shape, INPUT_BY_NAME[name].dtype))
        inputs[-1].set_data_from_numpy(array)
    with grpcclient.InferenceServerClient(running.grpc_url) as client:
        client.start_stream(callback=put)
        for _ in range(num_streams):
            client.async_stream_infer("tensorrt_llm", inputs)
        client.stop_stream()  # waits for what was asked
    found = [sizes.get() for _ in range(sizes.qsize())]
    assert found == [1] * num_streams * num_tokens


@pytest.mark.contract("ensemble input", "num_return_sequences")
@pytest.mark.contract("ensemble output", "batch_index sequence_index")
def test_several_sequences(server: ServeProcess) -> None:
    """Seeded: sequence 1 is what seed + 1 draws alone."""
    values: dict[str, Any] = {
        "input_ids": [5, 6, 7],
        "request_output_len": 12,
        "temperature": 50.0,
        "runtime_top_p": 1.0,
        "exclude_input_in_output": True,
    }
    found: dict[int, list[int]] = {}
    for answer in infer(server, **values, num_return_sequences=3, seed=8, streaming=True):
        if answer:
            ids = answer["output_ids"].reshape(-1).tolist()
            found.setdefault(answer["sequence_index"].item(), []).extend(ids)
    assert sorted(found) == [0, 1, 2]
    assert len({tuple(ids) for ids in found.values()}) == 3
    for index, ids in found.items():
        (alone,) = infer(server, **values, seed=8 + index)
        assert alone["output_ids"].reshape(-1).tolist() == ids


@pytest.mark.contract("tensorrt_llm input", "bad_words_list")
@pytest.mark.case(36)
def test_a_bad_word_that_is_every_token_is_an_error(server: ServeProcess) -> None:
    """Acceptance 36: named, and nobody else is disturbed."""
    (some,) = infer(server, input_ids=[5, 6], request_output_len=1, return_generation_logits=True)
    vocab_size = some["generation_logits"].shape[-1]
    every = np.stack([np.arange(vocab_size), np.arange(1, vocab_size + 1)]).astype(np.int32)
    with pytest.raises(Exception, match=r"forbid every token|more than 1024"):
        list(infer(server, input_ids=[5, 6], request_output_len=9, bad_words_list=every))
    bias = np.full(vocab_size, -np.inf, np.float32)
    with pytest.raises(Exception, match="-inf for every token"):
        list(infer(server, input_ids=[5, 6], request_output_len=9, embedding_bias=bias))
    bias[7] = 0.0
    rest: dict[str, Any] = {
        "embedding_bias": bias,
        "bad_words_list": np.array([[7], [1]], np.int32),
    }
    with pytest.raises(Exception, match="forbid every token"):
        list(infer(server, input_ids=[5, 6], request_output_len=9, **rest))
    assert generate(server, "ensemble", text_input=PROMPT, max_tokens=8)["text_output"]
