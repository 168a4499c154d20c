"""The contract on the real server, with a bare tritonclient as tensorrtllm_backend's users have it.

The demo model counts, so a lost, doubled or foreign token is a gap in the count.
"""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tokenizers import Tokenizer

from inflight_protocol import INPUT_BY_NAME
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = pytest.mark.e2e

WAIT = 60.0


class PeerClient:
    """One gRPC stream, used like `inflight_batcher_llm_client.py` of tensorrtllm_backend."""

    def __init__(self, url: str, model: str = "tensorrt_llm") -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._model = model
        self._results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(callback=lambda result, error: self._results.put((result, error)))

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.stop_stream(cancel_requests=True)  # a feed would never end by itself
        self._client.close()

    def send(self, request_id: str = "", **values: Any) -> None:
        """Send tensors with the batch dimension; numpy arrays go as they are.

        A stop comes with the parameter of the original.
        """
        inputs = []
        for name, value in values.items():
            dtype = "BYTES" if INPUT_BY_NAME[name].dtype == "STRING" else INPUT_BY_NAME[name].dtype
            array = value if isinstance(value, np.ndarray) else _to_array(dtype, value)
            tensor = grpcclient.InferInput(name, list(array.shape), dtype)
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        self._client.async_stream_infer(
            self._model,
            inputs,
            request_id=request_id,
            parameters={"Streaming": True} if "stop" in values else None,
            enable_empty_final_response=True,
        )

    def responses(self) -> Iterator[tuple[str, dict[str, Any], bool]]:
        """(request id, outputs, is final) in order of arrival; an error raises."""
        while True:
            result, error = self._results.get(timeout=WAIT)
            if error is not None:
                raise error
            response = result.get_response()
            outputs = {out.name: result.as_numpy(out.name) for out in response.outputs}
            yield response.id, outputs, response.parameters["triton_final_response"].bool_param

    def open_feed(self) -> None:
        """Ask for statistics, of all iterations from now on.

        Requests of another connection may overtake the feed; a question behind it does not.
        """
        self.send("feed", stats=True)
        self.send("question", stats=True, streaming=False)
        for request_id, _, is_final in self.responses():
            if request_id == "question" and is_final:
                return

    def statistics_so_far(self) -> list[dict[str, Any]]:
        """What a feed of statistics has brought until now; then it is cancelled."""
        stats: list[dict[str, Any]] = []
        while not self._results.empty():
            result, error = self._results.get()
            assert error is None, error
            stats += [json.loads(text) for text in result.as_numpy("stats").reshape(-1)]
        self._client.stop_stream(cancel_requests=True)
        return stats

    def ask(self, request_id: str = "", **values: Any) -> list[int]:
        """All output ids of one request."""
        self.send(request_id, **values)
        ids: list[int] = []
        for _, outputs, is_final in self.responses():
            ids += outputs["output_ids"].reshape(-1).tolist() if "output_ids" in outputs else []
            if is_final:
                return ids
        raise AssertionError("unreachable")


def _to_array(dtype: str, value: Any) -> np.ndarray[Any, Any]:
    if dtype == "BYTES":
        return np.array([[value]], dtype=np.object_)
    kinds = {"INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32, "UINT64": np.uint64}
    return np.asarray(value, dtype=kinds[dtype]).reshape(1, -1)


@pytest.fixture
def client(server: Any) -> Iterator[PeerClient]:
    with PeerClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def stats_of(server: Any) -> dict[str, Any]:
    url = f"http://{server.http_url.removeprefix('http://')}/v2/models/tensorrt_llm/generate"
    answer = httpx.post(url, json={"stats": True, "streaming": False}, timeout=WAIT).json()
    stats: dict[str, Any] = json.loads(answer["stats"])
    return stats


def assert_counts(text: str, first: int, num_tokens: int) -> None:
    """At least ``num_tokens`` of an answer that counts up from ``first``."""
    assert len(text) >= num_tokens
    numbers = text.split()[:-1]  # the last number may be cut by the token limit
    assert numbers == [str(first + i) for i in range(len(numbers))]


def run_inflight(*arguments: object) -> str:
    """What a command prints; it must succeed."""
    command = [str(Path(sys.executable).parent / "inflight"), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.contract("tensorrt_llm input", "input_ids streaming")
@pytest.mark.contract("tensorrt_llm output", "output_ids sequence_length")
@pytest.mark.contract("tensorrt_llm of the LLM API input", "streaming")
def test_tokens_stream_from_tensorrt_llm(client: PeerClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1 2 3").ids
    client.send(
        "stream",
        input_ids=ids,
        input_lengths=len(ids),
        request_output_len=40,
        streaming=True,
        end_id=1,
        pad_id=1,
        beam_width=1,
        temperature=1.0,
        runtime_top_k=1,
        runtime_top_p=0.0,
        repetition_penalty=1.0,
        random_seed=0,
    )
    answer: list[int] = []
    for request_id, outputs, is_final in client.responses():
        assert request_id == "stream"
        if outputs:
            assert outputs["output_ids"].shape == (1, 1, outputs["sequence_length"].item())
            answer += outputs["output_ids"].reshape(-1).tolist()
        if is_final:
            break
    assert len(answer) == 40
    assert_counts(tokenizer.decode(answer), 4, 40)


def test_whole_answer_includes_the_prompt_unless_excluded(
    client: PeerClient, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("7 8").ids
    values: dict[str, Any] = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 12}
    whole = client.ask(**values)
    assert whole[: len(ids)] == ids
    assert client.ask(**values, exclude_input_in_output=True) == whole[len(ids) :]


@pytest.mark.contract("tensorrt_llm input", "seed")
@pytest.mark.case(30)
def test_seeded_sampling_repeats_whatever_runs_beside_it(
    server: Any, client: PeerClient, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("hello").ids
    values: dict[str, Any] = {
        "input_ids": ids,
        "request_output_len": 30,
        "streaming": True,
        "temperature": 3.0,
        "runtime_top_k": 100,
        "seed": 2**64 - 1,
    }
    alone = client.ask(**values)
    with PeerClient(server.grpc_url) as other:
        for i in range(5):
            other.send(f"other {i}", input_ids=ids * (i + 1), request_output_len=200)
        assert client.ask(**values) == alone
    assert client.ask(**{**values, "seed": 1}) != alone


@pytest.mark.contract("tensorrt_llm input", "min_length")
def test_min_length_holds_the_end_back(client: PeerClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1 2 3").ids
    free = client.ask(input_ids=ids, request_output_len=20, streaming=True)
    end_id = free[3]
    values: dict[str, Any] = {
        "input_ids": ids,
        "request_output_len": 20,
        "streaming": True,
        "end_id": end_id,
    }
    assert client.ask(**values) == free[: free.index(end_id)]
    assert len(client.ask(**values, min_length=15)) >= 15


@pytest.mark.case(73)
def test_the_next_request_may_come_on_the_same_stream(client: PeerClient) -> None:
    """After an answer, after an error and after a stop; with the same id."""
    values = {"input_lengths": 1, "request_output_len": 5, "streaming": True}
    first = client.ask("again", input_ids=[20], **values)
    with pytest.raises(Exception, match="'request_output_len' is 0"):
        client.ask("again", input_ids=[20], input_lengths=1, request_output_len=0)
    client.send("again", text_input="1 2 3", max_tokens=7000, stream=True)
    next(client.responses())
    client.send("again", input_ids=[0], stop=True)
    finals = (is_final for _, _, is_final in client.responses() if is_final)
    assert [next(finals), next(finals)] == [True, True], "the stopped one and the stop"
    assert client.ask("again", input_ids=[20], **values) == first


@pytest.mark.contract("tensorrt_llm input", "stop")
@pytest.mark.contract("tensorrt_llm of the LLM API input", "stop")
@pytest.mark.case(66)
def test_stop_by_id_ends_a_stream_and_gives_its_blocks_back(
    server: Any, client: PeerClient
) -> None:
    client.send("to stop", text_input="1 2 3", max_tokens=7000, stream=True)
    text = ""
    for _, outputs, is_final in client.responses():
        text += outputs["text_output"].item().decode() if "text_output" in outputs else ""
        assert not is_final
        if len(text) > 100:
            break
    iteration = stats_of(server)["Iteration Counter"]
    with PeerClient(server.grpc_url) as other:  # the stop comes over another connection
        other.send("to stop", input_ids=[0], input_lengths=0, request_output_len=0, stop=True)
        request_id, outputs, is_final = next(other.responses())
        assert (request_id, outputs, is_final) == ("to stop", {}, True)
    for _, outputs, is_final in client.responses():
        text += outputs["text_output"].item().decode() if "text_output" in outputs else ""
        if is_final:
            break
    assert "text_output" in outputs, "the final response of a stopped request is an ordinary one"
    assert_counts(text, 4, 1)
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
def test_cancelling_a_stream_frees_its_blocks(server: Any) -> None:
    client = grpcclient.InferenceServerClient(server.grpc_url)
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(callback=lambda result, error: arrived.put(result))
    text = grpcclient.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"1 2 3"]], dtype=np.object_))
    limit = grpcclient.InferInput("max_tokens", [1, 1], "INT32")
    limit.set_data_from_numpy(np.array([[7000]], dtype=np.int32))
    stream = grpcclient.InferInput("stream", [1, 1], "BOOL")
    stream.set_data_from_numpy(np.array([[True]]))
    client.async_stream_infer("tensorrt_llm", [text, limit, stream])
    arrived.get(timeout=WAIT)
    client.stop_stream(cancel_requests=True)
    deadline = time.monotonic() + 10
    while (used := stats_of(server)["Used KV cache blocks"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert used == 0
    client.close()


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
    ({"text_input": "1", "lora_task_id": 7}, "'lora_task_id' is not supported by this server"),
    ({"text_input": "1", "repetition_penalty": 0.0}, "'repetition_penalty' is 0"),
    ({"input_ids": np.ones((65, 3), np.int32)}, "batch-size must be <= 64"),
    ({"input_ids": np.ones(3, np.int32)}, r"unexpected shape|batch-size must be <= 1"),
]


@pytest.mark.parametrize(("values", "message"), BAD_REQUESTS)
@pytest.mark.case(1, 3, 4, 8, 9, 14, 15, 16, 19, 20, 21, 23, 25, 27, 41, 123)
def test_bad_input_is_refused_by_name_and_disturbs_nobody(
    server: Any, client: PeerClient, values: dict[str, Any], message: str
) -> None:
    client.send("bystander", text_input="1 2 3", max_tokens=60, stream=True)
    with PeerClient(server.grpc_url) as other:
        other.send("bad", **values)
        with pytest.raises(Exception, match=message) as caught:
            next(other.responses())
    assert not re.search(r"/|Traceback|\.py", str(caught.value).replace("input_ids", ""))
    text = ""
    for _, outputs, is_final in client.responses():
        text += outputs["text_output"].item().decode() if "text_output" in outputs else ""
        if is_final:
            break
    assert_counts(text, 4, 60)


@pytest.mark.case(20)
def test_rows_of_one_request_are_told_apart(client: PeerClient) -> None:
    client.send(
        "rows",
        text_input=np.array([["1 2 3"], ["20 21"]], np.object_),
        max_tokens=np.array([[5], [9]], np.int32),
        stream=np.array([[True], [True]]),
    )
    texts = {0: "", 1: ""}
    for _, outputs, is_final in client.responses():
        if outputs:
            texts[outputs["batch_index"].item()] += outputs["text_output"].item().decode()
        if is_final:
            break
    assert_counts(texts[0], 4, 5)
    assert_counts(texts[1], 22, 9)


@pytest.mark.case(18)
def test_wrong_dtype_is_refused(client: PeerClient) -> None:
    wrong = grpcclient.InferInput("input_ids", [1, 1], "INT64")
    wrong.set_data_from_numpy(np.array([[1]], dtype=np.int64))
    client._client.async_stream_infer("tensorrt_llm", [wrong])
    with pytest.raises(Exception, match="input_ids"):
        next(client.responses())


@pytest.mark.case(56)
def test_duplicate_id_is_refused_and_the_first_goes_on(server: Any, client: PeerClient) -> None:
    client.send("twin", text_input="1 2 3", max_tokens=7000, stream=True)
    text = next(client.responses())[1]["text_output"].item().decode()
    with PeerClient(server.grpc_url) as other:
        other.send("twin", text_input="50 51", max_tokens=5)
        with pytest.raises(Exception, match="still being processed"):
            next(other.responses())
    length = len(text) + 100
    for _, outputs, is_final in client.responses():
        assert not is_final
        text += outputs["text_output"].item().decode() if "text_output" in outputs else ""
        if len(text) > length:
            break
    assert_counts(text, 4, length)


@pytest.mark.contract(
    "tensorrt_llm parameter", "batch_scheduler_policy max_tokens_in_paged_kv_cache"
)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.case(78, 113)
def test_200_streams_count_without_a_gap_with_a_quarter_of_the_kv_they_need(
    serve: Any, policy: str, tmp_path: Path
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
    texts = dict.fromkeys(map(str, range(num_streams)), "")
    with PeerClient(server.grpc_url) as client, PeerClient(server.grpc_url) as feed:
        feed.open_feed()
        for i in range(num_streams):
            prompt = f"{10 * i + 1} {10 * i + 2} {10 * i + 3}"
            client.send(str(i), text_input=prompt, max_tokens=num_tokens, stream=True)
        num_open = num_streams
        for request_id, outputs, is_final in client.responses():
            if "text_output" in outputs:
                texts[request_id] += outputs["text_output"].item().decode()
            num_open -= is_final
            if num_open == 0:
                break
        stats = feed.statistics_so_far()
    for i in range(num_streams):
        assert_counts(texts[str(i)], 10 * i + 4, num_tokens)
    num_blocks = stats[0]["Max KV cache blocks"]
    # Who is never evicted has room for tokens to come, which nobody uses yet.
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
