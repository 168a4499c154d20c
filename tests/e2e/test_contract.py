"""The contract on the real server, with a bare tritonclient as tensorrtllm_backend's users have it.

The demo model counts, so a lost, doubled or foreign token is a gap in the count.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.conftest import ServeFactory
from support.calls import (
    PeerClient,
    assert_counts,
    assert_counts_in_part,
    stats_of,
    wait_for_active,
)
from support.server_process import ServeProcess
from tokenizers import Tokenizer

from inflight_server.serve.settings import DEMO_MODEL

pytestmark = pytest.mark.e2e

PROMPT = "1 2 3"
TOKENIZER: Any = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
IDS: list[int] = TOKENIZER.encode(PROMPT).ids


@pytest.fixture
def client(server: ServeProcess) -> Iterator[PeerClient]:
    with PeerClient(server.grpc_url) as client:
        yield client


def run_inflight(*arguments: object) -> str:
    """What a command prints; it must succeed."""
    command = [str(Path(sys.executable).parent / "inflight"), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.contract("tensorrt_llm input", "input_ids streaming")
@pytest.mark.contract("tensorrt_llm output", "output_ids sequence_length")
@pytest.mark.contract("tensorrt_llm of the LLM API input", "streaming")
def test_tokens_stream_from_tensorrt_llm(client: PeerClient) -> None:
    values: dict[str, Any] = {"input_ids": IDS, "input_lengths": len(IDS), "request_output_len": 40}
    neutral: dict[str, Any] = {"end_id": 1, "pad_id": 1, "beam_width": 1, "temperature": 1.0}
    neutral |= {"runtime_top_k": 1, "runtime_top_p": 0.0, "repetition_penalty": 1.0}
    client.send("stream", streaming=True, random_seed=0, **values, **neutral)
    answer: list[int] = []
    for outputs in client.answer():
        assert outputs["output_ids"].shape == (1, 1, outputs["sequence_length"].item())
        answer += outputs["output_ids"].reshape(-1).tolist()
    assert_counts(PROMPT, TOKENIZER.decode(answer), 40)
    assert client.ask(**values) == IDS + answer, "whole, with the prompt unless that is excluded"
    assert client.ask(**values, exclude_input_in_output=True) == answer


@pytest.mark.contract("tensorrt_llm input", "seed")
@pytest.mark.case(30)
def test_seeded_sampling_repeats_whatever_runs_beside_it(
    server: ServeProcess, client: PeerClient
) -> None:
    ids = TOKENIZER.encode("hello").ids
    values: dict[str, Any] = {"input_ids": ids, "request_output_len": 30, "streaming": True}
    values |= {"temperature": 3.0, "runtime_top_k": 100}
    alone = client.ask(**values, seed=2**64 - 1)
    with PeerClient(server.grpc_url) as other:
        for i in range(5):
            other.send(f"other {i}", input_ids=ids * (i + 1), request_output_len=200)
        assert client.ask(**values, seed=2**64 - 1) == alone
    assert client.ask(**values, seed=1) != alone


@pytest.mark.contract("tensorrt_llm input", "min_length")
def test_min_length_holds_the_end_back(client: PeerClient) -> None:
    values: dict[str, Any] = {"input_ids": IDS, "request_output_len": 20, "streaming": True}
    free = client.ask(**values)
    end_id = free[3]
    assert client.ask(**values, end_id=end_id) == free[: free.index(end_id)]
    assert len(client.ask(**values, end_id=end_id, min_length=15)) >= 15


@pytest.mark.case(73)
def test_the_next_request_may_come_on_the_same_stream(client: PeerClient) -> None:
    """After an answer, after an error and after a stop; with the same id."""
    values = {"input_lengths": 1, "request_output_len": 5, "streaming": True}
    first = client.ask("again", input_ids=[20], **values)
    with pytest.raises(Exception, match="'request_output_len' is 0"):
        client.ask("again", input_ids=[20], input_lengths=1, request_output_len=0)
    client.send("again", text_input=PROMPT, max_tokens=7000, stream=True)
    next(client.responses())
    client.send("again", input_ids=[0], stop=True)
    finals = (is_final for _, _, is_final in client.responses() if is_final)
    assert [next(finals), next(finals)] == [True, True], "the stopped one and the stop"
    assert client.ask("again", input_ids=[20], **values) == first


@pytest.mark.contract("tensorrt_llm input", "stop")
@pytest.mark.contract("tensorrt_llm of the LLM API input", "stop")
@pytest.mark.case(66)
def test_stop_by_id_ends_a_stream_and_gives_its_blocks_back(
    server: ServeProcess, client: PeerClient
) -> None:
    client.send("to stop", text_input=PROMPT, max_tokens=7000, stream=True)
    answer, text = client.answer(), ""
    while len(text) <= 100:
        text += next(answer)["text_output"].item().decode()
    iteration = stats_of(server)["Iteration Counter"]
    with PeerClient(server.grpc_url) as other:  # the stop comes over another connection
        other.send("to stop", input_ids=[0], input_lengths=0, request_output_len=0, stop=True)
        assert next(other.responses()) == ("to stop", {}, True)
    for _, outputs, is_final in client.responses():
        text += outputs["text_output"].item().decode() if "text_output" in outputs else ""
        if is_final:
            break
    assert "text_output" in outputs, "the final response of a stopped request is an ordinary one"
    assert_counts_in_part(PROMPT, text, 7000)
    after = stats_of(server)
    assert after["Used KV cache blocks"] == 0
    # The stop and two questions travel meanwhile. That it is done in the iteration that runs is
    # shown by test_triton_model.py.
    assert after["Iteration Counter"] - iteration < 2000


@pytest.mark.case(58)
def test_stop_for_unknown_id_is_acknowledged_and_without_id_refused(client: PeerClient) -> None:
    client.send("never seen", input_ids=[0], stop=True)
    assert next(client.responses())[1:] == ({}, True)
    client.send("", input_ids=[0], stop=True)
    with pytest.raises(Exception, match="stop request needs the request id"):
        next(client.responses())


@pytest.mark.case(67)
def test_cancelling_a_stream_frees_its_blocks(server: ServeProcess) -> None:
    with PeerClient(server.grpc_url) as client:
        client.send(text_input=PROMPT, max_tokens=7000, stream=True)
        next(client.responses())
    assert wait_for_active(server, 0, within=10)["Used KV cache blocks"] == 0


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"text_input": "", "max_tokens": 5}, "'text_input' is empty"),
    ({"max_tokens": 5}, "the prompt is missing"),
    ({"text_input": "1", "input_ids": [1]}, "'text_input' and 'input_ids' are both given"),
    ({"input_ids": [5000]}, "'input_ids' holds 5000, outside the vocabulary"),
    ({"input_ids": [-1]}, "'input_ids' holds -1"),
    ({"text_input": "1", "max_tokens": 0}, "'max_tokens' is 0"),
    ({"text_input": "1", "max_tokens": -7}, "'max_tokens' is -7"),
    ({"text_input": "1", "max_tokens": 2**31 - 1}, "more than max_seq_len = "),
    ({"text_input": "1", "temperature": float("nan")}, "'temperature' is nan"),
    ({"text_input": "1", "runtime_top_p": 7.0}, "'runtime_top_p' is 7"),
    ({"text_input": "1", "beam_width": 4}, "'beam_width' is 4, more than max_beam_width"),
    ({"text_input": "1", "lora_task_id": 7}, "LoRA task 7 not found in cache"),
    ({"text_input": "1", "repetition_penalty": 0.0}, "'repetition_penalty' is 0"),
    ({"input_ids": np.ones((65, 3), np.int32)}, "batch-size must be <= 64"),
    ({"input_ids": np.ones(3, np.int32)}, r"unexpected shape|batch-size must be <= 1"),
]


@pytest.mark.case(1, 3, 4, 8, 9, 14, 15, 16, 19, 20, 21, 23, 25, 27, 41, 123)
def test_bad_input_is_refused_by_name_and_affects_no_other(
    server: ServeProcess, client: PeerClient
) -> None:
    with PeerClient(server.grpc_url) as other:
        other.send("other", text_input=PROMPT, max_tokens=7000, stream=True)
        for values, message in BAD_REQUESTS:
            client.send("bad", **values)
            with pytest.raises(Exception, match=message) as caught:
                next(client.responses())
            told = str(caught.value).replace("input_ids", "")
            assert not re.search(r"/|Traceback|\.py", told)
        assert_counts_in_part(PROMPT, other.stop_all("other")["other"], 7000)


@pytest.mark.case(20)
def test_rows_of_one_request_are_told_apart(client: PeerClient) -> None:
    client.send(
        "rows",
        text_input=np.array([[PROMPT], ["20 21"]], np.object_),
        max_tokens=np.array([[5], [9]], np.int32),
        stream=np.array([[True], [True]]),
    )
    texts = {0: "", 1: ""}
    for outputs in client.answer():
        texts[outputs["batch_index"].item()] += outputs["text_output"].item().decode()
    assert_counts(PROMPT, texts[0], 5)
    assert_counts("20 21", texts[1], 9)


@pytest.mark.case(18)
def test_wrong_dtype_is_refused(client: PeerClient) -> None:
    client.send(input_ids=np.array([[1]], dtype=np.uint64))
    with pytest.raises(Exception, match="input_ids"):
        next(client.responses())


@pytest.mark.case(56)
def test_duplicate_id_is_refused_and_the_first_goes_on(
    server: ServeProcess, client: PeerClient
) -> None:
    client.send("twin", text_input=PROMPT, max_tokens=7000, stream=True)
    answer = client.answer()
    text = next(answer)["text_output"].item().decode()
    with PeerClient(server.grpc_url) as other:
        other.send("twin", text_input="50 51", max_tokens=5)
        with pytest.raises(Exception, match="still being processed"):
            next(other.responses())
    length = len(text) + 50
    while len(text) < length:
        text += next(answer)["text_output"].item().decode()
    assert_counts_in_part(PROMPT, text + client.stop_all("twin")["twin"], 7000)


@pytest.mark.contract(
    "tensorrt_llm parameter", "batch_scheduler_policy max_tokens_in_paged_kv_cache"
)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.case(78, 113)
def test_200_streams_count_without_a_gap_with_a_quarter_of_the_kv_they_need(
    serve: ServeFactory, policy: str, tmp_path: Path
) -> None:
    """... and the recording of it replays identically and can be drawn."""
    num_streams, num_tokens = 200, 64
    recording = tmp_path / "recording.jsonl"
    tokens_each = 32 * -(-(num_tokens + 12) // 32)
    settings = {
        "batch_scheduler_policy": policy,
        "tokens_per_block": "32",
        "max_tokens_in_paged_kv_cache": str(num_streams * tokens_each // 4),
        "max_batch_size": str(num_streams),
        "record_file": str(recording),
    }
    server = serve(settings=settings)
    prompts = [f"{10 * i + 1} {10 * i + 2} {10 * i + 3}" for i in range(num_streams)]
    texts = dict.fromkeys(prompts, "")
    with PeerClient(server.grpc_url) as client, PeerClient(server.grpc_url) as feed:
        feed.open_feed()
        for prompt in prompts:
            client.send(prompt, text_input=prompt, max_tokens=num_tokens, stream=True)
        num_open = num_streams
        for request_id, outputs, is_final in client.responses():
            if "text_output" in outputs:
                texts[request_id] += outputs["text_output"].item().decode()
            num_open -= is_final
            if num_open == 0:
                break
        stats = feed.statistics_so_far()
    for prompt, text in texts.items():
        assert_counts(prompt, text, num_tokens)
    num_blocks = stats[0]["Max KV cache blocks"]
    # Without eviction a request holds room for tokens to come, which is not used yet.
    assert max(each["Used KV cache blocks"] for each in stats) > 0.75 * num_blocks
    assert max(each["Active Request Count"] for each in stats) > num_streams // 2
    assert (sum(each["Paused Requests"] for each in stats) > 0) == (policy == "max_utilization")
    counters = [each["Iteration Counter"] for each in stats]
    assert counters == list(range(counters[0], counters[0] + len(stats)))
    assert stats_of(server)["Used KV cache blocks"] == 0
    server.stop()
    assert "identical" in run_inflight("replay", recording)
    picture = tmp_path / "timeline.svg"
    run_inflight("timeline", recording, "-o", picture)
    assert picture.read_text(encoding="utf-8").startswith("<svg")
