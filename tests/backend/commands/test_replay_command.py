"""`inflight replay` from the outside."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from backend.commands.harness import run
from manager_harness import Recorder, request, running

from inflight_backend.manager.optional_params import TrtGptModelOptionalParams
from inflight_server.commands.recordings import replay

PAGE = Path(__file__).parents[3] / "docs/scheduling.md"


def record(path: Path, scheduler_class: str | None = None) -> None:
    recorder = Recorder([request(i, [i], 4 * i) for i in range(1, 9)])
    params = TrtGptModelOptionalParams(
        max_batch_size=3, record_file=str(path), scheduler_class=scheduler_class
    )
    with running(recorder, params=params):
        recorder.wait_for_finals(*range(1, 9))


def test_identical_and_exit_code_zero(tmp_path: Path) -> None:
    record(tmp_path / "r.jsonl")
    done = run(replay, tmp_path / "r.jsonl")
    assert done.exit_code == 0
    assert done.stdout.startswith("identical, ")
    assert done.stdout.endswith(" iterations (8 requests, 0 pauses)\n")


def test_a_divergence_is_shown_and_exit_code_one(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path)
    path.write_text(path.read_text().replace('"max_batch_size":3', '"max_batch_size":2'))
    done = run(replay, path)
    assert done.exit_code == 1
    assert "differs in" in done.stdout
    assert "recorded: [" in done.stdout
    assert "recordings do not hold" not in done.stdout, "ours decides by nothing else"


def test_errors_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\x00\xff")
    done = run(replay, path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: r.jsonl, line 1: the line is cut off\n"


def test_the_scheduler_of_the_user_decides_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of the documentation; the recording alone does not load it."""
    code = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    module = types.ModuleType("own_scheduler")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "own_scheduler", module)
    name = "own_scheduler:ShortestFirst"
    record(tmp_path / "r.jsonl", name)
    refused = run(replay, tmp_path / "r.jsonl")
    assert refused.exit_code == 1
    assert "give it with --scheduler-class" in refused.stderr
    done = run(replay, tmp_path / "r.jsonl", "--scheduler-class", name)
    assert done.stdout.startswith("identical, ")
    other = run(replay, tmp_path / "r.jsonl", "--scheduler-class", "user_schedulers:FirstOne")
    assert other.exit_code == 1
    assert "differs in" in other.stdout
    assert "by deadlines, salts, adapters or texts decides otherwise here" in other.stdout


def test_a_scheduler_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    record(tmp_path / "r.jsonl")
    done = run(replay, tmp_path / "r.jsonl", "--scheduler-class", "user_schedulers:AsksForMore")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: scheduler_class AsksForMore cannot be made: ")
    assert done.stderr.count("\n") == 1
