"""Set up before any test module is imported."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import scheduler  # noqa: F401 - the folder: later benchmarks/scheduler.py could be found in its place

# Triton reads this when any module first imports it: without a GPU, kernels run on the CPU in the
# tests. (A machine that shows its GPU in another place sets it to 0.)
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the servers: they share the cores

# A shell's background jobs ignore Ctrl-C, and whatever they start does too: tests of it would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The largest pieces of work: with several processes they start first, so that no process waits for
# another's at the end.
_FIRST = (
    "e2e",
    "test_compile.py",
    "test_benchmarks.py",
    "engine",
    "kernels",
)


@pytest.fixture(scope="session", autouse=True)
def own_addresses() -> None:
    """Processes that run tests side by side are no models of one tritonserver, though siblings."""
    from inflight_backend.triton import relay_wire as relay_socket

    relay_socket._VERSION = f"tests {os.getpid()}"


def pytest_configure() -> None:
    """No deadline for the examples of a property, and none for making them up: how long that takes
    is a fact of the machine. In CI the same examples each time: a landing shall fail only for what
    it brings, and new ones are looked for on the machines of developers."""
    with suppress(ImportError):
        from hypothesis import HealthCheck, settings

        too_slow = [HealthCheck.too_slow]
        settings.register_profile(
            "tests",
            deadline=None,
            suppress_health_check=too_slow,
            derandomize="CI" in os.environ,
        )
        settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with ``@pytest.mark.fast(n)`` all cases but the first n are slow. In a process that
    shares the tests with others the largest pieces come first."""
    num_cases: Counter[str] = Counter()
    for item in items:
        num_cases[name := item.nodeid.partition("[")[0]] += 1
        mark = item.get_closest_marker("fast")
        if mark is not None and num_cases[name] > mark.args[0]:
            item.add_marker("slow")

    def rank(item: pytest.Item) -> int:
        places = [place for place, name in enumerate(_FIRST) if name in item.path.parts]
        return min(places, default=len(_FIRST))

    if hasattr(config, "workerinput"):
        items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Where tests interpret kernels: faster."""
    if "triton.runtime.interpreter" in sys.modules:
        from support.interpreter import patch_once_per_launch

        patch_once_per_launch()


@pytest.hookimpl(optionalhook=True)  # a GPU machine may lack pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: who runs which tests."""
    from support.distribution import Distribution

    return Distribution(config, log)
