"""The metrics by themselves, and of requests that wait or fail; more of a server's is in
`test_triton_model`."""

from __future__ import annotations

import json
import math
import threading
import time
from datetime import datetime
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import Gate, values_of, wait_until
from support.triton_stub import CountingEngine, FakePbUtils, FakeResponse, FakeSender

from inflight_backend import errors as errors_module
from inflight_backend.triton.metrics import TritonMetrics
from inflight_protocol import ERRORS, OUTPUT_LENGTHS
from inflight_protocol.metrics import SUCCESSES
from inflight_scheduler import ScheduledBatch


def test_the_time_stamp_is_right_in_the_hour_that_comes_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An alert compares it with now."""
    monkeypatch.setattr(FakePbUtils, "families", {})
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")  # Berlin's; its name needs a package
    time.tzset()
    try:
        metrics = TritonMetrics(FakePbUtils, "tensorrt_llm", "1")
        for now in (1792888200.0, 1792891800.0):  # 2:30 of 25 October 2026, and an hour later
            monkeypatch.setattr("inflight_backend.triton.metrics.time.time", lambda now=now: now)
            stamp = datetime.fromtimestamp(now).strftime("%m-%d-%Y %H:%M:%S")
            assert stamp == "10-25-2026 02:30:00"
            metrics._last_values.clear()  # or nothing has changed
            metrics.update(json.dumps({"Timestamp": stamp}))
            assert shown("nv_trt_llm_general_metrics", "general_type=timestamp") == now
    finally:
        monkeypatch.undo()
        time.tzset()


def test_gateways_read_the_same_numbers_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePbUtils, "families", {})
    metrics = TritonMetrics(
        FakePbUtils,
        "tensorrt_llm",
        "1",
        served_name="llama",
        cache_config={"block_size": 32, "num_gpu_blocks": 90},
    )
    stats = {"Scheduled Requests": 3, "Waiting Requests": 5, "Fraction used KV cache blocks": 0.25}
    metrics.update(json.dumps(stats))
    assert shown("nv_trt_llm_request_metrics", "request_type=waiting") == 5
    values = {
        name: family.values
        for name, family in FakePbUtils.families.items()
        if name.startswith("vllm:") and family.kind == "gauge"
    }
    own = "model_name=llama,version=1"
    assert values == {
        "vllm:num_requests_running": {own: 3},
        "vllm:num_requests_waiting": {own: 5},
        "vllm:kv_cache_usage_perc": {own: 0.25},
        "vllm:gpu_cache_usage_perc": {own: 0.25},
        "vllm:cache_config_info": {"model_name=llama,block_size=32,num_gpu_blocks=90": 1},
    }


def test_a_draft_model_has_none_of_the_numbers_that_gateways_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of its target have the same labels, if their folders have the same name."""
    monkeypatch.setattr(FakePbUtils, "families", {})
    metrics = TritonMetrics(FakePbUtils, "tensorrt_llm_draft", "1", is_draft=True)
    counts = {SUCCESSES.name: {"length": 1}, ERRORS.name: {"INTERNAL": 1}}
    metrics.update(json.dumps({"Scheduled Requests": 3}), [(1, 2)], counts)
    assert counted()["INTERNAL"] == 1
    assert not [name for name in FakePbUtils.families if name.startswith("vllm:")]


def shown(family: str, label: str) -> float | None:
    return FakePbUtils.families[family].values.get(f"model=tensorrt_llm,version=1,{label}")


def counted() -> dict[str, float]:
    """Errors by code; `server` is not the first model of this process."""
    values = FakePbUtils.families[ERRORS.name].values
    return {label.rpartition("=")[2]: number for label, number in values.items()}


def test_requests_that_end_with_an_error_are_counted_by_its_code(
    make_server: MakeServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton counts them as successes."""

    failing = threading.Event()

    def before_step(batch: ScheduledBatch) -> None:
        gate(batch)
        if failing.is_set():
            raise RuntimeError("a bug")

    monkeypatch.setattr(FakePbUtils, "families", {})
    server = make_server(CountingEngine(before_step=before_step))
    prompt: dict[str, Any] = {"input_ids": [1], "request_output_len": 3}
    for _ in range(2):
        server.ask(**prompt, temperature=-1.0)
    server.ask(**prompt, lora_task_id=5)
    failing.set()
    server.ask(**prompt)
    failing.clear()
    gate.clear()
    first = server.send("same", **prompt)
    wait_until(lambda: server.model._manager.get_num_active_requests() == 1)
    server.ask("same", **prompt)
    server.ask(**prompt, max_queue_time_ms=1)
    gate.set()
    assert first.is_final.wait(10)
    server.ask("gone", stop=True)
    expected = {
        "INVALID_ARG": 2,
        "UNSUPPORTED": 1,
        "INTERNAL": 1,
        "ALREADY_EXISTS": 1,
        "UNAVAILABLE": 1,
    }
    wait_until(lambda: counted() == expected)


class LookingSender(FakeSender):
    """Notes what the page says when Triton is handed the last response, which a client may read at
    once: how many answers and errors it counts, and how many requests are active."""

    def __init__(self, page: list[tuple[int, float, float | None]]) -> None:
        super().__init__()
        self._page = page

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        if flags:
            num_answers = len(FakePbUtils.families[OUTPUT_LENGTHS.name].observed)
            active = shown("nv_trt_llm_request_metrics", "request_type=active")
            self._page.append((num_answers, sum(counted().values()), active))
        super().send(response, flags)


def test_the_page_tells_of_a_request_before_its_client_hears_that_it_has_ended(
    tokenizer: None, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePbUtils, "families", {})
    server = make_server(CountingEngine(), stats_check_period_ms="60000")
    prompt: dict[str, Any] = {"input_ids": [4], "request_output_len": 20}
    asked: list[tuple[dict[str, Any], int, int]] = [
        (prompt, 1, 0),
        (prompt | {"streaming": True}, 1, 0),
        (prompt | {"stop_words": ["9 10"], "streaming": True}, 1, 0),
        (prompt | {"temperature": -1.0}, 0, 1),
        (prompt | {"num_return_sequences": 3}, 3, 0),
        (prompt | {"stop_token_ids": [9]}, 1, 0),
    ]
    page: list[tuple[int, float, float | None]] = []
    expected = []
    num_answers = num_errors = 0
    for values, answers, errors in asked:
        sender = server.send(sender=LookingSender(page), **values)
        assert sender.is_final.wait(10)
        num_answers, num_errors = num_answers + answers, num_errors + errors
        expected.append((num_answers, num_errors, 0))
    assert page == expected


def test_an_unloaded_model_has_counted_all_and_tells_no_time(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton shows for ever what it leaves, and counts on from there when it is loaded again."""
    monkeypatch.setattr(FakePbUtils, "families", {})
    server = make_server(CountingEngine(), stats_check_period_ms="60000")
    wait_until(lambda: shown("nv_trt_llm_general_metrics", "general_type=timestamp") is not None)
    server.ask(input_ids=[1], request_output_len=3)
    server.ask(input_ids=[1], request_output_len=3, temperature=-1.0)
    server.model.finalize()
    assert FakePbUtils.families["nv_llm_output_token_len"].observed == [3]
    assert counted() == {"INVALID_ARG": 1}
    assert shown("nv_trt_llm_general_metrics", "general_type=iteration_counter") == 3
    assert shown("nv_trt_llm_request_metrics", "request_type=active") == 0
    assert math.isnan(shown("nv_trt_llm_general_metrics", "general_type=timestamp") or 0.0)


@pytest.mark.slow
def test_what_a_model_loaded_before_leaves_on_the_page_does_not_stay(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton ends it when this one is there, and here nothing changes."""
    monkeypatch.setattr("inflight_backend.triton.metrics._REPEAT_SECONDS", 0.05)
    monkeypatch.setattr(FakePbUtils, "families", {})
    make_server(CountingEngine(num_blocks=24))
    place = ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type=free")
    wait_until(lambda: shown(*place) == 24)
    FakePbUtils.families[place[0]].values[f"model=tensorrt_llm,version=1,{place[1]}"] = 7
    wait_until(lambda: shown(*place) == 24)


def test_every_code_has_its_metric() -> None:
    kinds = [each for each in vars(errors_module).values() if isinstance(each, type)]
    codes = {each.code for each in kinds if issubclass(each, errors_module.ServingError)}
    assert codes == set(ERRORS.values)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_the_tokens_of_answers_are_counted_as_their_clients_count_them(
    tokenizer: None, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    """A stop word in the text counts, an end does not, nor what the engine has drawn behind either
    before it was told to stop."""
    monkeypatch.setattr(FakePbUtils, "families", {})
    server = make_server(CountingEngine())
    endings: list[tuple[dict[str, Any], int]] = [
        ({"stop_words": ["9 10"]}, 6),  # 5 6 7 8 9 10
        ({"stop_words": ["7 8", "nix"], "num_return_sequences": 3}, 3 * 4),
        ({"stop_words": ["6"], "stop_words_list": [[7], [1]]}, 2),
        ({"stop_words_list": [[7], [1]]}, 3),
        ({"stop_words": ["8"], "end_id": 7}, 2),
        ({"stop_token_ids": [9, 7]}, 2),
        ({"stop_words": ["nix"]}, 200),
    ]
    for ending, num_tokens in endings:
        sender = server.ask(
            outputs=("text_output", "sequence_length", "sequence_index"), input_ids=[4],
            request_output_len=200, streaming=is_streaming, exclude_input_in_output=True, **ending,
        )  # fmt: skip
        assert sender.responses[-1].error is None, sender.responses[-1].error
        assert sum(values_of(sender, "sequence_length")) == num_tokens, ending
    counts = FakePbUtils.families[OUTPUT_LENGTHS.name]
    wait_until(lambda: len(counts.observed) == len(endings) + 2)
    assert sorted(counts.observed) == sorted([6, 4, 4, 4, 2, 3, 2, 2, 200])
