"""Scheduling on the real server: salts, priorities, deadlines, V1, user code.

The demo model counts, so a lost, doubled or foreign token is a gap in the count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.conftest import ServeFactory
from support.calls import (
    PeerClient,
    assert_counts,
    assert_counts_in_part,
    stats_of,
    stream_text,
)
from support.server_process import ServeProcess
from tokenizers import Tokenizer

from inflight_client import InflightClient
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
WAIT = 60.0


def metrics_of(server: ServeProcess) -> str:
    return httpx.get(server.metrics_url, timeout=10, trust_env=False).text


def metric(page: str, label: str) -> float:
    """The value of the only metric with this label."""
    (value,) = re.findall(
        rf"^(?:nv_trt_llm|inflight)_\w+{{[^}}]*{label}[^}}]*}} (\S+)$", page, re.MULTILINE
    )
    return float(value)


class Collected:
    """The responses of one client's streams, by request id."""

    def __init__(self, client: PeerClient) -> None:
        self._responses = client.responses()
        self.texts: dict[str, str] = {}
        self.num_responses: dict[str, int] = {}
        self.finished: list[str] = []

    def until(self, is_enough: Callable[[], bool]) -> None:
        """Take responses until there is enough; an error raises."""
        while not is_enough():
            request_id, outputs, is_final = next(self._responses)
            text = outputs["text_output"].item().decode() if "text_output" in outputs else ""
            self.texts[request_id] = self.texts.get(request_id, "") + text
            self.num_responses[request_id] = self.num_responses.get(request_id, 0) + bool(outputs)
            if is_final:
                self.finished.append(request_id)

    def until_text(self, request_id: str, length: int) -> None:
        """Take responses until this one has so many characters."""
        self.until(lambda: len(self.texts.get(request_id, "")) >= length)


def stats_until(
    feed: PeerClient, is_enough: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """The statistics of a feed, one per iteration, until there are enough."""
    stats: list[dict[str, Any]] = []
    responses = feed.responses()
    while not is_enough(stats):
        _, outputs, _ = next(responses)
        stats += [json.loads(text) for text in outputs["stats"].reshape(-1)]
    return stats


def have_ended(num_requests: int) -> Callable[[list[dict[str, Any]]], bool]:
    """True for statistics with so many contexts that end with no active request."""

    def is_enough(stats: list[dict[str, Any]]) -> bool:
        num_contexts = sum(each["Context Requests"] for each in stats)
        return num_contexts >= num_requests and not stats[-1]["Active Request Count"]

    return is_enough


def test_same_prompt_reuses_blocks_and_another_salt_does_not(
    server: ServeProcess,
) -> None:
    """Over gRPC to one model and over HTTP to the other; the answer is always the same."""
    text = "salted: " + " ".join(str(number) for number in range(100, 126))
    codec = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    assert len(codec.encode(text).ids) == 112, "its fourth block is full once 16 more are computed"

    def num_reused_by(ask: Callable[[], str]) -> int:
        before = stats_of(server)["Reused KV cache blocks"]
        answers.append(ask())
        return int(stats_of(server)["Reused KV cache blocks"] - before)

    def ask(**options: Any) -> str:
        with InflightClient(server.grpc_url) as client:
            return client.generate(text, 24, **options).text

    answers: list[str] = []
    assert num_reused_by(lambda: ask(cache_salt="a")) == 0
    assert num_reused_by(lambda: ask(cache_salt="b")) == 0
    assert num_reused_by(lambda: ask(cache_salt="a")) == 4
    over_http = stream_text(server, text, 24, cache_salt="b")  # to the ensemble
    assert num_reused_by(lambda: "".join(over_http)) == 4
    assert num_reused_by(ask) <= 1, "other tests may have sent the first token"
    assert num_reused_by(ask) == 4
    assert set(answers) == {answers[0]}
    assert_counts("125", answers[0], 24)
    page = metrics_of(server)
    assert metric(page, 'kv_cache_block_type="reused"') >= 4
    assert 0 < metric(page, 'kv_cache_reuse_type="hit_rate"') < 1


def test_bad_values_are_refused_by_name(server: ServeProcess) -> None:
    refused: list[tuple[dict[str, object], str]] = [
        ({"priority": 1.5}, "'priority' is 1.5; it must be a finite number, 0..1"),
        ({"cache_salt": "x" * 257}, "'cache_salt' has 257 bytes, outside 1..256"),
        ({"max_queue_time_ms": 0}, "'max_queue_time_ms' is 0, outside 1..2147483647"),
    ]
    for model in ("tensorrt_llm", "ensemble"):
        for options, message in refused:
            with pytest.raises(RuntimeError, match=re.escape(message)):
                list(stream_text(server, "1 2 3", 5, model=model, **options))


def test_allotted_time_ends_an_answer_with_its_tokens(server: ServeProcess) -> None:
    pieces = stream_text(server, "1 2 3", 8000, model="tensorrt_llm", allotted_time_ms=300)
    assert_counts_in_part("1 2 3", "".join(pieces), 8000)
    assert stats_of(server)["Used KV cache blocks"] == 0


@pytest.mark.contract("tensorrt_llm parameter", "max_queue_size")
def test_priorities_deadlines_and_max_queue_size_apply_to_the_queue(
    other_server: ServeProcess,
) -> None:
    """Two places and a queue of three; long prompts run in chunks under another chunking policy."""
    server = other_server
    with PeerClient(server.grpc_url) as client, PeerClient(server.grpc_url) as other:
        seen = Collected(client)
        for name in ("runs", "runs too"):
            client.send(name, text_input="1 2 3", max_tokens=8000, stream=True)
            seen.until_text(name, 1)
        client.send("low", text_input="10 11 12", max_tokens=30, stream=True, priority=0.0)
        client.send("high", text_input="20 21 22", max_tokens=30, stream=True, priority=1.0)
        with InflightClient(server.grpc_url) as asking:
            while (why := asking.why("low")).get("num_waiting") != 2:
                assert why["state"] in ("queued", "not in flight")
        assert (why["state"], why["place"]) == ("queued", 2)
        other.send("late", text_input="30", max_tokens=30, stream=True, max_queue_time_ms=300)
        other.send("refused", text_input="40", max_tokens=30, stream=True, priority=1.0)
        errors = []
        for _ in range(2):
            with pytest.raises(Exception, match=r"queue|place") as caught:
                next(other.responses())
            errors.append(str(caught.value))
        client.send("runs", stop=True)
        seen.until(lambda: len(seen.finished) == 4)
        client.send("runs too", stop=True)
        seen.until(lambda: len(seen.finished) == 6)
        with PeerClient(server.grpc_url) as feed:
            feed.open_feed()
            prompt = " ".join(str(number) for number in range(100, 160))
            client.send("chunked", text_input=prompt, max_tokens=30, stream=True)
            seen.until(lambda: len(seen.finished) == 7)
            stats = stats_until(feed, have_ended(1))
    assert any("Maximum queue size of 3 has been reached" in error for error in errors)
    assert any(
        "not started before its deadline: place 2 of 3 in the queue, "
        "and all 2 places of max_batch_size are taken" in error
        for error in errors
    )
    # The acknowledgement of a stop, and the end.
    assert seen.finished == ["runs"] * 2 + ["high", "low"] + ["runs too"] * 2 + ["chunked"]
    assert_counts_in_part("3", seen.texts["runs"], 8000)
    for name, prompt in (("low", "12"), ("high", "22"), ("chunked", "159")):
        assert_counts(prompt, seen.texts[name], 30)
    chunks = [each["Total Context Tokens"] for each in stats if each["Total Context Tokens"]]
    assert len(chunks) >= 4
    assert max(chunks) <= 64


@pytest.mark.contract("tensorrt_llm parameter", "gpt_model_type")
@pytest.mark.contract("metric", "nv_trt_llm_v1_metrics")
@pytest.mark.slow
def test_v1_answers_in_lock_step_with_its_own_statistics(
    server: ServeProcess, serve: ServeFactory
) -> None:
    """The same text as with in-flight batching, in one piece although a stream was requested."""
    static = serve(settings={"gpt_model_type": "V1", "max_batch_size": 8})
    lengths = [10, 40, 70, 100] * 3
    prompts = [f"{50 * i} {50 * i + 1}" for i in range(len(lengths))]

    def in_flight(prompt: str, length: int) -> str:
        return "".join(stream_text(server, prompt, length))

    with ThreadPoolExecutor(len(prompts)) as pool:
        wanted = list(pool.map(in_flight, prompts, lengths))
    with PeerClient(static.grpc_url) as client, PeerClient(static.grpc_url) as feed:
        feed.open_feed()
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            client.send(
                str(i),
                text_input=prompt,
                max_tokens=length,
                stream=True,
                exclude_input_in_output=True,
            )
        seen = Collected(client)
        seen.until(lambda: len(seen.finished) == len(lengths))
        stats = stats_until(feed, have_ended(len(lengths)))
        page = metrics_of(static)
    assert [seen.texts[str(i)] for i in range(len(lengths))] == wanted
    assert set(seen.num_responses.values()) == {1}
    assert sum(each["Total Generation Tokens"] for each in stats) == sum(lengths) - len(lengths)
    assert max(each["Empty Generation Slots"] for each in stats) > 0
    for each in stats:
        assert 0 in (each["Total Context Tokens"], each["Total Generation Tokens"])
        assert not {"Generation Requests", "MicroBatch ID", "Paused Requests"} & set(each)
    assert "nv_trt_llm_v1_metrics{" in page
    for name in ("total_context_tokens", "total_generation_tokens", "empty_generation_slots"):
        assert metric(page, f'v1_specific_metric="{name}"') >= 0
    assert "nv_trt_llm_inflight_batcher_metrics" not in page


@pytest.mark.slow
def test_scheduler_and_processor_of_the_documentation_run_on_the_server(
    serve: ServeFactory, tmp_path: Path
) -> None:
    """examples/own_scheduler.py starts the shortest waiting request first; the code block of
    docs/sampling.md allows no token twice in a row."""
    code = (ROOT / "examples/own_scheduler.py").read_text(encoding="utf-8")
    (tmp_path / "my_module.py").write_text(code, encoding="utf-8")
    page = (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_logits.py").write_text(code, encoding="utf-8")
    server = serve(
        settings={
            "scheduler_class": "my_module:ShortestFirst",
            "logits_processors": "no-double=my_logits:no_double",
            "max_tokens_in_paged_kv_cache": 640,  # no two of these fit at once
        },
        environment={"PYTHONPATH": str(tmp_path)},
    )
    with PeerClient(server.grpc_url) as client:
        seen = Collected(client)
        client.send("first", text_input="1 2 3", max_tokens=600, stream=True)
        seen.until(lambda: bool(seen.texts))
        for name, max_tokens in (("long", 500), ("short", 330), ("middle", 400)):
            client.send(name, text_input="7 8 9", max_tokens=max_tokens, stream=True)
        for number, name in enumerate(("first", "short", "middle", "long"), start=1):
            seen.until_text(name, 20)
            assert sum(map(bool, seen.texts.values())) == number, "the others still wait"
            client.send(name, stop=True)
        seen.until(lambda: len(seen.finished) == 8)  # four stops and four ends
    for name, prompt in (("first", "3"), ("long", "9"), ("short", "9"), ("middle", "9")):
        assert_counts_in_part(prompt, seen.texts[name], 600)
