"""SGLang's router and Dynamo's KV indexer as processes, from their wheels (load-tools.txt)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from support import load_tools
from support.server_process import HOST, START_SECONDS, free_ports

# What its wheel calls launch_router needs a web framework for a debugging mode.
_PROGRAM = """
import json, sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
Router.from_args(RouterArgs(**json.loads(sys.argv[1]))).start()
"""


class RouterProcess:
    """One run in front of ``urls``; ``options`` are fields of its `RouterArgs`."""

    def __init__(self, folder: Path, urls: Sequence[str], **options: Any) -> None:
        port, metrics_port = free_ports(2)
        self.url = f"http://{HOST}:{port}"
        self._num_workers = len(urls)
        self._log = folder / "router.log"
        settings = {
            "worker_urls": list(urls),
            "host": HOST,
            "port": port,
            "prometheus_port": metrics_port,
            "worker_startup_check_interval": 1,
            **options,
        }
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(settings)],
                env=os.environ | {"PYTHONPATH": str(load_tools.ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What it has logged so far."""
        return self._log.read_text()

    def workers(self) -> list[dict[str, Any]]:
        """The servers that it has found to be well."""
        try:
            answer = httpx.get(f"{self.url}/workers", trust_env=False)
        except httpx.TransportError:
            return []
        return [each for each in answer.json()["workers"] if each["is_healthy"]]

    def wait_until_ready(self) -> RouterProcess:
        """Return when it has found all servers well."""
        deadline = time.monotonic() + START_SECONDS
        while len(self.workers()) < self._num_workers:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)
        return self

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


@contextmanager
def dynamo_indexer() -> Iterator[httpx.Client]:
    """Calls of Dynamo's standalone indexer."""
    [port] = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"],
        env=os.environ | {"PYTHONPATH": str(load_tools.ROOT)},
    )
    try:
        with httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False) as http:

            def is_there() -> bool:
                assert process.poll() is None
                try:
                    return http.get("/workers").is_success
                except httpx.TransportError:
                    return False

            wait_until(is_there, START_SECONDS)
            yield http
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Return when ``condition`` is true; fail if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
