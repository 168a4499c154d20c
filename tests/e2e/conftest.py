"""The real server for the tests of this folder: one that all share, and one of their own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.server_process import ServeProcess, start_serve, temporary_folder

ServeFactory = Callable[..., ServeProcess]
"""`start_serve` without the folder; returns when the server is ready, or when it has ended."""


@pytest.fixture(scope="session")
def server() -> Iterator[ServeProcess]:
    """``inflight serve`` with the demo model; stopping it must be clean."""
    scratch = temporary_folder("shared")
    running = start_serve(scratch)
    try:
        running.wait_until_printed("inflight is ready")
        yield running
    finally:
        code = running.stop()
    assert code == 0, running.stderr
    running.assert_clean()
    shutil.rmtree(scratch)


@pytest.fixture
def serve() -> Iterator[ServeFactory]:
    """A factory of servers with own settings; each must end cleanly, however it ends."""
    started: list[tuple[Path, ServeProcess]] = []

    def start(*, wait_for: str = "inflight is ready", **arguments: object) -> ServeProcess:
        scratch = temporary_folder("own")
        running = start_serve(scratch, **arguments)  # type: ignore[arg-type]
        started.append((scratch, running))
        if wait_for:
            running.wait_until_printed(wait_for)
        return running

    yield start
    for scratch, running in started:
        running.stop()
        running.assert_clean()
        shutil.rmtree(scratch)
