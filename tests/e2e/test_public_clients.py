"""The public clients' own calls, one imitation each: what they send, and how they read it.

What they read is read as they do: ``output[0].decode()`` and ``[0][0]``, never flattened. The model
is the demo as chat models are: what ends its texts is a further end id, not ``eos_token``.
"""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
from support.calls import (
    WAIT_SECONDS,
    assert_counts,
    generate_stream,
    infer,
    make_inputs,
    stream_infer,
)
from support.front_process import FrontProcess
from support.plain_triton import PlainServer, repository_server

from inflight_backend.text.tokenizer import TextCodec
from inflight_server.serve.repository import OPTIONAL_MODELS
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "1 2 3"
NUM_TOKENS = 6
COUNTDOWN, REST = "5 4 3", " 2 1 0"
NEVER_SAID = "Ā"  # how the tokenizer writes a zero byte
CODEC = TextCodec(DEMO_MODEL)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ends") / "demo_model"
    shutil.copytree(DEMO_MODEL, folder)
    for name, change in (
        ("tokenizer_config.json", {"eos_token": NEVER_SAID}),
        ("generation_config.json", {"eos_token_id": [*CODEC.encode_word("~"), CODEC.end_id]}),
    ):
        content = json.loads((DEMO_MODEL / name).read_text())
        (folder / name).write_text(json.dumps(content | change))
    return folder


@pytest.fixture(scope="module", params=["--decoupled", "--no-decoupled"])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[PlainServer]:
    options = [*(f"--add={name}" for name in OPTIONAL_MODELS), "--set", "max_beam_width=3"]
    with repository_server(request.param, f"--model={checkpoint}", *options) as running:
        yield running


@pytest.fixture
def is_decoupled(request: pytest.FixtureRequest, server: PlainServer) -> bool:
    return bool(request.node.callspec.params["server"] == "--decoupled")


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_end_to_end_grpc_client_with_several_rows(
    server: PlainServer, is_decoupled: bool, model: str
) -> None:
    """Its option --batch-inputs; the rows need not be alike."""
    prompts, lengths = ["1 2", "5 6 7", "9"], [[7], [4], [5]]
    texts = {prompt: "" for prompt in prompts}
    for is_streaming in (True, False):
        tensors: dict[str, Any] = {
            "text_input": [[prompt] for prompt in prompts],
            "max_tokens": lengths,
            "stream": [[is_streaming]] * 3,
            "exclude_input_in_output": [[True]] * 3,
        }
        responses = stream_infer(server, model, tensors, ("text_output", "batch_index"))
        if not is_decoupled:
            reason = "'streaming' needs a" if is_streaming else "3 answers (rows of the"
            assert reason in responses[-1]["error"]
            continue
        for response in responses:
            prompt = prompts[response["batch_index"][0][0]]
            texts[prompt] = texts[prompt] * is_streaming + response["text_output"][0].decode()
        for prompt, (length,) in zip(prompts, lengths, strict=True):
            assert_counts(prompt, texts[prompt], length)


HANDED_ON = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "decoder_input_ids": "DECODER_INPUT_ID",
    "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
    "prompt_table_extra_ids": "OUT_PROMPT_TABLE_EXTRA_IDS",
}
"""What the peer's ensemble, and in part its client, hand on from preprocessing, wanted or not."""


@pytest.mark.contract("preprocessing input", "QUERY REQUEST_OUTPUT_LEN")
@pytest.mark.contract(
    "preprocessing output", "INPUT_ID REQUEST_INPUT_LEN REQUEST_OUTPUT_LEN OUT_END_ID OUT_PAD_ID"
)
@pytest.mark.contract("postprocessing input", "TOKENS_BATCH SEQUENCE_LENGTH")
@pytest.mark.contract("postprocessing output", "OUTPUT")
def test_end_to_end_test(server: PlainServer) -> None:
    """It tokenises, generates and decodes in three calls, and compares with the ensemble."""
    words = {"BAD_WORDS_DICT": [[""]], "STOP_WORDS_DICT": [[""]]}
    asked = {"QUERY": [[PROMPT]], "REQUEST_OUTPUT_LEN": [[NUM_TOKENS]], **words}
    extra = np.array([[3]], dtype=np.uint64)
    made = infer(server, "preprocessing", PROMPT_TABLE_EXTRA_ID=extra, **asked)
    handed_on = {name: made[output] for name, output in HANDED_ON.items()}
    (answer,) = stream_infer(server, "tensorrt_llm", handed_on)
    assert "error" not in answer, answer
    tokens = {"TOKENS_BATCH": answer["output_ids"], "SEQUENCE_LENGTH": answer["sequence_length"]}
    text = infer(server, "postprocessing", **tokens)["OUTPUT"]
    inputs = {"text_input": [[PROMPT]], "max_tokens": [[NUM_TOKENS]]}
    (whole,) = stream_infer(server, "ensemble", inputs)
    assert text.tolist() == whole["text_output"].tolist()
    assert_counts(PROMPT, text[0].decode().removeprefix(PROMPT), NUM_TOKENS)


@pytest.mark.parametrize("model", ["ensemble", "vllm_model"])
def test_tritons_openai_frontend(server: PlainServer, is_decoupled: bool, model: str) -> None:
    """In both its shapes it adds up the tokens of the responses."""
    wants = ("return_num_input_tokens", "return_num_output_tokens")
    if model == "vllm_model":
        settings = {"frequency_penalty": 0, "n": 1, "presence_penalty": 0, "temperature": 0}
        settings |= {"top_p": 1, "max_tokens": NUM_TOKENS}
        tensors: dict[str, Any] = {"text_input": [PROMPT], "return_logprobs": [False]}
        tensors |= {"sampling_parameters": [json.dumps(settings)]}
        tensors |= {"exclude_input_in_output": [True], **{name: [True] for name in wants}}
    else:
        tensors = {"text_input": [[PROMPT]], "max_tokens": [[NUM_TOKENS]]}
        tensors |= {"exclude_input_in_output": [[True]], **{name: [[True]] for name in wants}}
    for is_streaming in (False, True) if is_decoupled else (False,):
        flag = [is_streaming] if model == "vllm_model" else [[is_streaming]]
        asked = {**tensors, "stream": flag}
        if is_decoupled:
            responses = stream_infer(server, model, asked)
        else:
            responses = [infer(server, model, **asked)]
        assert "error" not in responses[-1], responses
        texts = b"".join(response["text_output"].reshape(-1)[0] for response in responses)
        assert_counts(PROMPT, texts.decode(), NUM_TOKENS)
        counts = [int(response["num_output_tokens"].reshape(-1)[0]) for response in responses]
        assert sum(counts) == NUM_TOKENS


ONE = CODEC.encode_word("1")
ENDS: list[tuple[dict[str, Any], str]] = [({}, REST), ({"stop_token_ids": ONE}, " 2 ")]
"""What is asked for -> the answer to `COUNTDOWN`, which neither a limit nor a stop word ends."""


@pytest.mark.parametrize(("more", "answer"), ENDS)
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls", "vllm_model"])
def test_answers_end_at_further_end_ids(
    server: PlainServer, is_decoupled: bool, model: str, more: dict[str, Any], answer: str
) -> None:
    values: dict[str, Any] = {"text_input": COUNTDOWN, "stream": is_decoupled}
    values |= {"exclude_input_in_output": True, "return_finish_reason": True}
    if model == "vllm_model":
        asked: dict[str, Any] = {name: [value] for name, value in values.items()}
        settings = {"max_tokens": 40, "temperature": 0, **more}
        asked["sampling_parameters"] = [json.dumps(settings)]
    else:
        asked = {name: [[value]] for name, value in values.items()}
        asked |= {"max_tokens": [[40]], **{name: [value] for name, value in more.items()}}
    responses = stream_infer(server, model, asked)
    text = b"".join(each["text_output"].item() for each in responses).decode()
    reason = responses[-1]["finish_reason"].item()
    assert (text, reason) == (answer, b"stop" if model == "vllm_model" else b"end_id")


@pytest.mark.parametrize("server", ["--decoupled"], indirect=True)
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "vllm_model"])
@pytest.mark.parametrize("is_streaming", [True, False])
def test_clients_that_wait_for_the_end_and_ask_for_no_empty_one(
    server: PlainServer, model: str, is_streaming: bool
) -> None:
    """The last response of the peers' models says that it is: some clients count on that."""
    values: dict[str, Any] = {"text_input": PROMPT, "stream": is_streaming}
    if model == "vllm_model":
        values["sampling_parameters"] = json.dumps({"max_tokens": NUM_TOKENS, "temperature": 0})
    else:
        values["max_tokens"] = NUM_TOKENS
    tensors = {
        name: [value] if model == "vllm_model" else [[value]] for name, value in values.items()
    }
    texts: queue.SimpleQueue[Any] = queue.SimpleQueue()
    has_ended = threading.Event()

    def put(result: Any, error: Any) -> None:
        texts.put(error or result.as_numpy("text_output").reshape(-1)[0])
        if error or result.get_response().parameters["triton_final_response"].bool_param:
            has_ended.set()

    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=put)
        client.async_stream_infer(model, make_inputs(**tensors))
        assert has_ended.wait(WAIT_SECONDS)
    text = b"".join(texts.get() for _ in range(texts.qsize())).decode()
    assert_counts(PROMPT, text.removeprefix(PROMPT), NUM_TOKENS)


@pytest.mark.parametrize("server", ["--decoupled"], indirect=True)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_benchmark_clients(server: PlainServer, model: str) -> None:
    """Those of vLLM, SGLang and TensorRT-LLM, and Modular's, which asks for answers of one length.

    They add up the texts, though what they send sounds as if the server did.
    """
    body: dict[str, Any] = {"accumulate_tokens": True, "text_input": COUNTDOWN, "max_tokens": 20}
    body |= {"temperature": 0.0, "top_p": 1.0, "stream": True}
    body["return_num_output_tokens"] = True  # what comes behind the end may be no text
    endless = {"ignore_eos": True, "max_tokens": 100}
    for more, length in (({}, 0), ({"min_length": 12}, 12), (endless, 100)):
        events = list(generate_stream(server, model, **{**body, **more}))
        text = "".join(event["text_output"] for event in events)
        assert len(events) > 1 or length < 100  # tokens that pile up travel together
        assert text.startswith(REST), events
        assert sum(event["num_output_tokens"] for event in events) >= length
        assert more or text == REST


def test_token_clients_end_at_what_they_name(server: PlainServer) -> None:
    """One that names nothing is ended by no token; preprocessing has all there is to be named."""
    made = infer(server, "preprocessing", QUERY=[[COUNTDOWN]], REQUEST_OUTPUT_LEN=[[40]])
    assert made["OUT_END_ID"].item() != CODEC.end_id
    prompt = {"input_ids": made["INPUT_ID"], "request_output_len": made["REQUEST_OUTPUT_LEN"]}
    prompt["exclude_input_in_output"] = [[True]]
    first = {"end_id": made["OUT_END_ID"]}
    for named, length in (
        ({}, 40),
        (first, 40),
        ({**first, "stop_token_ids": made["OUT_STOP_TOKEN_IDS"]}, len(REST)),
        ({"stop_token_ids": [ONE]}, len(" 2 ")),
    ):
        (found,) = stream_infer(server, "tensorrt_llm", {**prompt, **named})
        assert found["sequence_length"].item() == length, named


@pytest.fixture
def front(server: PlainServer, tmp_path: Path) -> Iterator[FrontProcess]:
    with FrontProcess(tmp_path, server.grpc_url) as running:
        yield running


@pytest.mark.parametrize("server", ["--decoupled"], indirect=True)
def test_answers_of_the_openai_front_end_at_further_end_ids(front: FrontProcess) -> None:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        for more, answer in ENDS:
            asked: Any = {"model": "demo_model", "max_tokens": 40, "temperature": 0}
            asked["extra_body"] = more
            done = client.completions.create(prompt=COUNTDOWN, **asked).choices[0]
            assert (done.text, done.finish_reason) == (answer, "stop")
            chunks = list(client.completions.create(prompt=COUNTDOWN, stream=True, **asked))
            assert "".join(each.choices[0].text for each in chunks) == answer
            assert chunks[-1].choices[0].finish_reason == "stop"
