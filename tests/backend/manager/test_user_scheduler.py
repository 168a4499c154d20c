"""A user's scheduler decides; a refused decision is replaced and no request is lost."""

from __future__ import annotations

import io
import logging
import re
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.manager_harness import BOTH_LOOPS, WAIT, Recorder, request, running, serve
from support.triton_stub import CountingEngine
from support.user_schedulers import (
    AsksForMore,
    BadChunks,
    CutsAnyway,
    CutsContexts,
    EveryOtherTime,
    Exits,
    ExitsWhenMade,
    FirstOne,
    FirstTwo,
    GenerationAlone,
    Greedy,
    Lazy,
    OneAtATime,
    OwnParts,
    PausesAll,
    Raises,
    RaisesAtFirst,
    ShortestFits,
    TakesOut,
    ThreeAtOnce,
    WholeContexts,
)

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.batcher import Batcher
from inflight_backend.manager.parameters import (
    OverlapScheduler,
    TrtGptModelOptionalParams,
)
from inflight_backend.manager.step_loop import StepLoop
from inflight_backend.manager.user_scheduler import find_scheduler_class
from inflight_recorder.replay import replay
from inflight_recorder.storage import RecordingReader, open_recording
from inflight_recorder.timeline import build_timeline
from inflight_scheduler import (
    BlockForecast,
    BlockManager,
    CapacityScheduler,
    CapacitySchedulerPolicy,
    LlmRequest,
)
from inflight_server.commands.recordings import scheduler_maker


def params_for(scheduler: type) -> TrtGptModelOptionalParams:
    return TrtGptModelOptionalParams(
        max_batch_size=8, scheduler_class=f"{scheduler.__module__}:{scheduler.__name__}"
    )


@BOTH_LOOPS
def test_user_scheduler_may_change_the_list_it_is_given(
    overlap: OverlapScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    engine, params = CountingEngine(), replace(params_for(TakesOut), overlap_scheduler=overlap)
    serve([request(i, [100 * i], 30 - i) for i in range(1, 7)], engine, params=params)
    assert "takes over" not in caplog.text
    assert max(len(b.context_chunks) + len(b.generation_slots) for b in engine.batches) == 3


@BOTH_LOOPS
@pytest.mark.parametrize(
    "scheduler",
    [
        Raises,
        Exits,
        Greedy,
        Lazy,
        BadChunks,
        PausesAll,
        CutsAnyway,
    ],
)
@pytest.mark.case(98)
def test_bad_scheduler_is_overruled_with_one_warning(
    scheduler: type, overlap: OverlapScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder([request(i, [7, 8, 100 * i], 30) for i in range(1, 7)])
    engine = CountingEngine(num_blocks=17, tokens_per_block=4)
    params = replace(
        params_for(scheduler),
        enable_chunked_context=False,
        overlap_scheduler=overlap,
    )
    with caplog.at_level(logging.WARNING), running(recorder, engine, params=params):
        recorder.wait_for_finals(*range(1, 7))
    for i in range(1, 7):
        assert recorder.tokens(i) == list(range(100 * i + 1, 100 * i + 31))
    warnings = [record for record in caplog.records if "takes over" in record.message]
    assert len(warnings) == 1
    assert recorder.stats[-1]["Used KV cache blocks"] == 0


def test_message_of_our_own_error_in_a_user_scheduler_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = replace(params_for(WholeContexts), enable_chunked_context=True)
    serve(
        [request(1, [7] * 30, 3), request(2, [8], 3)],
        CountingEngine(max_num_tokens=16),
        params=params,
    )
    (warning,) = [record for record in caplog.records if "takes over" in record.message]
    assert "request 1: a context of 30 tokens exceeds max_num_tokens=16" in warning.message
    assert "micro_batch.py" in (warning.exc_text or "")


def test_docs_name_existing_members() -> None:
    page = (Path(__file__).parents[3] / "docs/scheduling.md").read_text(encoding="utf-8")
    table, _, books = page.partition("| member of the block manager |")[2].partition(
        "`BlockForecast("
    )
    names = re.findall(r"`(\w+)(?:\(request[\w.]*\))?`", table.partition("\nCount from")[0])
    assert len(names) == 9
    assert all(hasattr(BlockManager, name) for name in names)
    made = BlockForecast(BlockManager(8, 4))
    for name in re.findall(r"`(\w+)(?:\([\w, ]+\))?`", books.partition("). In")[0]):
        assert hasattr(made, name)


def record_with(scheduler: type, path: Path) -> dict[str, Any]:
    """Serve three requests; return `why` of the second at the third token of the first."""
    recorder = Recorder()
    params = replace(params_for(scheduler), record_file=str(path))
    engine = CountingEngine(num_blocks=20, tokens_per_block=4)
    answers: list[Future[dict[str, Any]]] = []
    with running(recorder, engine, params=params) as manager:
        recorder.when(1, 3, lambda: answers.append(manager.why(2)))
        recorder.pending = [request(i, [100 * i], 30 + i) for i in range(1, 4)]
        recorder.wait_for_finals(1, 2, 3)
    return answers[0].result(WAIT)


def reasons_in(path: Path) -> set[str]:
    with open_recording(path) as reader:
        lanes = build_timeline(reader).lanes
    return {each.first_reason for lane in lanes for each in lane.intervals if each.first_reason}


@pytest.mark.parametrize("scheduler", [OneAtATime, FirstOne])
def test_request_that_is_left_out_is_told_the_numbers(scheduler: type, tmp_path: Path) -> None:
    """By `why`, and in a timeline, which does not need the class. The name of a capacity scheduler
    is its own, not that of what it is combined with."""
    answer = record_with(scheduler, tmp_path / "r.jsonl")
    name = f"left out by the scheduler {scheduler.__name__}"
    text = f"{name}: needs 1 KV blocks, free 19; 1 of 8 places"
    assert answer["reason"].startswith(f"{text} and 1 of 256 tokens are taken")
    assert (answer["code"], answer["place"], answer["num_waiting"]) == ("left_out", 1, 2)
    assert (answer["needed"], answer["available"], answer["num_requests"]) == (1, 19, 1)
    reasons = reasons_in(tmp_path / "r.jsonl")
    assert all(reason.startswith(name) for reason in reasons)
    assert any(text in reason for reason in reasons)


def test_reasons_are_those_of_the_default_when_it_took_over(tmp_path: Path) -> None:
    """There is room for two of three requests."""
    answer = record_with(Raises, tmp_path / "r.jsonl")
    assert answer["state"] == "generation"
    reasons = reasons_in(tmp_path / "r.jsonl")
    assert reasons
    assert not any("left out" in reason for reason in reasons)
    assert any(reason.startswith("paused as victim of request") for reason in reasons)


def test_why_does_not_call_the_user_scheduler(tmp_path: Path) -> None:
    """One that counts its calls would decide otherwise afterwards, and no replay would agree."""
    record_with(EveryOtherTime, tmp_path / "r.jsonl")
    name = f"{EveryOtherTime.__module__}:{EveryOtherTime.__name__}"
    with open_recording(tmp_path / "r.jsonl") as reader:
        result = replay(reader, scheduler_maker(name))
    assert result.divergence is None, str(result)


def test_why_changes_no_context_size_after_a_refused_decision() -> None:
    """The default explains by deciding, which cuts the third prompt; the user's next decision would
    run that chunk, and a replay, which explains nothing, the whole prompt."""
    engine = CountingEngine(max_num_tokens=16)
    params = replace(params_for(RaisesAtFirst), enable_chunked_context=True, context_chunk_unit=4)
    batcher = Batcher(engine, CapacitySchedulerPolicy.MAX_UTILIZATION, params)
    lengths = {1: 12, 2: 6, 3: 15}
    for request_id, length in lengths.items():
        new = LlmRequest(request_id, [request_id] * length, 8)
        batcher.active.add(new)
        batcher.recorder.arrived(new)

    def run_once() -> list[int]:
        outcome = steps.run_once()
        batcher.recorder.finish_iteration()
        return [len(chunk.tokens) for chunk in outcome.batch.context_chunks]

    steps = StepLoop(batcher)
    assert run_once() == [4, 12], "only the default cuts"
    assert batcher.explain() == {}, "the default would run all three, the third in part"
    assert run_once() == [15]
    reader = RecordingReader(io.BytesIO("".join(batcher.recorder.lines()).encode()), "ring")
    result = replay(reader, scheduler_maker(params.scheduler_class))
    assert result.divergence is None, str(result)


@BOTH_LOOPS
@pytest.mark.parametrize(
    ("scheduler", "most_requests"),
    [
        (FirstTwo, 2),
        (ShortestFits, 5),
        (ThreeAtOnce, 3),
        (GenerationAlone, 5),
        (OwnParts, 3),
        (CutsContexts, 5),
    ],
)
def test_every_kind_of_scheduler_plugs_in(
    scheduler: type,
    most_requests: int,
    overlap: OverlapScheduler,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Long prompts with a shared prefix, too many to run at once; then a replay."""
    params = replace(
        params_for(scheduler),
        max_batch_size=5,
        enable_chunked_context=scheduler is not OwnParts,
        overlap_scheduler=overlap,
        record_file=str(tmp_path / "r.jsonl"),
    )
    engine = CountingEngine(num_blocks=120, tokens_per_block=4, max_num_tokens=32)
    num_tokens = {i: 3 + i % 4 for i in range(1, 10)}
    prompts = {
        i: [*range(20), *([7] * 15 if params.enable_chunked_context else []), 10 * i]
        for i in num_tokens
    }
    recorder = Recorder([request(i, prompts[i], num_tokens[i]) for i in num_tokens])
    with caplog.at_level(logging.WARNING), running(recorder, engine, params=params):
        recorder.wait_for_finals(*num_tokens)
    for i, num in num_tokens.items():
        assert recorder.tokens(i) == list(range(10 * i + 1, 10 * i + 1 + num))
    assert "takes over" not in caplog.text
    sizes = [len(b.context_chunks) + len(b.generation_slots) for b in engine.batches]
    assert max(sizes) <= most_requests
    has_both = any(b.context_chunks and b.generation_slots for b in engine.batches)
    assert has_both != (scheduler is GenerationAlone)
    with open_recording(tmp_path / "r.jsonl") as reader:
        result = replay(reader, scheduler_maker(params.scheduler_class))
    assert result.divergence is None, str(result)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("nonsense", "", "must have the form package.module:ClassName"),
        ("..json:JSONDecoder", "", "must have the form package.module:ClassName"),
        ("no_such_module:Mine", "", "No module named 'no_such_module'"),
        ("broken:Mine", "", "has no attribute 'Mine'"),
        ("json:JSONDecoder", "", "is none of RequestScheduler, CapacityScheduler, MicroBatchSch"),
        ("broken:Mine", "a = = 1", "cannot be imported: SyntaxError: invalid syntax"),
        ("broken:Mine", "raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    ],
)
def test_class_that_cannot_be_imported_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        find_scheduler_class(name)
    assert str(caught.value).startswith(f"scheduler_class = '{name}'")


@pytest.mark.parametrize("scheduler", [AsksForMore, CapacityScheduler, ExitsWhenMade])
def test_class_that_cannot_be_constructed_is_refused(scheduler: type) -> None:
    reason = "SystemExit: " if scheduler is ExitsWhenMade else "TypeError: "
    text = f"scheduler_class {scheduler.__name__} cannot be made: {reason}"
    with (
        pytest.raises(ConfigurationError, match=text),
        running(Recorder(), params=params_for(scheduler)),
    ):
        pass
