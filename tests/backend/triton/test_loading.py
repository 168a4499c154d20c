"""What is told of a model while it loads, and of one that cannot be loaded."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from support.triton_harness import Server
from support.triton_stub import CountingEngine, FakePbUtils

from inflight_backend.manager import gpt_manager
from inflight_backend.status import read_status
from inflight_backend.triton import model as triton_model


@pytest.fixture(autouse=True)
def _no_parent_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end this test run when its terminal closes; it has a test of its own."""
    monkeypatch.setattr(triton_model, "exit_with_parent", lambda model: None)


def test_it_beats_while_it_loads_and_the_watchdog_beats_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a hung load would look like a slow one, and a dead watchdog like a living one."""
    names: list[set[str]] = []

    def note(*args: object) -> CountingEngine:
        names.append({thread.name for thread in threading.enumerate()})
        return CountingEngine()

    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    monkeypatch.setattr(gpt_manager, "load_engine", note)
    server = Server(tmp_path, CountingEngine())
    names.append({thread.name for thread in threading.enumerate()})
    server.model.finalize()
    assert ["LoadingBeat" in each for each in names] == [True, False]
    assert "Watchdog" in names[1]


def test_load_failure_is_one_line_in_the_status_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    with pytest.raises(RuntimeError, match="max_beam_width"):
        Server(tmp_path, CountingEngine(), max_beam_width="65")
    status = read_status(tmp_path / "status.json")
    assert status is not None
    assert status.phase == "failed"
    assert "max_beam_width" in status.fields["error"]
