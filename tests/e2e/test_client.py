"""Our clients, the command line and the demo on the real server.

The demo model counts, so a lost, doubled or foreign token is a gap in the count.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.callers import CALLERS, LONG, Caller
from support.server_process import ServeProcess, assert_counts, assert_counts_in_part
from tokenizers import Tokenizer

from inflight_client import InflightClient, RequestTimeout, ServerError
from inflight_client.address import Protocol
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = pytest.mark.e2e

PROMPT = "1 2 3"
WAIT_SECONDS = 90.0
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


@pytest.fixture(params=["asyncio", pytest.param("sync", marks=pytest.mark.slow)])
def caller(request: pytest.FixtureRequest, url: str, protocol: Protocol) -> Caller:
    """Each client in turn."""
    kind: str = request.param
    return CALLERS[kind](url, protocol)


@pytest.fixture(autouse=True)
def nothing_left_running(server: ServeProcess) -> Iterator[None]:
    """After every test the server must become idle, with all blocks free."""
    yield
    wait_until(lambda: used(server) == (0, 0), "the server is idle")


def used(server: ServeProcess) -> tuple[int, int]:
    """Active requests and KV blocks in use."""
    with InflightClient(server.grpc_url) as client:
        (stats,) = client.stats(follow=False)
    return stats["Active Request Count"], stats["Used KV cache blocks"]


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS} s: {what}"
        time.sleep(0.05)


def demo_tokenizer() -> Any:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def test_stop_words(caller: Caller) -> None:
    result = caller.generate(PROMPT, 200, stop_words=["9 1", "nothing"])

    assert (result.text, result.finish) == (" 4 5 6 7 8 ", "stop")


@pytest.mark.parametrize(("stops", "text"), [("79", " 4 5 6 "), ("9", " 4 5 6 7 8 ")])
def test_stop_token_ids(caller: Caller, stops: str, text: str) -> None:
    ids = demo_tokenizer().encode(stops, add_special_tokens=False).ids
    result = caller.generate(PROMPT, 200, stop_token_ids=ids)

    assert (result.text, result.finish) == (text, "stop")
    assert caller.generate(PROMPT, 9, stop_token_ids=[]).text == " 4 5 6 7 "


def test_whole_answer(caller: Caller) -> None:
    result = caller.generate(PROMPT, 40, request_id="whole")

    assert result.text.startswith(" 4 5 6 7 8 9 10 11 ")
    assert_counts(PROMPT, result.text, 40)
    assert result.finish == "length"


def test_whole_answer_with_the_prompt(caller: Caller) -> None:
    text = caller.generate(PROMPT, 10, exclude_input_in_output=False).text

    assert text == "1 2 3 4 5 6 7 8"


def test_stream_gives_the_same_text_in_pieces(caller: Caller) -> None:
    pieces = [chunk.text for chunk in caller.stream(PROMPT, 300)]

    assert len(pieces) > 20  # tokens that pile up travel together
    assert "".join(pieces) == caller.generate(PROMPT, 300).text
    assert_counts(PROMPT, "".join(pieces), 300)


def test_tokens_in_and_out(caller: Caller) -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode(PROMPT).ids

    result = caller.generate(ids, 40)
    chunks = caller.stream(ids, 40)

    assert (len(result.token_ids), result.finish) == (40, "length")
    assert_counts(PROMPT, tokenizer.decode(result.token_ids), 40)
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids


def test_end_id_ends_the_answer_early(caller: Caller) -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode(PROMPT).ids
    five = tokenizer.encode("5").ids[-1]

    result = caller.generate(ids, 40, end_id=five)

    assert result.finish == "stop"
    assert len(result.token_ids) < 10


def test_seeded_answers_repeat(caller: Caller) -> None:
    settings = {"temperature": 50.0, "top_k": 200, "seed": 7}

    first, again = (caller.generate(PROMPT, 30, **settings).text for _ in range(2))

    assert first == again
    assert first != caller.generate(PROMPT, 30, **{**settings, "seed": 8}).text


def test_several_answers_are_those_of_the_seeds_that_follow(caller: Caller) -> None:
    settings: dict[str, Any] = {"temperature": 50.0, "top_k": 200}
    answers = caller.generate_many(PROMPT, n=3, max_tokens=12, seed=7, **settings)
    alone = [caller.generate(PROMPT, 12, seed=seed, **settings) for seed in (7, 8, 9)]
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert len({answer.text for answer in answers}) == 3
    pieces = ["", ""]
    for chunk in caller.stream(PROMPT, 12, n=2, seed=7, **settings):
        pieces[chunk.index] += chunk.text
    assert pieces == [answer.text for answer in alone[:2]]


def test_stop_by_id_from_another_client(caller: Caller, url: str, protocol: Protocol) -> None:
    pieces = []
    with InflightClient(url, protocol=protocol) as client:
        for chunk in client.stream(PROMPT, LONG, request_id="stop me"):
            pieces.append(chunk.text)
            if len(pieces) == 5:
                caller.stop("stop me")

    assert_counts_in_part(PROMPT, "".join(pieces), LONG)
    assert len(pieces) >= 5


def test_stop_of_an_unknown_id_is_acknowledged(caller: Caller) -> None:
    caller.stop("nobody has this id")


@pytest.mark.case(67, 69)
def test_leaving_a_stream_frees_its_blocks(caller: Caller, server: ServeProcess) -> None:
    assert len(caller.stream(PROMPT, LONG, leave_after=3)) == 3
    wait_until(lambda: used(server) == (0, 0), "the blocks are free")


def test_cancel_from_the_side(caller: Caller, server: ServeProcess) -> None:
    chunks = caller.cancel_when(PROMPT, lambda: used(server)[0] == 1)

    text = "".join(chunk.text for chunk in chunks)
    assert len(text) < LONG, "and perhaps none, if it had no token yet"
    assert_counts(PROMPT, text, len(text))


@pytest.mark.case(74)
def test_timeout_cancels_the_request(caller: Caller, server: ServeProcess) -> None:
    with pytest.raises(RequestTimeout):
        caller.generate(PROMPT, LONG, timeout=0.5)
    wait_until(lambda: used(server) == (0, 0), "the request is cancelled")


def test_feed_of_statistics_shows_every_iteration(
    caller: Caller, url: str, protocol: Protocol
) -> None:
    with InflightClient(url, protocol=protocol) as client:
        stream = client.stream(PROMPT, LONG)
        next(stream)
        feed = caller.stats(20)
        stream.cancel()

    first = feed[1]["Iteration Counter"]
    counters = [stats["Iteration Counter"] for stats in feed[1:]]
    assert counters == list(range(first, first + 19))
    assert all(stats["Active Request Count"] == 1 for stats in feed[1:])


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ("", 3, "'text_input' is empty"),
        ([], 3, "'input_ids' is empty"),
        (PROMPT, 0, "'max_tokens' is 0"),
        (PROMPT, 10**6, "= 1000006, more than max_seq_len = 8192"),
        ([999_999], 3, "'input_ids' holds 999999, outside the vocabulary"),
    ],
)
def test_errors_of_the_server(
    caller: Caller, prompt: str | list[int], max_tokens: int, message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        caller.generate(prompt, max_tokens)
    with pytest.raises(ServerError, match=message):
        caller.stream(prompt, max_tokens)


@pytest.mark.slow
@pytest.mark.case(56)
def test_second_request_with_an_id_in_flight(caller: Caller, url: str, protocol: Protocol) -> None:
    with InflightClient(url, protocol=protocol) as client:
        text = ""
        for index, chunk in enumerate(client.stream(PROMPT, 1_000, request_id="twice")):
            text += chunk.text
            if index == 3:
                with pytest.raises(ServerError, match="still being processed"):
                    caller.generate(PROMPT, 3, request_id="twice")

    assert_counts(PROMPT, text, 1_000)  # the first goes on to its end


def test_health(caller: Caller) -> None:
    assert caller.health()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )


def test_command_generate(url: str) -> None:
    done = run("generate", PROMPT, "--max-tokens", "40", "--url", url)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" 4 5 6 ")
    assert_counts(PROMPT, done.stdout.removesuffix("\n"), 40)
    whole = run("generate", PROMPT, "--max-tokens=40", "--no-stream", "--url", url)
    assert whole.stdout == done.stdout


def test_command_stop(url: str) -> None:
    command = [*COMMAND, "generate", PROMPT, f"--max-tokens={LONG}", "--request-id=by hand"]
    with subprocess.Popen([*command, "--url", url], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        begin = os.read(running.stdout.fileno(), 1)
        assert run("stop", "by hand", "--url", url).returncode == 0
        text = (begin + running.stdout.read()).decode()
        assert running.wait(WAIT_SECONDS) == 0

    assert_counts_in_part(PROMPT, text, LONG)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_command_interrupted(how: str, url: str, server: ServeProcess) -> None:
    command = [*COMMAND, "generate", PROMPT, f"--max-tokens={LONG}", how, "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        wait_until(lambda: used(server)[0] == 1, "the request runs")
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=WAIT_SECONDS)

    assert (running.returncode, stderr.strip()) == (130, b"")
    wait_until(lambda: used(server) == (0, 0), "the request is cancelled")


def test_command_stats(server: ServeProcess) -> None:
    url = server.grpc_url
    done = run("stats", "--json", "--url", url)

    assert json.loads(done.stdout)["Max KV cache blocks"] > 0
    assert "KV cache blocks" in run("stats", "--url", url).stdout


def test_command_health(server: ServeProcess) -> None:
    done = run("health", "--url", server.grpc_url)

    assert (done.returncode, done.stdout) == (0, "ready\n")


def test_command_error_is_one_line(server: ServeProcess) -> None:
    done = run("generate", "", "--url", server.grpc_url)

    assert done.returncode == 1
    assert done.stderr == "error: 'text_input' is empty: a prompt needs at least one token\n"


@pytest.mark.slow
def test_demo() -> None:
    done = subprocess.run(
        [*COMMAND, "demo"], capture_output=True, text=True, timeout=180, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped by a stop signal" in done.stdout
    assert "No gap in any count; the server left nothing behind." in done.stdout


def test_demo_says_why_it_cannot_start(tmp_path: Path) -> None:
    broken = tmp_path / "tritonserver"  # the first on the PATH is the one that is started
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    broken.chmod(0o755)
    done = subprocess.run(
        [*COMMAND, "demo"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )

    assert done.returncode == 1
    assert done.stderr.startswith("error: the server did not start:\n")
    assert "Traceback" not in done.stdout + done.stderr
