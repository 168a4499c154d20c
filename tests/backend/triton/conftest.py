"""A loaded model for the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.triton_harness import Gate, Server, write_number_tokenizer
from support.triton_stub import CountingEngine, FakePbUtils

from inflight_backend.manager import gpt_manager
from inflight_backend.triton import model as triton_model
from inflight_backend.triton_models import relay_client, text_base

MakeServer = Callable[..., Server]


@pytest.fixture(autouse=True)
def unwatched_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded here does not end this process with whoever runs the tests."""
    for module in (triton_model, relay_client, text_base):
        monkeypatch.setattr(module, "exit_with_parent", lambda model: None)


@pytest.fixture(autouse=True)
def no_turns_of_an_idle_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loop is not woken for would never be seen here."""
    monkeypatch.setattr(gpt_manager, "TURN_SECONDS", 3600.0)


@pytest.fixture
def make_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeServer]:
    """A factory of `Server`; unloads what it made."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    made: list[Server] = []

    def make(engine: CountingEngine, **options: Any) -> Server:
        monkeypatch.setattr(gpt_manager, "load_engine", lambda *args: engine)
        made.append(Server(tmp_path, engine, **options))
        return made[-1]

    yield make
    for server in made:
        server.model.finalize()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """The hook of the engine of `server`."""
    gate = Gate()
    yield gate
    gate.set()


@pytest.fixture
def tokenizer(tmp_path: Path) -> None:
    """One whose words are numbers, for the models that are loaded here."""
    write_number_tokenizer(tmp_path)


@pytest.fixture
def server(make_server: MakeServer, tokenizer: None, gate: Gate) -> Iterator[Server]:
    """A model that counts, with a tokenizer."""
    yield make_server(CountingEngine(before_step=gate))
    gate.set()
