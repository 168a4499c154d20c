"""Chores and the watch over the parent process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import ids_of, wait_until
from support.triton_stub import CountingEngine, FakeSender

from inflight_backend.triton.watchdog import PeriodicTask, PeriodicTasks
from inflight_server.serve.settings import DEMO_MODEL

WAIT = 30.0
TESTS = Path(__file__).parents[2]


def test_a_task_that_raises_is_tried_again_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told twice: the third try succeeds, and the one after that does not."""
    num_tries = 0
    tried_often, other_ran = threading.Event(), threading.Event()

    def fail() -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 6:
            tried_often.set()
        if num_tries != 3:
            raise RuntimeError("a task")

    tasks = [PeriodicTask(fail, 0.01), PeriodicTask(other_ran.set, 60.0)]
    periodic_tasks = PeriodicTasks(tasks, is_busy=lambda: True)
    assert tried_often.wait(WAIT)
    assert other_ran.wait(WAIT)
    periodic_tasks.close()
    assert caplog.text.count("a housekeeping task failed") == 2


def test_tasks_rest_while_no_request_is_there() -> None:
    """Behind the last request each runs once more; the next request wakes them."""
    requests: set[int] = set()
    seen: list[bool] = []  # of the task that rests: was a request there?
    idle_ran = threading.Semaphore(0)

    def look() -> None:
        seen.append(bool(requests))
        if len(seen) == 5:
            requests.clear()

    tasks = [PeriodicTask(look, 0.001), PeriodicTask(idle_ran.release, 0.01, idle_period=0.01)]
    periodic_tasks = PeriodicTasks(tasks, is_busy=lambda: bool(requests))
    for _ in range(5):
        assert idle_ran.acquire(timeout=WAIT)
    assert seen == [False], "once, when it was made"
    requests.add(1)
    periodic_tasks.wake()
    wait_until(lambda: len(seen) == 6)
    for _ in range(20):
        assert idle_ran.acquire(timeout=WAIT)
    periodic_tasks.close()
    assert seen == [False, True, True, True, True, False]


def test_a_request_that_has_ended_already_is_seen_to_at_once() -> None:
    """One that was refused counts among the errors; nothing is in flight when a task looks."""
    num_runs = 0

    def count() -> None:
        nonlocal num_runs
        num_runs += 1

    periodic_tasks = PeriodicTasks([PeriodicTask(count, 0.001)], is_busy=lambda: False)
    wait_until(lambda: num_runs == 1)
    periodic_tasks.wake()
    wait_until(lambda: num_runs == 2)
    periodic_tasks.close()


class MuteSender(FakeSender):
    """Triton does not say whether its client has gone."""

    def is_cancelled(self) -> bool:
        raise RuntimeError("shm full")


@pytest.mark.case(67)
def test_a_stream_that_cannot_be_asked_hides_nobody_who_leaves(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = CountingEngine(
        num_blocks=9000, max_seq_len=9000, before_step=lambda batch: time.sleep(0.002)
    )
    server = make_server(engine, cancellation_check_period_ms="10")
    mute, leaving = MuteSender(), FakeSender()
    for sender in (mute, leaving):
        server.send(sender=sender, input_ids=[1], request_output_len=700, streaming=True)
        assert sender.has_response.wait(WAIT)
    leaving.cancelled = True
    assert leaving.is_final.wait(WAIT)
    assert not mute.is_final.is_set()
    assert mute.is_final.wait(WAIT)
    assert ids_of(mute) == list(range(2, 702))
    assert caplog.text.count("whether a client has gone") == 1


WATCHER = "from inflight_backend.process_guard import exit_with_parent; exit_with_parent('m')"
# As Triton does it; that `tensorrt_llm` does so too is seen in tests/e2e/test_supervision.py.
ADDED_MODEL = f"""
import importlib, json, sys
from support.triton_stub import FakePbUtils
sys.modules["triton_python_backend_utils"] = FakePbUtils
module = importlib.import_module("inflight_backend.triton_models.%s")
parameters = {{"gpt_model_path": {{"string_value": {str(DEMO_MODEL)!r}}}}}
has_tokenizer = not module.__name__.endswith(".bls")
config = json.dumps({{"parameters": parameters if has_tokenizer else {{}}}})
module.TritonPythonModel().initialize({{"model_config": config, "model_name": "added"}})
"""
ADDED_MODELS = ("preprocessing", "postprocessing", "bls", "vllm")


@pytest.mark.case(124)
@pytest.mark.parametrize(
    "code", [WATCHER, *(ADDED_MODEL % name for name in ADDED_MODELS)], ids=["itself", *ADDED_MODELS]
)
def test_a_process_ends_soon_after_its_parent(code: str) -> None:
    """The parent starts a child that would sleep for a minute, and is gone."""
    child = f"{code}\nimport time; print('watching', flush=True); time.sleep(60)"
    parent = (
        "import subprocess, sys;"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE);"
        "assert p.stdout.readline(); print(p.pid)"
    )
    result = subprocess.run(
        [sys.executable, "-c", parent],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    pid = int(result.stdout)
    deadline = time.monotonic() + WAIT
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    if is_alive(pid):
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the child outlived its parent")


def is_alive(pid: int) -> bool:
    """False also for a zombie: an orphan that nobody has reaped yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
