"""Models that relay to ``tensorrt_llm``, with many clients at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2e.conftest import ServeFactory
from support.server_process import ServeProcess, assert_counts

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 16
NUM_ROUNDS = 3
NUM_REFUSED = 10  # between two answers
NUM_TOKENS = 40


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


@pytest.mark.slow
@pytest.mark.case(118)
def test_streams_that_are_relayed_side_by_side_come_to_their_ends(serve: ServeFactory) -> None:
    """Triton's own way from model to model stood still within seconds: where a second response to a
    call came while another began."""
    running = serve(options=["--add=vllm_model"], settings={"stall_seconds": 5})
    errors = errors_of_all(running)
    assert not errors, running.stderr
    assert "starting again" not in running.stderr
    assert running.stop() == 0
