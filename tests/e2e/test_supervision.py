"""Processes that die, hang or fail: open streams end with an error, and soon others are served."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from e2e.conftest import ServeFactory
from support.calls import assert_counts, stream_text
from support.server_process import HOST, MODEL, TRITONSERVER, ServeProcess, start_serve

from inflight_client import InflightClient, StreamInterrupted, grpc_transport
from inflight_openai.triton_client import TritonClient
from inflight_server.serve.repository import OPTIONAL_MODELS
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "1 2 3 4"
BLS = "tensorrt_llm_bls"
ENDLESS = 8000
NOTICE_SECONDS = 10.0  # 2 s are the aim; the soak measures them, tests share two cores
RECOVER_SECONDS = 120.0  # 4 s on a machine that does nothing else


def grpc_text(running: ServeProcess, max_tokens: int) -> Iterator[str]:
    with InflightClient(running.grpc_url) as client:
        for chunk in client.stream(PROMPT, max_tokens):
            yield chunk.text


def drained(stream: Iterator[str]) -> tuple[BaseException | None, float]:
    """How a stream ended, and when."""
    try:
        for _ in stream:
            pass
    except Exception as error:
        return error, time.monotonic()
    return None, time.monotonic()


class OpenStreams:
    """A stream over each protocol and one through each model of ``added``, with its first token
    here and a reader of its own."""

    def __init__(
        self, running: ServeProcess, pool: ThreadPoolExecutor, added: Sequence[str] = ()
    ) -> None:
        streams = [grpc_text(running, ENDLESS), stream_text(running, PROMPT, ENDLESS)]
        streams += [stream_text(running, PROMPT, ENDLESS, model=model) for model in added]
        for stream in streams:
            assert next(stream)
        self._readers: list[Future[tuple[BaseException | None, float]]] = [
            pool.submit(drained, stream) for stream in streams
        ]

    def assert_ended_with_an_error(self, since: float, within: float) -> None:
        for reader in self._readers:
            error, at = reader.result(timeout=within + 30)
            assert error is not None, "a stream ended as if its answer were complete"
            assert at - since < within


def assert_serves(running: ServeProcess) -> None:
    assert_counts(PROMPT, "".join(stream_text(running, PROMPT, 40)), 40)


def assert_holds_a_stream(recording: Path) -> None:
    """The file is a quarter of a second behind; a process that was killed may leave half a line."""
    header, *lines, _ = recording.read_text().split("\n")
    assert "inflight_recording" in header
    assert any("a" in json.loads(line) for line in lines), "a stream was open for a while"


def wait_for(running: ServeProcess, condition: Callable[[], bool]) -> None:
    """Until it is true; a process that is not found yet is a ``ValueError``."""
    deadline = time.monotonic() + RECOVER_SECONDS
    while time.monotonic() < deadline:
        with suppress(ValueError):
            if condition():
                return
        time.sleep(0.002)
    raise AssertionError(running.stderr)


def wait_until_recorded(running: ServeProcess, recording: Path) -> None:
    """Until an iteration is in the file, which is a quarter of a second behind."""
    wait_for(running, lambda: recording.read_bytes().count(b"\n") >= 3)


def wait_until_ready_again(running: ServeProcess, times: int) -> None:
    def is_ready() -> bool:
        assert running.process.poll() is None, running.stderr
        return running.stderr.count("ready again") >= times

    wait_for(running, is_ready)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.case(90, 119, 120)
def test_killed_processes_are_replaced_until_the_checkpoint_is_gone(
    serve: ServeFactory, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """As often as they are killed, but not for a checkpoint that is gone."""
    recording, checkpoint = tmp_path / "recording.jsonl", tmp_path / "checkpoint"
    shutil.copytree(DEMO_MODEL, checkpoint)
    running = serve(
        model=checkpoint,
        options=["--max-restarts=1", f"--add={BLS}"],
        settings={"record_file": str(recording)},
    )
    before = running.shared_memory()
    assert before
    kills: list[Callable[[], None]] = [
        running.kill_model,
        lambda: running.kill_model(model=BLS),
    ]
    for number, kill in enumerate(kills, start=1):
        streams = OpenStreams(running, pool, added=[BLS])
        wait_until_recorded(running, recording)
        killed = time.monotonic()
        kill()
        streams.assert_ended_with_an_error(killed, NOTICE_SECONDS)
        wait_until_ready_again(running, number)
        assert_serves(running)
        after = running.shared_memory()
        assert len(after) == len(before)
        assert_holds_a_stream(recording.with_name("recording.jsonl.1"))
    assert recording.with_name("recording.jsonl.2").exists()
    streams = OpenStreams(running, pool, added=[BLS])
    (checkpoint / "config.json").unlink()
    killed = time.monotonic()
    running.kill_tritonserver()
    streams.assert_ended_with_an_error(killed, NOTICE_SECONDS)
    assert running.wait() == 1
    *_, last = running.error_lines
    assert last.startswith("error: giving up after 1 failed start, last: ")
    assert "the model process died: killed by SIGKILL (--verbose shows its log)" in running.stderr
    assert f"the process of {BLS} died: killed by SIGKILL (--verbose" in running.stderr
    assert "starting again now (failure 1)" in running.stderr
    assert "starting again in 2 s (failure 3)" in running.stderr
    assert "(killed by SIGKILL)" in running.stderr


@pytest.mark.case(88, 119)
def test_what_hangs_is_replaced(serve: ServeFactory, pool: ThreadPoolExecutor) -> None:
    """The model process; that of tritonserver is in test_vitals.py and in the soak."""
    running = serve(settings={"stall_seconds": 1})
    streams = OpenStreams(running, pool)
    began = time.monotonic()
    running.kill_model(signal.SIGSTOP)
    wait_until_ready_again(running, 1)
    streams.assert_ended_with_an_error(began, RECOVER_SECONDS)
    assert "the model process was silent for" in running.stderr
    assert_serves(running)


@pytest.mark.case(88, 119)
def test_a_model_that_hangs_while_it_loads_again_is_replaced(serve: ServeFactory) -> None:
    """Whatever made the first one hang may do the same to the next; test_vitals.py has each way."""
    running = serve(settings={"stall_seconds": 1}, options=["--load-seconds=25"])
    first = running.pid_of(MODEL)
    running.kill_model()
    second = wait_for_another_model(running, first)
    os.kill(second, signal.SIGSTOP)
    wait_until_ready_again(running, 1)
    assert re.search(r"loading has stood still|the model process was silent for", running.stderr)
    assert running.pid_of(MODEL) not in (first, second)
    assert_serves(running)


@pytest.mark.case(119)
def test_a_first_load_that_a_signal_ends_is_begun_again(serve: ServeFactory) -> None:
    """As Triton's own aborts do on a busy machine."""
    running = serve(wait_for="starting tritonserver")
    wait_for(running, lambda: bool(running.pid_of(MODEL)))  # it is loading by then
    running.kill_tritonserver(signal.SIGABRT)
    running.wait_until_printed("inflight is ready")
    assert "tritonserver ended (killed by SIGABRT)" in running.stderr
    assert "starting again now (failure 1)" in running.stderr
    assert_serves(running)


def wait_for_another_model(running: ServeProcess, first: int) -> int:
    """The process of the next model, which has just started."""
    wait_for(running, lambda: running.pid_of(MODEL) != first)
    return running.pid_of(MODEL)


@pytest.mark.case(124)
def test_nothing_outlives_a_launcher_that_was_killed(
    serve: ServeFactory, pool: ThreadPoolExecutor
) -> None:
    """And the next run removes its files and its shared memory, as the fixture sees.

    A process that calls Triton at that moment may be stuck there with Python's lock, since the
    server died with a lock in their shared memory.
    """
    running = serve(options=[f"--add={model}" for model in OPTIONAL_MODELS])
    streams = OpenStreams(running, pool, added=[BLS])
    killed = time.monotonic()
    running.process.kill()
    running.wait_until_gone(NOTICE_SECONDS)
    streams.assert_ended_with_an_error(killed, NOTICE_SECONDS)
    assert running.shared_memory()
    following = start_serve(running.scratch)
    following.wait_until_printed("starting tritonserver")
    assert following.stop() == 0


@contextmanager
def held(pid: int) -> Iterator[None]:
    """The process is stopped for the length of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def is_well_for_the_front(running: ServeProcess) -> bool:
    client = TritonClient(running.grpc_url, timeout=NOTICE_SECONDS)
    try:
        return await client.is_ready()
    finally:
        await client.close()


def test_a_stream_from_a_machine_that_is_gone_ends_with_an_error(
    serve: ServeFactory, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No packet says that a machine has lost its power: a server that is frozen says as little.
    (Five minutes, outside of tests: servers take more frequent questions for abuse.)"""
    monkeypatch.setattr(grpc_transport, "_KEEPALIVE_MS", 500)
    monkeypatch.setattr(grpc_transport, "_KEEPALIVE_TIMEOUT_MS", 500)
    running = serve()
    stream = grpc_text(running, ENDLESS)
    assert next(stream)
    with held(running.process.pid), held(running.pid_of(TRITONSERVER)):
        error, _ = pool.submit(drained, stream).result(NOTICE_SECONDS)
    assert isinstance(error, StreamInterrupted)


@pytest.mark.case(88)
def test_a_loop_that_is_stuck_ends_its_streams_itself(serve: ServeFactory) -> None:
    """And is not ready, whatever Triton says, until it is replaced."""
    running = serve(
        settings={"stall_seconds": 1, "scheduler_class": "support.user_schedulers:StuckAt13"},
        environment={"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )
    stream = stream_text(running, PROMPT, ENDLESS)
    assert next(stream)
    began = time.monotonic()
    with (
        held(running.process.pid),  # so that there is time to look
        InflightClient(running.grpc_url) as client,
        InflightClient(f"{HOST}:{running.http_port}", protocol="http") as http_client,
    ):
        assert client.health()
        with pytest.raises(RuntimeError, match="the server makes no progress"):
            list(stream_text(running, PROMPT, 13))
        with pytest.raises(RuntimeError, match="the server makes no progress"):
            list(stream)
        assert time.monotonic() - began < 1 + NOTICE_SECONDS
        assert not client.health()
        assert not http_client.health()
        assert not asyncio.run(is_well_for_the_front(running))
    wait_until_ready_again(running, 1)
    assert "the model is not healthy: the server makes no progress" in running.stderr
    assert_serves(running)
