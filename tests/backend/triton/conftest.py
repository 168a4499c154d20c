"""A loaded model for the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import CountingEngine, FakePbUtils
from triton_harness import Server

from inflight_backend import gpt_manager, triton_model

MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeServer]:
    """A factory of `Server`; unloads what it made."""
    monkeypatch.setattr(triton_model, "exit_with_parent", lambda period: None)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    made: list[Server] = []

    def make(engine: CountingEngine, **parameters: str) -> Server:
        monkeypatch.setattr(gpt_manager, "load_engine", lambda *args: engine)
        made.append(Server(tmp_path, engine, **parameters))
        return made[-1]

    yield make
    for server in made:
        server.model.finalize()
