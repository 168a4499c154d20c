"""The commands of the README do what it says, against a real server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.server_process import ServeProcess

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def readme_command(start: str) -> str:
    """The one command of the README that begins with ``start``, continuation lines joined."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(rf"^{re.escape(start)}[^#&\n]*", text, re.MULTILINE)
    return str(command).strip()


def run(command: str, server: ServeProcess) -> str:
    """What a shell prints; the ports of the README become those of the test's server."""
    command = command.replace("localhost:8000", server.http_url.removeprefix("http://"))
    if command.startswith("inflight "):
        command = f"{Path(sys.executable).parent}/{command} --url {server.grpc_url}"
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout


def test_generate(server: ServeProcess) -> None:
    output = run(readme_command('inflight generate "1 2 3"'), server)
    assert output.strip().startswith("4 5 6 7 8 9 10 11")


def test_curl(server: ServeProcess) -> None:
    output = run(readme_command("curl -N"), server)
    pieces = re.findall(r'"text_output":"([^"]*)"', output)
    assert len(pieces) > 1
    assert "".join(pieces).strip().startswith("4 5 6 7 8 9 10 11")


def test_stop(server: ServeProcess) -> None:
    generate = readme_command('inflight generate "7 8 9"')
    command = f"{Path(sys.executable).parent}/{generate} --url {server.grpc_url}"
    process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.read(20)
    run(readme_command("inflight stop"), server)
    rest = process.stdout.read()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    numbers = (first + rest).split()[:-1]
    assert numbers == [str(10 + i) for i in range(len(numbers))]
    assert len(numbers) < 1800  # 8000 tokens would be more
