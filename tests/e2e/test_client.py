"""Our clients, the command line and the demo on the real server.

The demo model counts, so a lost, doubled or foreign token is a gap in the count.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.calls import WAIT_SECONDS, assert_counts, assert_counts_in_part, stats_of
from support.server_process import ServeProcess
from tokenizers import Tokenizer
from typer.testing import CliRunner

from inflight_client import InflightClient, RequestTimeout, ServerError
from inflight_client.address import Protocol
from inflight_client.cli import app
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = pytest.mark.e2e

PROMPT = "1 2 3"
LONG = 5_000
"""Tokens of an answer that no test reads to its end."""
TOKENIZER: Any = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
COMMAND = [sys.executable, "-m", "inflight_client.cli"]


@pytest.fixture(params=["grpc", pytest.param("http", marks=pytest.mark.slow)])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    """Each protocol in turn."""
    chosen: Protocol = request.param
    return chosen


@pytest.fixture
def url(server: ServeProcess, protocol: Protocol) -> str:
    """The address of the server for ``protocol``."""
    return server.grpc_url if protocol == "grpc" else server.http_url


@pytest.fixture
def client(url: str, protocol: Protocol) -> Iterator[InflightClient]:
    """The client for threads, every call of which is one of the asyncio client."""
    with InflightClient(url, protocol=protocol) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_left_running(server: ServeProcess) -> Iterator[None]:
    """After every test the server must become idle, with all blocks free."""
    yield
    wait_until(lambda: is_idle(server), "the server is idle")


def is_idle(server: ServeProcess) -> bool:
    stats = stats_of(server)
    return not stats["Active Request Count"] and not stats["Used KV cache blocks"]


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS} s: {what}"
        time.sleep(0.02)


def test_whole_and_streamed_answers_to_text_and_to_tokens(client: InflightClient) -> None:
    assert client.health()
    result = client.generate(PROMPT, 120, request_id="whole")
    assert_counts(PROMPT, result.text, 120)
    assert result.finish == "length"
    pieces = [chunk.text for chunk in client.stream(PROMPT, 120)]
    assert len(pieces) > 10  # tokens that pile up travel together
    assert "".join(pieces) == result.text

    ids = TOKENIZER.encode(PROMPT).ids
    answer = client.generate(ids, 40)
    assert (len(answer.token_ids), answer.finish) == (40, "length")
    assert_counts(PROMPT, TOKENIZER.decode(answer.token_ids), 40)
    chunks = client.stream(ids, 40)
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == answer.token_ids


def test_settings_reach_the_server(client: InflightClient) -> None:
    with_prompt = client.generate(PROMPT, 10, exclude_input_in_output=False)
    assert with_prompt.text == "1 2 3 4 5 6 7 8"
    stopped = client.generate(PROMPT, 200, stop_words=["9 1", "nothing"])
    assert (stopped.text, stopped.finish) == (" 4 5 6 7 8 ", "stop")
    for stops, text in (("79", " 4 5 6 "), ("9", " 4 5 6 7 8 ")):
        ids = TOKENIZER.encode(stops, add_special_tokens=False).ids
        stopped = client.generate(PROMPT, 200, stop_token_ids=ids)
        assert (stopped.text, stopped.finish) == (text, "stop")
    assert client.generate(PROMPT, 9, stop_token_ids=[]).text == " 4 5 6 7 "
    five = TOKENIZER.encode("5").ids[-1]
    ended = client.generate(TOKENIZER.encode(PROMPT).ids, 40, end_id=five)
    assert ended.finish == "stop"
    assert len(ended.token_ids) < 10


def test_several_answers_are_those_of_the_seeds_that_follow(client: InflightClient) -> None:
    settings: dict[str, Any] = {"temperature": 50.0, "top_k": 200}
    answers = client.generate_many(PROMPT, n=3, max_tokens=12, seed=7, **settings)
    alone = [client.generate(PROMPT, 12, seed=seed, **settings) for seed in (7, 8, 9)]
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert len({answer.text for answer in answers}) == 3
    pieces = ["", ""]
    for chunk in client.stream(PROMPT, 12, n=2, seed=7, **settings):
        pieces[chunk.index] += chunk.text
    assert pieces == [answer.text for answer in alone[:2]]


@pytest.mark.case(67, 69, 74)
def test_every_way_to_end_an_answer_early(
    client: InflightClient, url: str, protocol: Protocol, server: ServeProcess
) -> None:
    """A stop by id from another client, leaving the stream, a cancel, a limit of time."""
    client.stop("no request has this id")
    pieces = []
    with InflightClient(url, protocol=protocol) as other:
        for chunk in other.stream(PROMPT, LONG, request_id="stop me"):
            pieces.append(chunk.text)
            if len(pieces) == 5:
                client.stop("stop me")
    assert len(pieces) >= 5
    assert_counts_in_part(PROMPT, "".join(pieces), LONG)

    assert len(list(islice(client.stream(PROMPT, LONG), 3))) == 3
    wait_until(lambda: is_idle(server), "the blocks are free")

    stream = client.stream(PROMPT, LONG)
    text = next(stream).text
    threading.Timer(0.2, stream.cancel).start()
    text += "".join(chunk.text for chunk in stream)
    assert len(text) < LONG
    assert_counts(PROMPT, text, len(text))

    with pytest.raises(RequestTimeout):
        client.generate(PROMPT, LONG, timeout=0.5)
    wait_until(lambda: is_idle(server), "the request is cancelled")


def test_feed_of_statistics_shows_every_iteration(client: InflightClient) -> None:
    stream = client.stream(PROMPT, LONG)
    next(stream)
    feed = list(islice(client.stats(), 20))
    stream.cancel()
    first = feed[1]["Iteration Counter"]
    counters = [stats["Iteration Counter"] for stats in feed[1:]]
    assert counters == list(range(first, first + 19))
    assert all(stats["Active Request Count"] == 1 for stats in feed[1:])


def test_errors_of_the_server(client: InflightClient) -> None:
    refused: list[tuple[str | list[int], int, str]] = [
        ("", 3, "'text_input' is empty"),
        ([], 3, "'input_ids' is empty"),
        (PROMPT, 0, "'max_tokens' is 0"),
        (PROMPT, 10**6, "= 1000006, more than max_seq_len = 8192"),
        ([999_999], 3, "'input_ids' holds 999999, outside the vocabulary"),
    ]
    for prompt, max_tokens, message in refused:
        with pytest.raises(ServerError, match=message):
            client.generate(prompt, max_tokens)
        with pytest.raises(ServerError, match=message):
            list(client.stream(prompt, max_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_command_interrupted(how: str, url: str, server: ServeProcess) -> None:
    command = [*COMMAND, "generate", PROMPT, f"--max-tokens={LONG}", how, "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        wait_until(lambda: not is_idle(server), "the request runs")
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=WAIT_SECONDS)

    assert (running.returncode, stderr.strip()) == (130, b"")
    wait_until(lambda: is_idle(server), "the request is cancelled")


def test_commands(url: str) -> None:
    """test_readme.py has them as a shell runs them."""

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--url", url])
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout

    text = run("generate", PROMPT, "--max-tokens=40")
    assert_counts(PROMPT, text.removesuffix("\n"), 40)
    assert run("generate", PROMPT, "--max-tokens=40", "--no-stream") == text
    options = ["--priority=0.9", "--cache-salt=me", "--max-queue-time-ms=60000"]
    assert run("generate", PROMPT, "--max-tokens=40", *options) == text
    assert json.loads(run("stats", "--json"))["Max KV cache blocks"] > 0
    assert "KV cache blocks" in run("stats")
    assert run("health") == "ready\n"
    bad = CliRunner().invoke(app, ["generate", PROMPT, "--priority=7", "--url", url])
    assert bad.exit_code == 1
    assert "'priority' is 7; it must be a finite number, 0..1" in bad.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_demo(is_broken: bool, tmp_path: Path) -> None:
    broken = tmp_path / "tritonserver"  # the first on the PATH is the one that is started
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    broken.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}" if is_broken else os.environ["PATH"]
    done = subprocess.run(
        [*COMMAND, "demo"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PATH": path},
    )

    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == is_broken, done.stdout + done.stderr
    if is_broken:
        assert done.stderr.startswith("error: the server did not start:\n")
    else:
        assert "stopped by a stop signal" in done.stdout
        assert "No gap in any count; the server left nothing behind." in done.stdout
