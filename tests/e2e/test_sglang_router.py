"""SGLang's router before fronts, which must accept its neutral fields, and before servers; Dynamo's
indexer, which follows what one has cached."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from support.calls import assert_counts
from support.front_process import FrontProcess
from support.router_process import RouterProcess, dynamo_indexer, wait_until
from support.server_process import (
    HOST,
    START_SECONDS,
    ServeProcess,
    free_ports,
    start_serve,
)

from inflight_backend.text.tokenizer import TextCodec
from inflight_client import InflightClient
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = "demo_model"


@pytest.fixture(scope="module")
def fronts(
    server: ServeProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[FrontProcess]]:
    folder = tmp_path_factory.mktemp("fronts")
    options = ["--strict", f"--metrics-url={server.metrics_url}"]
    with ExitStack() as stack:
        yield [
            stack.enter_context(FrontProcess(folder, server.grpc_url, options)) for _ in range(2)
        ]


@pytest.fixture(scope="module")
def router(
    fronts: list[FrontProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterProcess]:
    urls = [front.url for front in fronts]
    folder = tmp_path_factory.mktemp("router")
    process = RouterProcess(folder, urls, policy="round_robin", disable_retries=True)
    try:
        yield process.wait_until_ready()
    finally:
        process.kill()


def test_it_learns_the_model_s_name(router: RouterProcess) -> None:
    assert {worker["model_id"] for worker in router.workers()} == {MODEL}


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_every_answer_comes_through_it(
    router: RouterProcess, is_chat: bool, is_streaming: bool
) -> None:
    """Five of five, though each front refuses every name that is not in the table."""
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
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


def parse_metric(line: str) -> tuple[str, tuple[dict[str, str], float]]:
    """Name, labels and value of one line of a metrics page."""
    name, _, rest = line.partition("{")
    labels, _, value = rest.partition("} ")
    return name, (dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value or "nan"))


def test_what_monitoring_asks_a_front(fronts: list[FrontProcess]) -> None:
    with httpx.Client(base_url=fronts[0].url, trust_env=False) as http:
        page = http.get("/metrics")
        assert page.headers["Content-Type"].startswith("text/plain")
        assert "nv_inference_request_success" in page.text
        # The metrics that the Gateway API's endpoint picker reads of vLLM, and their labels.
        shown = {name: line for name, line in map(parse_metric, page.text.splitlines())}
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
            labels, value = shown[f"vllm:{name}"]
            assert labels["model_name"] == MODEL
            assert 0 <= value < 10
        labels, value = shown["vllm:cache_config_info"]
        assert (value, labels["block_size"], int(labels["num_gpu_blocks"]) > 0) == (1, "32", True)
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


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[ServeProcess, str]]]:
    """Three, each with the address of its OpenAI API."""
    started = []
    for port in free_ports(3):
        scratch = tmp_path_factory.mktemp("server")
        options = ["--openai-port", str(port), "--drain-seconds", "60"]
        started.append((start_serve(scratch, options=options), f"http://{HOST}:{port}"))
    for server, _ in started:
        server.wait_until_printed("is ready")
    yield started
    for server, _ in started:
        server.stop()


def kill_all_of(server: ServeProcess) -> None:
    """As a machine that loses its power; what it leaves in shared memory is taken away."""
    parent = psutil.Process(server.process.pid)
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait()
    server.wait_until_gone(10)
    for name in server.shared_memory():
        (Path("/dev/shm") / name).unlink()


def num_active(server: ServeProcess) -> int:
    page = httpx.get(server.metrics_url, trust_env=False).text
    [line] = [each for each in page.splitlines() if 'request_type="active"' in each]
    return round(float(line.split()[-1]))


def test_a_server_that_is_lost_ends_its_streams_and_one_that_drains_none(
    servers: list[tuple[ServeProcess, str]], tmp_path: Path
) -> None:
    """Nine streams over three servers: one is killed, then another one is asked to stop. Other
    requests come all the while, and none of them fails."""
    asyncio.run(lose_and_drain(servers, tmp_path))


async def lose_and_drain(servers: list[tuple[ServeProcess, str]], tmp_path: Path) -> None:
    router = RouterProcess(
        tmp_path,
        [url for _, url in servers],
        policy="round_robin",
        health_check_interval_secs=1,
        health_failure_threshold=1,
    )
    others: list[str | None] = []
    ends: list[int | Exception] = []
    is_over = asyncio.Event()
    try:
        await asyncio.to_thread(router.wait_until_ready)
        async with openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:

            async def stream() -> None:
                """Count the texts of one answer, which would be as long as the model allows."""
                number = 0
                try:
                    answer = await client.completions.create(
                        model=MODEL, prompt="1 2 3", max_tokens=3000, stream=True
                    )
                    async for _ in answer:
                        number += 1
                    ends.append(number)
                except Exception as error:
                    ends.append(error)

            async def ask() -> None:
                while not is_over.is_set():
                    answer = await client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": "1 2 3"}], max_tokens=4
                    )
                    others.append(answer.choices[0].finish_reason)

            streams = [asyncio.create_task(stream()) for _ in range(9)]
            # At once, since a server may be far ahead of what its clients have read; and no other
            # request before: the router takes the servers in turn, and each has three streams now.
            while sum([num_active(server) for server, _ in servers]) < 9:
                await asyncio.sleep(0)
            asking = asyncio.create_task(ask())
            await asyncio.to_thread(kill_all_of, servers[0][0])
            while len(ends) < 3:
                await asyncio.sleep(0.05)
            num_before = len(others)
            servers[1][0].process.send_signal(signal.SIGTERM)
            await asyncio.gather(*streams)
            while len(others) < num_before + 20:
                assert not asking.done()
                await asyncio.sleep(0.1)
            is_over.set()
            await asking
    finally:
        router.kill()
    errors = [end for end in ends if isinstance(end, Exception)]
    assert len(errors) == 3, ends
    assert all(isinstance(error, httpx.TransportError | openai.APIError) for error in errors)
    assert len(ends) == 9
    assert set(others) == {"length"}
    assert servers[1][0].wait() == 0


def test_dynamos_indexer_knows_what_a_server_has_cached(tmp_path: Path) -> None:
    """A prompt of 64 characters, each a token behind the first one, is four blocks of 16."""
    events, replay = (f"tcp://{HOST}:{port}" for port in free_ports(2))
    codec = TextCodec.load(DEMO_MODEL, None)
    assert codec is not None
    with dynamo_indexer() as http:
        server = start_serve(
            tmp_path,
            settings={"kv_events": events, "kv_events_replay": replay, "tokens_per_block": 16},
        )
        server.wait_until_printed("is ready")
        worker = {"instance_id": 7, "endpoint": events, "replay_endpoint": replay}
        http.post("/register", json={**worker, "model_name": MODEL, "block_size": 16})
        numbers = count(10**63)

        def is_found() -> bool:
            prompt = str(next(numbers))  # what came before the indexer listened is replayed
            client.generate(prompt, 2)
            tokens = codec.encode(prompt, 1000)
            found = http.post("/query", json={"token_ids": tokens, "model_name": MODEL}).json()
            return bool(found.get("instances", {}).get("7", {}).get("longest_matched") == 64)

        with InflightClient(server.grpc_url) as client:
            wait_until(is_found, START_SECONDS)
    assert server.stop() == 0
    server.assert_clean()
