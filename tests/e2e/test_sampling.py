"""Sampling, beams, drafts and outputs on the real server: over gRPC and HTTP, both models."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from e2e.conftest import ServeFactory
from support.calls import generate, make_inputs, stream_infer, stream_text, tensors_of
from support.server_process import ServeProcess

pytestmark = pytest.mark.e2e

PROMPT = "1 2 3 4"
LLM = "tensorrt_llm"


def infer(server: ServeProcess, *outputs: str, model: str = LLM, **values: Any) -> list[Any]:
    """The responses of a gRPC stream; an error ends them as ``{"error": text}``."""
    return stream_infer(server, model, tensors_of(**values), outputs)


def tokens_of(response: dict[str, Any]) -> list[int]:
    ids: list[int] = response["output_ids"].reshape(-1).tolist()
    return ids


@pytest.mark.contract("ensemble input", "stop_words")
@pytest.mark.contract("tensorrt_llm of the LLM API output", "finish_reason")
@pytest.mark.parametrize("model", ["ensemble", LLM])
def test_stop_words_over_http(server: ServeProcess, model: str) -> None:
    """The demo model counts; "9 1" spans tokens, and nothing of it is to be seen."""
    words = {"stop_words": ["9 1", "zz"], "exclude_input_in_output": True}
    answer = generate(server, model, text_input=PROMPT, max_tokens=200, **words)
    assert answer == {**answer, "text_output": " 5 6 7 8 "}
    stream = stream_text(server, PROMPT, 200, model=model, stop_words=["9 1"])
    assert "".join(stream) == " 5 6 7 8 "


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
@pytest.mark.parametrize("model", ["ensemble", LLM])
def test_named_outputs_arrive(server: ServeProcess, model: str) -> None:
    flags = ("log_probs", "log_prob_ranks", "generation_logits", "context_logits", "perf_metrics")
    counts = ("num_input_tokens", "num_output_tokens")
    logits = ("generation_logits", "context_logits")
    log_probs = ("output_log_probs", "output_log_prob_ranks", "cum_log_probs")
    metrics = ("arrival_time_ns", "last_token_time_ns", "kv_cache_alloc_total_blocks")
    others = ("text_output", "finish_reason", "sequence_index", "batch_index")
    outputs = (*others, *log_probs, *logits, *metrics, *counts)
    wanted = {f"return_{flag}": True for flag in (*flags, *counts)}
    asked = {"text_input": PROMPT, "max_tokens": 5, **wanted}
    (answer,) = infer(server, *outputs, model=model, **asked)
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
        (LLM, {"input_ids": [5, 6], "request_output_len": 3}),
        ("ensemble", {"text_input": PROMPT, "max_tokens": 3}),
    ):
        asked: dict[str, Any] = {**prompt, "model": model, "return_kv_cache_reuse_stats": True}
        (answer,) = infer(server, **asked)
        names = ("kv_cache_alloc_total_blocks", "kv_cache_reused_blocks")
        assert sum(answer[name].item() for name in names) >= 1  # an earlier test's may be reused
        (answer,) = infer(server, **asked, return_perf_metrics=True)
        assert "'return_perf_metrics' is given twice" in answer["error"]


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
    with grpcclient.InferenceServerClient(running.grpc_url) as client:
        client.start_stream(callback=put)
        for _ in range(num_streams):
            client.async_stream_infer(LLM, make_inputs(**tensors_of(**values)))
        client.stop_stream()  # waits for what was asked
    found = [sizes.get() for _ in range(sizes.qsize())]
    assert found == [1] * num_streams * num_tokens


@pytest.mark.contract("ensemble input", "num_return_sequences")
@pytest.mark.contract("ensemble output", "batch_index sequence_index")
def test_several_sequences(server: ServeProcess) -> None:
    """Seeded: sequence 1 is what seed + 1 draws alone."""
    values: dict[str, Any] = {"input_ids": [5, 6, 7], "request_output_len": 12}
    values |= {"temperature": 50.0, "runtime_top_p": 1.0, "exclude_input_in_output": True}
    found: dict[int, list[int]] = {}
    for answer in infer(server, **values, num_return_sequences=3, seed=8, streaming=True):
        found.setdefault(answer["sequence_index"].item(), []).extend(tokens_of(answer))
    assert sorted(found) == [0, 1, 2]
    assert len({tuple(ids) for ids in found.values()}) == 3
    for index, ids in found.items():
        (alone,) = infer(server, **values, seed=8 + index)
        assert tokens_of(alone) == ids


@pytest.mark.contract("tensorrt_llm input", "bad_words_list")
@pytest.mark.case(36)
def test_a_bad_word_that_is_every_token_is_an_error(server: ServeProcess) -> None:
    """Acceptance 36: named, and no other request is affected."""

    def error_of(**words: Any) -> str:
        (answer,) = infer(server, input_ids=[5, 6], request_output_len=9, **words)
        return str(answer["error"])

    (some,) = infer(server, input_ids=[5, 6], request_output_len=1, return_generation_logits=True)
    vocab_size = some["generation_logits"].shape[-1]
    every = [list(range(vocab_size)), list(range(1, vocab_size + 1))]
    told = error_of(bad_words_list=every)
    assert "forbid every token" in told or "more than 1024" in told
    bias = np.full((1, vocab_size), -np.inf, np.float32)
    assert "-inf for every token" in error_of(embedding_bias=bias)
    bias[0, 7] = 0.0
    assert "forbid every token" in error_of(embedding_bias=bias, bad_words_list=[[7], [1]])
    assert generate(server, "ensemble", text_input=PROMPT, max_tokens=8)["text_output"]


def beams_of(response: dict[str, Any]) -> list[list[int]]:
    rows = zip(response["output_ids"][0], response["sequence_length"][0], strict=True)
    return [ids[:length].tolist() for ids, length in rows]


@pytest.mark.contract("tensorrt_llm parameter", "max_beam_width")
@pytest.mark.contract("ensemble input", "beam_width")
@pytest.mark.case(27, 28)
def test_beams_whole_and_as_they_grow(other_server: ServeProcess) -> None:
    server = other_server
    ask: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 6, "beam_width": 3}
    whole = generate(server, "ensemble", **ask, length_penalty=1.0, return_log_probs=True)
    texts = whole["text_output"]
    assert len(set(texts)) == 3
    assert texts[0].startswith("1 2 3 4 5 6")
    assert len(whole["cum_log_probs"]) == 3

    tokens = ("output_ids", "sequence_length")
    named = (*tokens, "text_output", "finish_reason")
    stream = infer(server, *named, **ask, len_penalty=1.0, streaming=True)
    assert [PROMPT + text.decode() for text in stream[-1]["text_output"]] == texts
    lengths = [max(map(len, beams_of(response))) for response in stream]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 6
    assert stream[-1]["finish_reason"].tolist() == [[b"length"]]

    (alone,) = infer(server, *tokens, **ask, len_penalty=1.0, exclude_input_in_output=True)
    assert beams_of(alone) == beams_of(stream[-1])
    (two,) = infer(server, *tokens, **ask, num_return_sequences=2)
    assert two["output_ids"].shape[:2] == (1, 2)
    error = generate(server, "ensemble", text_input=PROMPT, max_tokens=6, beam_width=4)["error"]
    assert "'beam_width' is 4, more than max_beam_width = 3" in error


def test_drafts_are_accepted_and_change_no_answer(
    server: ServeProcess, other_server: ServeProcess
) -> None:
    """The demo model counts, so its text repeats pairs of tokens; and drafts of a client."""
    values = {"text_input": "1 2 3 4 5 6 7 8 9 1 2 3", "max_tokens": 60, "temperature": 0.0}
    answers = [generate(each, LLM, **values)["text_output"] for each in (server, other_server)]
    assert answers[0] == answers[1]
    asked: dict[str, Any] = {"input_ids": [5, 6, 7], "request_output_len": 12}
    asked |= {"exclude_input_in_output": True, "return_perf_metrics": True}
    (whole,) = infer(other_server, **asked)
    tokens = tokens_of(whole)
    drafts = [*tokens[:4], (tokens[4] + 1) % 10]
    (told,) = infer(other_server, **asked, draft_input_ids=drafts)
    assert tokens_of(told) == tokens
    assert told["total_draft_tokens"].item() >= 5
    assert told["total_accepted_draft_tokens"].item() >= 4
    assert 0 < told["acceptance_rate"].item() <= 1
    (answer,) = infer(other_server, input_ids=[5], request_output_len=9, draft_input_ids=[1] * 7)
    assert "holds 7 tokens, more than max_draft_len = 6" in answer["error"]
