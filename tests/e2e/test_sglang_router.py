"""SGLang's router in front of two fronts, which must accept its neutral fields."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support import load_tools
from support.calls import assert_counts
from support.front_process import FrontProcess
from support.server_process import HOST, START_SECONDS, ServeProcess, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = "demo_model"
# What its wheel calls launch_router needs a web framework for a debugging mode.
ROUTER = """
import sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
port, metrics_port, *urls = sys.argv[1:]
arguments = RouterArgs(worker_urls=urls, host="127.0.0.1", port=int(port), policy="round_robin",
                       prometheus_port=int(metrics_port), worker_startup_check_interval=1,
                       disable_retries=True)
Router.from_args(arguments).start()
"""


@pytest.fixture(scope="module")
def fronts(
    server: ServeProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[FrontProcess]]:
    folder = tmp_path_factory.mktemp("fronts")
    options = ["--strict", f"--metrics-url={server.metrics_url}"]
    running = [FrontProcess(folder, server.grpc_url, options) for _ in range(2)]
    yield [front.wait_until_ready() for front in running]
    for front in running:
        assert front.stop() == 0, front.output


@pytest.fixture(scope="module")
def router(fronts: list[FrontProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base of its calls."""
    port, metrics_port = free_ports(2)
    command = [sys.executable, "-c", ROUTER, str(port), str(metrics_port)]
    log = tmp_path_factory.mktemp("router") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(front.url for front in fronts)],
            env=os.environ | {"PYTHONPATH": str(load_tools.ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://{HOST}:{port}"
    deadline = time.monotonic() + START_SECONDS
    try:
        while len(workers(url)) < len(fronts):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def workers(url: str) -> list[dict[str, Any]]:
    """The fronts that it has found to be well."""
    try:
        found = httpx.get(f"{url}/workers", trust_env=False).json()["workers"]
    except httpx.TransportError:
        return []
    return [each for each in found if each["is_healthy"]]


def test_it_learns_the_model_s_name(router: str) -> None:
    assert {worker["model_id"] for worker in workers(router)} == {MODEL}


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_every_answer_comes_through_it(router: str, is_chat: bool, is_streaming: bool) -> None:
    """Five of five, though each front refuses every name that is not in the table."""
    with openai.OpenAI(base_url=f"{router}/v1", api_key="none", max_retries=0) as client:
        for i in range(5):
            prompt = f"{10 * i + 1} {10 * i + 2} {10 * i + 3}"
            common: Any = {"model": MODEL, "max_tokens": 12, "temperature": 0}
            common["stream"] = is_streaming
            if is_chat:
                messages: Any = [{"role": "user", "content": prompt}]
                answer: Any = client.chat.completions.create(messages=messages, **common)
            else:
                answer = client.completions.create(prompt=prompt, **common)
            assert_counts(
                f"{prompt} " if is_chat else prompt, text_of(answer, is_chat, is_streaming), 12
            )


def text_of(answer: Any, is_chat: bool, is_streaming: bool) -> str:
    if not is_streaming:
        choice = answer.choices[0]
        return str(choice.message.content if is_chat else choice.text)
    choices = [chunk.choices[0] for chunk in answer]
    return "".join((each.delta.content if is_chat else each.text) or "" for each in choices)


def test_what_monitoring_asks_a_front(fronts: list[FrontProcess]) -> None:
    with httpx.Client(base_url=fronts[0].url, trust_env=False) as http:
        page = http.get("/metrics")
        assert page.headers["Content-Type"].startswith("text/plain")
        assert "nv_inference_request_success" in page.text
        version = http.get("/version").json()["version"]
        server_info = http.get("/server_info").json()
        assert server_info == http.get("/get_server_info").json()
        assert server_info["version"] == version
        model_info = http.get("/model_info").json()
        assert model_info == http.get("/get_model_info").json()
        for info in (server_info, model_info):
            assert info["model_path"] == MODEL
        [card] = http.get("/v1/models").json()["data"]
        assert server_info["context_length"] == card["max_model_len"]
