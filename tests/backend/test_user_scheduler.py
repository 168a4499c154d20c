"""A user's scheduler decides; a bad one is overruled and nothing is lost."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import CountingEngine
from manager_harness import WAIT, Recorder, request, running
from user_schedulers import BadChunks, EveryOtherTime, Greedy, Lazy, OneAtATime, Raises

from inflight_backend.commands.common import scheduler_maker
from inflight_backend.errors import ConfigurationError
from inflight_backend.optional_params import TrtGptModelOptionalParams
from inflight_backend.user_scheduler import find_scheduler_class
from inflight_scheduler.recording.files import open_recording
from inflight_scheduler.recording.history import build_history
from inflight_scheduler.recording.replay import replay


def params_for(scheduler: type) -> TrtGptModelOptionalParams:
    return TrtGptModelOptionalParams(
        max_batch_size=8, scheduler_class=f"{scheduler.__module__}:{scheduler.__name__}"
    )


def test_the_users_scheduler_decides() -> None:
    recorder = Recorder([request(i, [100 * i], 30 - i) for i in range(1, 6)])
    finished: list[int] = []
    recorder.on_response = lambda i, is_final: finished.append(i) if is_final else None
    engine = CountingEngine()
    with running(recorder, engine, params=params_for(OneAtATime)):
        recorder.wait_for_finals(*range(1, 6))
    assert finished == [5, 4, 3, 2, 1]
    assert max(len(b.context_chunks) + len(b.generation_slots) for b in engine.batches) == 1


@pytest.mark.parametrize("scheduler", [Raises, Greedy, Lazy, BadChunks])
@pytest.mark.case(98)
def test_a_bad_scheduler_is_overruled_with_one_warning(  # case 98
    scheduler: type, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder([request(i, [100 * i], 30) for i in range(1, 7)])
    engine = CountingEngine(num_blocks=16, tokens_per_block=4)
    with (
        caplog.at_level(logging.WARNING),
        running(recorder, engine, params=params_for(scheduler)),
    ):
        recorder.wait_for_finals(*range(1, 7))
    for i in range(1, 7):
        assert recorder.tokens(i) == list(range(100 * i + 1, 100 * i + 31))
    warnings = [record for record in caplog.records if "takes over" in record.message]
    assert len(warnings) == 1
    assert recorder.stats[-1]["Used KV cache blocks"] == 0


def record_with(scheduler: type, path: Path) -> dict[str, Any]:
    """Three requests; what is said of the second when the first one has its third token."""
    recorder = Recorder()
    params = replace(params_for(scheduler), record_file=str(path))
    engine = CountingEngine(num_blocks=20, tokens_per_block=4)
    answers: list[Future[dict[str, Any]]] = []
    with running(recorder, engine, params=params) as manager:
        recorder.on_response = lambda i, is_final: (
            answers.append(manager.why(2))
            if i == 1 and not answers and len(recorder.tokens(1)) > 2
            else None
        )
        recorder.pending = [request(i, [100 * i], 30 + i) for i in range(1, 4)]
        recorder.wait_for_finals(1, 2, 3)
    return answers[0].result(WAIT)


def reasons_in(path: Path) -> set[str]:
    with open_recording(path) as reader:
        rows = build_history(reader).rows
    return {span.first_reason for row in rows for span in row.spans if span.first_reason}


def test_whoever_is_left_out_hears_the_numbers(tmp_path: Path) -> None:
    """From `why`, and in a picture, which does not need the class."""
    answer = record_with(OneAtATime, tmp_path / "r.jsonl")
    text = "left out by the scheduler OneAtATime: needs 1 KV blocks, free 19; 1 of 8 places"
    assert answer["reason"].startswith(f"{text} and 1 of 256 tokens are taken")
    assert (answer["code"], answer["place"], answer["num_waiting"]) == ("left_out", 1, 2)
    assert (answer["needed"], answer["available"], answer["num_requests"]) == (1, 19, 1)
    reasons = reasons_in(tmp_path / "r.jsonl")
    assert all(reason.startswith("left out by the scheduler OneAtATime") for reason in reasons)
    assert any(text in reason for reason in reasons)


def test_where_the_default_took_over_its_reasons_count(tmp_path: Path) -> None:
    """Room for two of three: the refused scheduler is not blamed."""
    answer = record_with(Raises, tmp_path / "r.jsonl")
    assert answer["state"] == "generation"
    reasons = reasons_in(tmp_path / "r.jsonl")
    assert reasons
    assert not any("left out" in reason for reason in reasons)
    assert any(reason.startswith("paused as victim of request") for reason in reasons)


def test_asking_why_does_not_ask_the_users_scheduler(tmp_path: Path) -> None:
    """One that counts its calls would decide otherwise afterwards, and no replay would agree."""
    record_with(EveryOtherTime, tmp_path / "r.jsonl")
    name = f"{EveryOtherTime.__module__}:{EveryOtherTime.__name__}"
    with open_recording(tmp_path / "r.jsonl") as reader:
        result = replay(reader, scheduler_maker(name))
    assert result.divergence is None, str(result)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "must have the form package.module:ClassName"),
        ("no_such_module:Scheduler", "No module named 'no_such_module'"),
        ("json:NoSuchClass", "has no attribute 'NoSuchClass'"),
        ("json:JSONDecoder", "is not a RequestScheduler"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_scheduler_class(name)
