"""The other end of a worker: its process, its answers in time, and its end in any case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from peer_parts.work import Budget

_WORKER = Path(__file__).resolve().parent / "worker.py"


class PeerError(Exception):
    """An engine is missing, failed, or took too long; the text says which."""


class Worker:
    """One engine's process, in a process group of its own, so that its children end with it. All of
    them are stopped while they are not asked: one that looks for work would slow down the others.
    """

    def __init__(
        self,
        name: str,
        budget_json: str,
        env: Mapping[str, str],
        log: Path,
        python: str = sys.executable,
    ) -> None:
        """Start it with that ``python``; `facts` waits for it. What it prints goes to ``log``."""
        self.name = name
        self._log = log
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [python, str(_WORKER), name, budget_json],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=dict(env),
                start_new_session=True,
            )
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def facts(self, timeout: float) -> dict[str, Any]:
        """What it says of itself once it is ready."""
        facts: dict[str, Any] = self._answer(timeout)["facts"]
        return facts

    def ask(
        self, prompts: list[list[int]], output_lens: list[int], timeout: float
    ) -> dict[str, Any]:
        """One run; the fields of `Done`."""
        work = json.dumps({"prompts": prompts, "output_lens": output_lens})
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(work + "\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerError(f"its process is gone: {self._tail()}") from None
        return self._answer(timeout)

    def stop(self) -> None:
        """End its process group; returns when it is gone, and its memory with it."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(timeout, 0.1))
        except Empty:
            raise PeerError(f"no answer within {timeout:.0f} s") from None
        if not line:
            raise PeerError(f"its process ended: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        self._signal(signal.SIGSTOP)
        return answer

    def _tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace").strip()[-400:]


def start_worker(name: str, budget: Budget, log: Path, python: str) -> Worker:
    """A worker in this environment, of the Python of a virtual environment of its own."""
    env = {**os.environ, "PYTHONPATH": str(_WORKER.parents[1])}
    return Worker(name, budget.to_json(), env, log, python)
