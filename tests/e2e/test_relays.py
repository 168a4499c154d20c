"""Models that relay to ``tensorrt_llm``, with many clients at once."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from e2e.conftest import ServeFactory
from e2e.harness import ServeProcess, assert_counts

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 16
NUM_ROUNDS = 3
NUM_REFUSED = 10  # between two answers
NUM_TOKENS = 40
CRASHED = "died: killed by SIGSEGV"


def ask_often(running: ServeProcess, client: int) -> None:
    """Three answers each to several questions; calls that are refused at once come between them."""
    prompt = f"{100 * client + 100} {100 * client + 101}"
    settings = {"max_tokens": NUM_TOKENS, "temperature": 0, "n": 3}
    body = {"text_input": prompt, "stream": True, "sampling_parameters": json.dumps(settings)}
    url = f"{running.http_url}/v2/models/vllm_model/generate_stream"
    bad = {**body, "sampling_parameters": json.dumps({**settings, "top_p": 7})}
    with httpx.Client(trust_env=False, timeout=30) as http:
        for _ in range(NUM_ROUNDS):
            lines = http.post(url, json=body).text.splitlines()
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
            pieces = zip(*(event["text_output"] for event in events), strict=True)
            for text in map("".join, pieces):
                assert_counts(prompt, text, NUM_TOKENS)
            for _ in range(NUM_REFUSED):
                assert "'runtime_top_p' is 7" in http.post(url, json=bad).text


def errors_of_all(running: ServeProcess) -> list[BaseException]:
    """Of those clients that did not get what they asked for."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        asked = [pool.submit(ask_often, running, client) for client in range(NUM_CLIENTS)]
        return [error for each in asked if (error := each.exception())]


def wait_until_ready(running: ServeProcess) -> None:
    deadline = time.monotonic() + 60
    url = f"{running.http_url}/v2/models/vllm_model/ready"
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)


@pytest.mark.case(118)
def test_streams_that_are_relayed_side_by_side_come_to_their_ends(serve: ServeFactory) -> None:
    """Triton's way from model to model stood still within seconds: where a second response to a
    call came while another began.

    Of a process of Triton's that crashes under this load (24.10; seen once in some fourteen runs,
    on a busy machine) the launcher starts the server again, and everybody asks once more.
    """
    running = serve(options=["--add=vllm_model"], settings={"stall_seconds": 5})
    errors = errors_of_all(running)
    if errors:
        time.sleep(3)  # for the launcher to say so
    if errors and CRASHED in running.stderr:
        wait_until_ready(running)
        errors = errors_of_all(running)
    assert not errors, running.stderr
    assert running.stderr.count("starting again") == running.stderr.count(CRASHED) <= 1
    assert running.stop() == 0
