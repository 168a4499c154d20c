"""The clients of tensorrtllm_backend v0.5 to v0.20: what they send, and how they read the answers.

Each test does what the script of its name does, in words of ours: the same tensors and types, no
outputs named where the script names none, and the script's own checks. A tag is its minor version.
Those of v0.5 and v0.6 send lengths and ids as UINT32, for which the server has an option.
docs/clients.md says which tag needs what.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from support.calls import WAIT_SECONDS, assert_counts, infer, stream_infer
from support.plain_triton import PlainServer, repository_server

from inflight_backend.text.tokenizer import TextCodec
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "1 2 3"
NUM_TOKENS = 8
CODEC = TextCodec(DEMO_MODEL)
LOG_PROBS = ("cum_log_probs", "output_log_probs")
LOGITS = ("context_logits", "generation_logits")
MODELS = ("preprocessing", "postprocessing", "tensorrt_llm_bls")
WHOLE, STREAMED = ("--no-decoupled",), ("--decoupled",)
WHOLE_UINT32 = (*WHOLE, "--set", "uint32_inputs=true")
STREAMED_UINT32 = (*STREAMED, "--set", "uint32_inputs=true")
LAST_WITH_UINT32 = 6
LATEST = 20
NUMBERS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[PlainServer]:
    options = [*(f"--add={name}" for name in MODELS), "--set", "out_of_vocabulary=fold"]
    options += ["--set", "max_beam_width=3"]
    with repository_server(*request.param, *options) as running:
        yield running


def on(options: Sequence[str], *tags: int) -> pytest.MarkDecorator:
    """Run a test against a server with ``options``, as the clients of each of ``tags`` do."""
    cases = [pytest.param(options, tag, id=f"v0.{tag}") for tag in tags]
    return pytest.mark.parametrize(("server", "tag"), cases, indirect=["server"], scope="module")


def integer(value: int, tag: int) -> Any:
    """A length or an id in the type of its clients."""
    return np.array([[value]], dtype=np.uint32 if tag <= LAST_WITH_UINT32 else np.int32)


def text_inputs(tag: int, **more: Any) -> dict[str, Any]:
    """What they send to `ensemble` and `tensorrt_llm_bls`."""
    prompt = {"text_input": [[PROMPT]], "max_tokens": integer(NUM_TOKENS, tag)}
    return {**prompt, "bad_words": [[""]], "stop_words": [[""]], **more}


def in_three_calls(server: PlainServer, tag: int, **flags: Any) -> tuple[Any, Any, Any]:
    """Tokenise, generate and decode: what the three models answer."""
    asked: dict[str, Any] = {"QUERY": [[PROMPT]], "REQUEST_OUTPUT_LEN": integer(NUM_TOKENS, tag)}
    asked |= {"BAD_WORDS_DICT": [[""]], "STOP_WORDS_DICT": [[""]]}
    made = infer(server, "preprocessing", **asked)
    prompt = {"input_ids": made["INPUT_ID"], "input_lengths": made["REQUEST_INPUT_LEN"]}
    prompt["request_output_len"] = made["REQUEST_OUTPUT_LEN"]
    if tag >= 8:
        prompt |= {"end_id": made["OUT_END_ID"], "pad_id": made["OUT_PAD_ID"]}
    if tag >= 11:
        prompt["decoder_input_ids"] = made["DECODER_INPUT_ID"]
    answer = infer(server, "tensorrt_llm", **prompt, **flags)
    tokens = {"TOKENS_BATCH": answer["output_ids"].astype(np.int32)}
    if tag >= 6:
        tokens["SEQUENCE_LENGTH"] = answer["sequence_length"]
    for name in (*LOG_PROBS, *LOGITS) if tag >= 8 else LOG_PROBS if tag >= 6 else ():
        tokens[name.upper()] = answer[name].astype(np.float32)
    return made, answer, infer(server, "postprocessing", **tokens)


def check_end_to_end(server: PlainServer, tag: int, **flags: Any) -> None:
    """Its checks: `ensemble`, and `tensorrt_llm_bls`, say what the three models say one by one."""
    made, answer, decoded = in_three_calls(server, tag, **flags)
    for model in ("ensemble", "tensorrt_llm_bls") if tag >= 9 else ("ensemble",):
        result = infer(server, model, **text_inputs(tag, **flags))
        assert decoded["OUTPUT"] == result["text_output"]
        assert_counts(PROMPT, result["text_output"][0].decode().removeprefix(PROMPT), NUM_TOKENS)
        if tag < 6:
            continue
        assert answer["cum_log_probs"] == result["cum_log_probs"]
        assert (answer["output_log_probs"] == result["output_log_probs"]).all()
        if tag < 8:
            continue
        context, generation = (result[name] for name in LOGITS)
        assert np.allclose(answer["context_logits"], context)
        assert np.allclose(answer["generation_logits"], generation)
        assert (answer["generation_logits"] == decoded["OUT_GENERATION_LOGITS"]).all()
        vocab_size = CODEC.vocab_size
        if "return_context_logits" in flags:
            assert context.shape == (1, made["INPUT_ID"].size, vocab_size)
        else:
            assert context.tolist() == [[[0]]]
        if "return_generation_logits" in flags:
            assert generation.shape == (1, 1, NUM_TOKENS, vocab_size)
        else:
            assert generation.tolist() == [[[[0]]]]


@pytest.mark.contract("client", "unasked-outputs")
@on(WHOLE, 7, 8, 9, 12, 13)
def test_end_to_end_test(server: PlainServer, tag: int) -> None:
    check_end_to_end(server, tag)
    if tag >= 8:
        check_end_to_end(server, tag, return_context_logits=[[True]])
        check_end_to_end(server, tag, return_generation_logits=[[True]])


@pytest.mark.contract("client", "unasked-outputs")
@on(WHOLE, 7, 8, 9, 12, 13)
def test_e2e_grpc_speculative_decoding_client(server: PlainServer, tag: int) -> None:
    """It drafts with one model and has another one check that, here the same; it reads what it has
    not asked for of both, and has the last of that decoded."""
    prompt = np.array([CODEC.encode(PROMPT, 100)], dtype=np.int32)
    words = infer(server, "preprocessing", QUERY=[[PROMPT]], REQUEST_OUTPUT_LEN=[[NUM_TOKENS]])
    inputs = {
        "bad_words_list": words["BAD_WORDS_IDS"],
        "stop_words_list": words["STOP_WORDS_IDS"],
        "beam_width": [[1]],
        "temperature": np.array([[1.0]], dtype=np.float32),
    }
    if tag >= 8:
        inputs |= {"end_id": words["OUT_END_ID"], "pad_id": words["OUT_PAD_ID"]}

    def ask(ids: Any, num_new: int, **more: Any) -> tuple[Any, dict[str, Any]]:
        lengths = {"input_lengths": [[ids.size]], "request_output_len": [[num_new]]}
        answer = infer(server, "tensorrt_llm", input_ids=ids, **lengths, **inputs, **more)
        assert answer["sequence_length"].shape == (1, 1)
        names = LOG_PROBS if tag < 8 else (*LOG_PROBS, *LOGITS)
        return answer["output_ids"][0], {name: answer[name].astype(np.float32) for name in names}

    ids, goal = prompt, prompt.size + NUM_TOKENS
    while ids.size < goal:
        num_drafts = min(4, goal - ids.size - 1)
        more = {}
        if num_drafts > 0:
            drafted, _ = ask(ids, num_drafts)
            more["draft_input_ids"] = drafted[:, ids.size :]
        before = ids.size
        ids, beside = ask(ids, num_drafts + 1, **more)
        assert ids.size > before
    tokens = {"TOKENS_BATCH": ids[None], "SEQUENCE_LENGTH": [[ids.size]]}
    beside = {name.upper(): tensor for name, tensor in beside.items()}
    text = infer(server, "postprocessing", **tokens, **beside)["OUTPUT"]
    assert_counts(PROMPT, text[0].decode("utf8").removeprefix(PROMPT), NUM_TOKENS)


def run_end_to_end_grpc_client(
    server: PlainServer, tag: int, model: str, stream: bool, beam_width: int = 1
) -> None:
    inputs = text_inputs(tag, stream=[[stream]])
    outputs: tuple[str, ...] = ()
    if tag >= 8:
        inputs["beam_width"] = [[beam_width]]
    if tag == LATEST:
        inputs |= {"return_perf_metrics": [[True]], "exclude_input_in_output": [[True]]}
        outputs = ("text_output", *NUMBERS)
    text = ""
    for response in stream_infer(server, model, inputs, outputs):
        assert "error" not in response, response
        assert response["text_output"].shape == (beam_width,)
        assert all(response[name][0][0] >= 0 for name in outputs[1:])
        new = response["text_output"][0].decode("utf-8")
        text = text + new if stream and beam_width == 1 else new
        if 12 <= tag < LATEST:
            assert response["batch_index"][0][0] == 0
    assert_counts(PROMPT, text.removeprefix(PROMPT), NUM_TOKENS)


@pytest.mark.contract("client", "batch-index")
@on(STREAMED, 7, 9, 12, 13, LATEST)
def test_end_to_end_grpc_client_streams(server: PlainServer, tag: int) -> None:
    for model, beam_width in product(("ensemble", "tensorrt_llm_bls"), beam_widths(tag)):
        run_end_to_end_grpc_client(server, tag, model, True, beam_width)
        run_end_to_end_grpc_client(server, tag, model, False, beam_width)


@pytest.mark.contract("client", "batch-index")
@on(WHOLE, 7, 9, 12, 13, LATEST)
def test_end_to_end_grpc_client(server: PlainServer, tag: int) -> None:
    for model, beam_width in product(("ensemble", "tensorrt_llm_bls"), beam_widths(tag)):
        run_end_to_end_grpc_client(server, tag, model, False, beam_width)


def beam_widths(tag: int) -> Sequence[int]:
    return (1, 3) if tag == LATEST else (1,)


@pytest.mark.contract("client", "uint32")
@on(STREAMED_UINT32, 5, 6)
def test_end_to_end_streaming_client(server: PlainServer, tag: int) -> None:
    run_end_to_end_grpc_client(server, tag, "ensemble", stream=True)
    run_end_to_end_grpc_client(server, tag, "ensemble", stream=False)


def run_inflight_batcher_llm_client(server: PlainServer, tag: int, *, stream: bool) -> None:
    """It reads ids, and a stop with the same id is acknowledged without any."""
    ids = np.array([CODEC.encode(PROMPT, 100)], dtype=np.int32)
    asked = {
        "input_ids": ids,
        "input_lengths": [[ids.size]],
        "request_output_len": integer(NUM_TOKENS, tag),
        "beam_width": integer(1, tag),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "streaming": [[stream]],
    }
    named = ["output_ids", "sequence_length"] if tag > LAST_WITH_UINT32 else []
    if tag >= 12:
        asked["return_log_probs"] = [[True]]
        named += LOG_PROBS
    if tag == LATEST:
        asked["return_perf_metrics"] = [[True]]
        named += NUMBERS
    found: list[int] = []
    for response in stream_infer(server, "tensorrt_llm", asked, named):
        assert "error" not in response, response
        if tag >= 12:
            assert response["cum_log_probs"][0].shape == (1,)
            assert response["output_log_probs"][0].ndim == 2
        if tag == LATEST:
            assert all(response[name][0][0] >= 0 for name in NUMBERS)
        if stream:
            found += response["output_ids"][0][0].tolist()
        else:
            found = response["output_ids"][0][0].tolist()[ids.size :]
    assert_counts(PROMPT, CODEC.decode(found), NUM_TOKENS)
    stop = {"input_ids": [[0]], "input_lengths": [[0]], "stop": [[True]]}
    stop["request_output_len"] = integer(0, tag)
    parameters = {"Streaming": stream} if tag == LATEST else None
    assert stream_infer(server, "tensorrt_llm", stop, (), parameters, request_id="1") == []


@pytest.mark.contract("client", "stop-and-stream")
@on(STREAMED, 7, 9, 12, 13, LATEST)
def test_inflight_batcher_llm_client_streams(server: PlainServer, tag: int) -> None:
    run_inflight_batcher_llm_client(server, tag, stream=True)


@on(WHOLE, LATEST)
def test_inflight_batcher_llm_client(server: PlainServer, tag: int) -> None:
    """It says with a parameter, too, that it does not stream."""
    run_inflight_batcher_llm_client(server, tag, stream=False)
    answer = infer(server, "tensorrt_llm", {"Streaming": False}, **text_inputs(tag))
    assert answer["text_output"].shape == (1,)


@pytest.mark.contract("client", "uint32")
@on(STREAMED_UINT32, 5, 6)
def test_inflight_batcher_llm_client_streams_with_uint32(server: PlainServer, tag: int) -> None:
    run_inflight_batcher_llm_client(server, tag, stream=True)


@pytest.mark.contract("client", "uint32 lengths")
@on(WHOLE_UINT32, 5, 6)
def test_the_clients_with_uint32(server: PlainServer, tag: int) -> None:
    check_end_to_end(server, tag)
    run_inflight_batcher_llm_client(server, tag, stream=False)
    run_identity_test(server, tag, [CODEC.encode(PROMPT, 100), CODEC.encode("7 8", 100)])


def run_identity_test(server: PlainServer, tag: int, prompts: Sequence[Sequence[int]]) -> None:
    """`identity_test.py`, and `benchmark_core_model.py` that came after it: all prompts at once
    over gRPC, where the first output tells how long an answer is; over HTTP it only waits."""

    def make_inputs(module: Any, prompt: Sequence[int]) -> list[Any]:
        ids = np.array([prompt], dtype=np.int32)
        tensors = {"input_ids": ids, "input_lengths": np.array([[ids.size]], dtype=np.int32)}
        tensors["request_output_len"] = integer(NUM_TOKENS, tag)
        if tag >= 9:
            tensors["end_id"] = integer(-1, tag)
        inputs = []
        for name, array in tensors.items():
            inputs.append(module.InferInput(name, array.shape, array.dtype.name.upper()))
            inputs[-1].set_data_from_numpy(array)
        return inputs

    with httpclient.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        client.infer("tensorrt_llm", make_inputs(httpclient, prompts[0]), request_id="0")
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        for index, prompt in enumerate(prompts):
            client.async_infer(
                "tensorrt_llm",
                make_inputs(grpcclient, prompt),
                callback=lambda result, error: results.put((result, error)),
                request_id=str(index),
            )
        for _ in prompts:
            result, error = results.get(timeout=WAIT_SECONDS)
            assert error is None, error
            response = result.get_response(as_json=True)
            length = int(response["outputs"][0]["shape"][2])
            assert length == len(prompts[int(response["id"])]) + NUM_TOKENS


@pytest.mark.contract("client", "folded-ids")
@on(WHOLE, 7, 9, 12, 13)
def test_benchmark_core_model(server: PlainServer, tag: int) -> None:
    """`dataset` has prompts, `token-norm-dist` and `token-from-histogram` draw ids of any size."""
    drawn = np.random.default_rng(420).integers(0, np.iinfo(np.int32).max, (3, 40), np.int32)
    run_identity_test(server, tag, [CODEC.encode(PROMPT, 100), *drawn.tolist()])


@pytest.mark.contract("client", "end-id")
@on(STREAMED, 13)
def test_an_end_id_that_no_vocabulary_has_ends_nothing(server: PlainServer, tag: int) -> None:
    """SGLang's benchmark sends it; "3 2 1" would end at 0."""
    asked = {"text_input": [["3 2 1"]], "max_tokens": [[20]], "end_id": [[1048576]]}
    for model in ("ensemble", "tensorrt_llm_bls"):
        (answer,) = stream_infer(server, model, asked | {"return_num_output_tokens": [[True]]})
        assert answer["num_output_tokens"].item() == 20
