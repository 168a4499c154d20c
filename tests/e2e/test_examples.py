"""The programs of examples/, against a real server. (`own_scheduler` is in tests/test_docs.py.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.front_process import FrontProcess
from support.server_process import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stream(server: ServeProcess) -> None:
    assert run("stream", "1 2 3", server.grpc_url).strip().startswith("4 5 6 7 8 9 10 11")


def test_stop(server: ServeProcess) -> None:
    output = run("stop", server.grpc_url)
    assert output.strip().startswith("4 5 6 7 8 9 10 11")
    assert output.endswith("\nstopped\n")
    assert len(output.split()) < 1000  # 4000 tokens would be more


def test_chat(server: ServeProcess, tmp_path: Path) -> None:
    with FrontProcess(tmp_path, server.grpc_url) as front:
        assert run("chat", f"{front.url}/v1").strip()
