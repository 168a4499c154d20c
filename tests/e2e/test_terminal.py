"""`inflight chat`, `top` and `bench` over a real server."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.front_process import FrontProcess
from support.server_process import ServeProcess, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def front(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with FrontProcess(tmp_path_factory.mktemp("front"), server.grpc_url) as front:
        yield front


def run(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "inflight"), *arguments]
    return subprocess.run(
        command, input=typed, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )


def test_chat_into_a_pipe(front: FrontProcess, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = [
        "/set max_tokens 9",
        "/set temperature=0",
        "/set temprature 2",
        "1 2 \\",
        "3 4",
        '"""',
        "5 6 7",
        '"""',
        "/set top_p 7",
        "8 9",
        "/set top_p",
        "/system 1 2",
        f"/save {saved}",
        "/nonsense",
        "/quit",
        "never sent",
    ]
    done = run("chat", f"--url={front.url}/v1", typed="\n".join(lines))
    assert done.returncode == 1, done.stderr  # one was refused
    first, second = done.stdout.splitlines()
    assert first.strip().startswith("5 6")
    assert second.strip().startswith("8 9")
    assert done.stderr.count("[9 tokens") == 2
    assert "error: temprature cannot be set; there are" in done.stderr
    assert "error: top_p: " in done.stderr  # and what was refused is not in the conversation
    assert "error: /nonsense is no command; there are\n" in done.stderr
    assert "/save FILE" in done.stderr
    body = json.loads(saved.read_text())
    said = [(each["role"], each["content"]) for each in body["messages"]]
    assert said[0] == ("system", "1 2")
    assert said[1] == ("user", "1 2 \n3 4")
    assert said[3] == ("user", "5 6 7")
    assert [role for role, _ in said[1:]] == ["user", "assistant"] * 2
    assert (body["max_tokens"], "top_p" in body, "temprature" in body) == (9, False, False)


def read_until(terminal: int, text: str, seen: str = "") -> str:
    deadline = time.monotonic() + WAIT_SECONDS
    while text not in seen:
        assert time.monotonic() < deadline, seen
        with suppress(OSError):
            seen += os.read(terminal, 2**16).decode(errors="replace")
    return seen


def test_chat_on_a_terminal_stops_an_answer(front: FrontProcess, tmp_path: Path) -> None:
    terminal, other = pty.openpty()
    command = [str(Path(sys.executable).parent / "inflight"), "chat", f"--url={front.url}"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    with subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=environment
    ) as chat:
        os.close(other)
        read_until(terminal, "/help tells the commands")
        os.write(terminal, b"/set max_tokens 6000\n1 2 3\n")
        read_until(terminal, "11 12 13")
        os.write(terminal, b"/stop\n")
        read_until(terminal, "stopped]")
        os.write(terminal, b"/quit\n")
        assert chat.wait(WAIT_SECONDS) == 0
    os.close(terminal)
    assert (tmp_path / "inflight/chat_history").stat().st_mode & 0o077 == 0
    assert "1 2 3" in (tmp_path / "inflight/chat_history").read_text()


def test_without_a_server_every_command_says_so() -> None:
    [port] = free_ports(1)
    for command in (["chat"], ["bench"], ["bench", "--api=kserve", "-n1", "-c1"]):
        done = run(*command, f"--url=http://127.0.0.1:{port}")
        assert done.returncode == 1
        assert "error: " in done.stderr or "the connection failed" in done.stderr, done.stderr


def test_top_shows_numbers_and_requests(server: ServeProcess) -> None:
    done = run("top", "--once", f"--url={server.grpc_url}")
    assert done.returncode == 0, done.stderr
    for word in ("tokens/s", "TTFT", "KV cache", "running 0"):
        assert word in done.stdout
    answer = json.loads(run("top", "--once", "--json", f"--url={server.grpc_url}").stdout)
    assert answer["requests"] == []
    command = [str(Path(sys.executable).parent / "inflight"), "top", f"--url={server.grpc_url}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as piped:
        assert piped.stdout is not None
        assert json.loads(piped.stdout.readline())["requests"] == []
        piped.terminate()


@pytest.mark.parametrize("api", ["openai", "kserve"])
def test_bench_measures_clients_and_rates(
    front: FrontProcess, server: ServeProcess, api: str
) -> None:
    url = front.url if api == "openai" else server.http_url
    load = ["-c", "2", "-r", "40", "-n", "6", "--max-tokens=8", "--ignore-eos", "--prompt=1 2 3"]
    done = run("bench", f"--api={api}", f"--url={url}", *load, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    clients, rate = json.loads(done.stdout)
    assert (clients["load"], rate["load"]) == ("2 clients", "40 a second")
    for figures in (clients, rate):
        assert (figures["requests"], figures["failed"], figures["errors"]) == (6, 0, {})
        num_tokens = figures["tokens_per_second"] * figures["seconds"]
        assert num_tokens == pytest.approx(48, rel=0.02)
        assert 0 < figures["first_token_ms_p50"] <= figures["first_token_ms_p99"]
        assert figures["first_token_ms_p50"] <= figures["request_ms_p50"]
    table = run("bench", f"--api={api}", f"--url={url}", "-c1", "-n2", "--max-tokens=4").stdout
    for word in ("1 client ", "TTFT ms", "request ms", "failed", "p99"):
        assert word in table  # of 80 columns, as into a pipe


def test_bench_counts_what_fails(front: FrontProcess) -> None:
    load = ["-c1", "-n2", "--max-tokens=4", "--json", "--model=other"]
    done = run("bench", f"--url={front.url}", *load)
    assert done.returncode == 1
    [figures] = json.loads(done.stdout)
    assert (figures["requests"], figures["failed"]) == (0, 2)
    [reason] = figures["errors"]
    assert "other" in reason or "does not exist" in reason
