"""Real servers for the tests of this folder: two that all share, and one of their own."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.server_process import ServeProcess, start_serve, temporary_folder

ServeFactory = Callable[..., ServeProcess]
"""`start_serve` without the folder; returns when the server is ready, or when it has ended."""

OTHER_SETTINGS = {
    "max_batch_size": 2,
    "max_queue_size": 3,
    "max_num_tokens": 64,
    "enable_chunked_context": "true",
    "context_chunking_policy": "equal_progress",
    "context_chunk_unit": 16,
    "max_beam_width": 3,
    "speculative_decoding_mode": "ngram",
    "max_draft_len": 6,
}


def _start(*, wait_for: str = "inflight is ready", **arguments: Any) -> ServeProcess:
    running = start_serve(temporary_folder("serve"), **arguments)
    if wait_for:
        running.wait_until_printed(wait_for)
    return running


@pytest.fixture(scope="session")
def shared() -> Iterator[ServeFactory]:
    """A factory of servers that end with the session, side by side; stopping them must be clean."""
    started: list[ServeProcess] = []

    def start(**arguments: Any) -> ServeProcess:
        started.append(_start(**arguments))
        return started[-1]

    yield start
    for running in started:
        running.process.send_signal(signal.SIGTERM)
    for running in started:
        assert running.wait() == 0, running.stderr
        running.assert_clean()
        shutil.rmtree(running.scratch)


@pytest.fixture(scope="session")
def server(shared: ServeFactory) -> ServeProcess:
    """``inflight serve`` with the demo model, and nothing set."""
    return shared()


@pytest.fixture(scope="session")
def other_server(shared: ServeFactory) -> ServeProcess:
    """As `server` with `OTHER_SETTINGS`: beams, drafts, prompts in chunks, and two places."""
    return shared(settings=OTHER_SETTINGS)


@pytest.fixture
def serve() -> Iterator[ServeFactory]:
    """A factory of servers with own settings; each must end cleanly, however it ends."""
    started: list[ServeProcess] = []

    def start(**arguments: Any) -> ServeProcess:
        started.append(_start(**arguments))
        return started[-1]

    yield start
    for running in started:
        running.stop()
        running.assert_clean()
        shutil.rmtree(running.scratch)
