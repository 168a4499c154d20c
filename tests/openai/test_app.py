"""The front over a local server: its calls, its limits, and requests that fail or end early."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import anyio
import httpx
import pytest
from client.conftest import Local
from starlette.applications import Starlette
from support.local_server import GAP_SECONDS, Arrival, LocalTriton
from support.openai_front import (
    CHAT,
    CHATS_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    app_of,
    client_of,
    front_of,
    post,
)

from inflight_client.errors import InvalidArgument
from inflight_openai import app as app_module
from inflight_openai.app import OpenAIApp, cors
from inflight_openai.generation import parse_chat
from inflight_openai.server import serving
from inflight_openai.settings import FrontSettings

WAIT_SECONDS = 60.0
MIB = 2**20

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_loop")]


async def until(is_so: Any) -> None:
    with anyio.fail_after(WAIT_SECONDS):
        while not is_so():
            await asyncio.sleep(GAP_SECONDS)


async def request(
    local: Local, method: str, path: str, *, body: Any = None, **settings: Any
) -> Any:
    """The response to one request to a front of ``local``."""
    async with front_of(local, **settings) as client:
        return await client.request(method, path, json=body)


def answer_one_token_and_wait(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    yield {"text_output": [" 1"], "sequence_length": [1]}
    arrival.is_left.wait(WAIT_SECONDS)


def answer_nothing(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    arrival.is_left.wait(WAIT_SECONDS)
    yield from ()


@pytest.mark.parametrize(
    ("method", "path", "status", "allow", "hint"),
    [
        ("POST", "/v1/files", 404, "", "Not Found: POST; there are POST /v1/completions"),
        ("GET", "/v1/completions", 405, "POST", "Method Not Allowed: GET; there are POST /v1/comp"),
        ("POST", "/v1/models", 405, "GET, HEAD", "Method Not Allowed: POST; there are POST /v1/"),
        ("GET", "/v1/models/other", 404, "", "the model does not exist here; this is demo"),
    ],
)
async def test_a_call_that_does_not_exist_names_those_that_do(
    local_grpc: Local, method: str, path: str, status: int, allow: str, hint: str
) -> None:
    answer = await request(local_grpc, method, path)
    assert answer.status_code == status
    assert sorted(answer.headers.get("Allow", "").split(", ")) == allow.split(", ")
    assert answer.json()["error"]["message"].startswith(hint)


@pytest.mark.parametrize("path", ["/v1/models/org/name", "/v1/models/org%2Fname"])
async def test_the_name_of_a_model_may_have_slashes(local_grpc: Local, path: str) -> None:
    answer = await request(local_grpc, "GET", path, served_name="org/name")
    assert answer.json()["id"] == "org/name"


@pytest.mark.parametrize(
    ("url", "status", "words"),
    [
        ("", 404, "are not shown here"),
        ("http://127.0.0.1:1/metrics", 503, "cannot be reached: start inflight openai with"),
        ("http://{}/v2/models/none/ready", 502, "answers 400"),
    ],
)
async def test_a_missing_metrics_page_is_an_error_without_its_address(
    local_grpc: Local, local_http: Local, url: str, status: int, words: str
) -> None:
    own = url.format(local_http.url)
    answer = await request(local_grpc, "GET", "/metrics", metrics_url=own)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, words in message, "127.0.0.1" in message) == (status, True, False)


@pytest.mark.parametrize(
    "body", [b"[" * 2**14, b"{", b"[]", b'{"lora_name": 1}'], ids=["deep", "open", "list", "number"]
)
async def test_a_body_that_names_no_adapter_is_a_400(local_grpc: Local, body: bytes) -> None:
    async with front_of(local_grpc, loads_adapters=True) as client:
        answer = await client.post("/v1/unload_lora_adapter", content=body)
    assert answer.status_code == 400


async def test_an_older_model_repository_is_asked_for_what_it_has(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton refuses a request with an input that is not in config.pbtxt."""
    answer = LocalTriton.answer

    def answer_as_before(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
        if arrival.values.get("describe"):
            yield {"description": ['{"model": "demo"}']}
        elif arrival.values.get("lora_adapters"):
            yield {"description": ['{"lora_adapters": []}']}
        else:
            yield from answer(self, arrival)

    monkeypatch.setattr(LocalTriton, "answer", answer_as_before)
    async with app_of(local_grpc) as app:
        await app.triton.describe()
        assert await app.triton.lora_requests() == {}
        async with client_of(app) as client:
            status, _ = await post(client, COMPLETIONS_PATH, COMPLETION)
            blocks = await client.get("/page/blocks")
    asked = local_grpc.triton.arrivals[-1]
    assert status == 200
    assert not {"num_cached_tokens", "return_num_cached_tokens"} & {*asked.values, *asked.outputs}
    assert (blocks.status_code, "--force" in blocks.text) == (400, True)


async def test_a_client_s_request_id_is_not_used_on_the_server(local_grpc: Local) -> None:
    """Two of the same would clash there."""

    body = COMPLETION | {"request_id": "mine"}
    async with front_of(local_grpc) as client:
        for _ in range(2):
            _, text = await post(client, COMPLETIONS_PATH, body)
            assert json.loads(text)["id"] == "cmpl-mine"
    ids = [arrival.request_id for arrival in local_grpc.triton.arrivals]
    assert len(set(ids)) == len(ids)
    assert "cmpl-mine" not in ids


async def test_every_response_names_its_request(local_grpc: Local) -> None:
    """As the client did, where it did; else by an id that the server's name of it ends with."""
    async with front_of(local_grpc, api_keys=("k",), allowed_origins=("*",)) as client:
        headers = {"Authorization": "Bearer k", "Origin": PAGE}
        calls: list[tuple[str, str, dict[str, Any], int]] = [
            ("GET", "/health", {}, 200),
            ("GET", "/nowhere", {}, 404),
            ("POST", COMPLETIONS_PATH, {"content": b"{"}, 400),
            ("POST", COMPLETIONS_PATH, {"json": COMPLETION | {"stream": True}}, 200),
            ("POST", COMPLETIONS_PATH, {"json": COMPLETION}, 200),
        ]
        for method, path, body, status in calls:
            answer = await client.request(method, path, headers=headers, **body)
            assert answer.status_code == status
            own = answer.headers["x-request-id"]
            assert len(own) == 32
            assert answer.headers["Access-Control-Expose-Headers"] == "x-request-id"
        assert local_grpc.triton.arrivals[-1].request_id == f"cmpl-{own}"
        assert answer.json()["id"] == f"cmpl-{own}"
        given = {"X-Client-Request-Id": "mine"}
        refused = await client.get("/v1/models", headers=given)  # without a key
        assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
        given["X-Request-Id"] = "a-gateway-s"
        answer = await client.get("/v1/models", headers=headers | given)
        assert answer.headers.get_list("x-request-id") == ["a-gateway-s"]
        del given["X-Client-Request-Id"]
        for unfit in ("two words", "x" * 513, "\xe9"):
            given["X-Request-Id"] = unfit
            fields = httpx.Headers(headers | given, encoding="latin-1")
            answer = await client.get("/v1/models", headers=fields)
            assert len(answer.headers["x-request-id"]) == 32


async def test_headers_of_the_settings_go_with_every_call(local_grpc: Local) -> None:
    name, value = "inflight-key", "s3cret"
    local_grpc.triton.key = (name, value)
    headers = {f"triton-grpc-protocol-{name}": value}
    for settings, status in (({"headers": headers}, 200), ({}, 503)):
        health = await request(local_grpc, "GET", "/health", **settings)
        answer = await request(local_grpc, "POST", COMPLETIONS_PATH, body=COMPLETION, **settings)
        assert (health.status_code, answer.status_code) == (status, status)
        assert name not in answer.text
    assert value not in repr(FrontSettings(headers=headers))


def answer_with_a_strange_index(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    for index in (0, 7):
        yield {"text_output": ["x"], "sequence_length": [1], "sequence_index": [index]}


async def test_a_failure_in_mid_stream_is_an_event(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", answer_with_a_strange_index)
    body = {**COMPLETION, "n": 2, "stream": True}
    answer = await request(local_grpc, "POST", COMPLETIONS_PATH, body=body)
    assert answer.status_code == 200
    error, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line][-2:]
    assert (json.loads(error)["error"]["message"], done) == ("the request failed", "[DONE]")
    assert "IndexError" in caplog.text


# Bodies.


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (json.dumps(COMPLETION).encode(), {}, 200),
        (
            gzip.compress(json.dumps(COMPLETION).encode(), mtime=0),
            {"Content-Encoding": "gzip"},
            200,
        ),
        (
            gzip.compress(json.dumps(COMPLETION).encode(), mtime=0),
            {"Content-Encoding": "X-GZip"},
            200,
        ),
        (json.dumps(COMPLETION).encode(), {"Content-Encoding": ""}, 200),
        (b'{"model": "demo"}', {"Content-Encoding": "gzip"}, 400),
        (json.dumps(COMPLETION).encode(), {"Content-Encoding": "br"}, 415),
        (b" " * 5000, {}, 413),
        (gzip.compress(b" " * 5000, mtime=0), {"Content-Encoding": "gzip"}, 413),
        ([b" " * 1500] * 4, {}, 413),  # chunked
    ],
)
async def test_encoding_and_size_of_a_body(
    local_grpc: Local, content: Any, headers: Mapping[str, str], status: int
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for chunk in content:
            yield chunk

    async with front_of(local_grpc, max_body_bytes=4096) as client:
        body = chunks() if isinstance(content, list) else content
        answer = await client.post(COMPLETIONS_PATH, content=body, headers=headers)
    assert (answer.status_code, "error" in answer.json()) == (status, status != 200)


async def test_a_slow_body_holds_a_place(local_grpc: Local) -> None:
    """So the number of places bounds the bodies in memory."""
    is_over = asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield json.dumps(COMPLETION).encode()[:-1]
        await is_over.wait()
        yield b"}"

    async with app_of(local_grpc, max_requests=1) as app, client_of(app) as client:
        slow = asyncio.create_task(client.post(COMPLETIONS_PATH, content=slow_body()))
        await until(lambda: app.admission.num_running)
        status, text = await post(client, COMPLETIONS_PATH, COMPLETION)
        assert (status, "1 requests are running" in text) == (429, True)
        is_over.set()
        assert (await slow).status_code == 200
        assert (await post(client, COMPLETIONS_PATH, COMPLETION))[0] == 200


async def raw_request(app: Any, body: bytes, size: int) -> tuple[Any, Any]:
    """A connection that sent ``body`` as the beginning of one of ``size`` bytes."""
    reader, writer = await asyncio.open_connection(*app)
    head = f"POST {COMPLETIONS_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def test_a_body_that_does_not_arrive_is_a_408(local_grpc: Local) -> None:
    async with app_of(local_grpc, body_timeout=0.3) as app, serving(app) as [listening]:
        reader, writer = await raw_request(listening.getsockname(), b"", 9)
        answer: bytes = await reader.read()  # to the end: the connection is closed
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")


# Clients that leave or do not read.


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_client_that_leaves_cancels_its_request(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    """Before the first token."""
    monkeypatch.setattr(LocalTriton, "answer", answer_nothing)
    body = json.dumps({**COMPLETION, "stream": is_streaming}).encode()
    async with app_of(local_grpc) as app, serving(app) as [listening]:
        _, writer = await raw_request(listening.getsockname(), body, len(body))
        await until(lambda: local_grpc.triton.arrivals)
        assert app.admission.num_running == 1
        writer.close()
        await until(local_grpc.triton.arrivals[0].is_left.is_set)
        await until(lambda: not app.admission.num_running)


@pytest.mark.parametrize("size", [5, 0])
async def test_a_client_that_leaves_before_its_request_is_parsed_frees_its_place(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """While its body arrives, and while it waits for a thread."""
    is_over = threading.Event()
    monkeypatch.setattr(app_module, "_NUM_THREADS", 1)

    def parse(*arguments: Any) -> Any:
        assert is_over.wait(WAIT_SECONDS)
        raise ValueError

    monkeypatch.setattr(app_module, "parse_completion", parse)
    async with app_of(local_grpc) as app, serving(app) as [listening]:
        address = listening.getsockname()
        _, holder = await raw_request(address, b"", 0)
        await until(lambda: app.admission.num_running == 1)
        _, leaving = await raw_request(address, b"", size)
        await until(lambda: app.admission.num_running == 2)
        leaving.close()
        await until(lambda: app.admission.num_running == 1)
        is_over.set()
        holder.close()


def answer_at_length(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    """More than the kernel takes for a client that reads nothing."""
    is_large = arrival.values["request_output_len"] > 3
    for _ in range(8 if is_large else 1):
        yield {"text_output": ["x" * (MIB // 8 if is_large else 1)], "sequence_length": [1]}


@pytest.mark.slow
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_client_that_does_not_read_holds_a_place_until_it_is_hung_up(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", answer_at_length)
    large = json.dumps({**COMPLETION, "max_tokens": 97, "stream": is_streaming}).encode()
    async with app_of(local_grpc, max_requests=1, timeout=3.0) as app, serving(app) as [listening]:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        address = listening.getsockname()
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect(address)
            head = f"POST {COMPLETIONS_PATH} HTTP/1.1\r\nHost: x\r\n"
            head += f"Content-Length: {len(large)}\r\n\r\n"
            silent.sendall(head.encode() + large)
            await until(lambda: local_grpc.triton.arrivals)
            await until(local_grpc.triton.arrivals[0].is_completed.is_set)
            url = f"http://{address[0]}:{address[1]}"
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                begin = time.monotonic()
                assert (await post(client, COMPLETIONS_PATH, COMPLETION))[0] == 429
                await until(lambda: not app.admission.num_running)
                assert time.monotonic() - begin < 10
                assert (await post(client, COMPLETIONS_PATH, COMPLETION))[0] == 200
            silent.settimeout(WAIT_SECONDS)
            received = sum(map(len, iter(lambda: silent.recv(MIB), b"")))
            assert received < MIB, "the connection ended before the answer"


# Time and threads.


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_an_answer_that_takes_too_long_is_a_504(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", answer_nothing)
    body = {**COMPLETION, "stream": is_streaming}
    answer = await request(local_grpc, "POST", COMPLETIONS_PATH, body=body, timeout=0.5)
    assert (answer.status_code, "took too long" in answer.text) == (504, True)
    assert local_grpc.triton.arrivals[0].is_left.wait(WAIT_SECONDS)


@pytest.fixture
def parsing_may_end(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Chats are parsed when it is set."""
    may_end = threading.Event()

    def parse_late(*arguments: Any) -> Any:
        assert may_end.wait(WAIT_SECONDS / 2)
        return parse_chat(*arguments)

    monkeypatch.setattr(app_module, "parse_chat", parse_late)
    return may_end


async def test_chats_that_are_slow_to_parse_delay_chats_only(
    local_grpc: Local, parsing_may_end: threading.Event
) -> None:
    async with front_of(local_grpc) as client:
        chats = [asyncio.create_task(post(client, CHATS_PATH, CHAT)) for _ in range(12)]
        for _ in range(3):
            assert (await post(client, COMPLETIONS_PATH, COMPLETION))[0] == 200
        assert not any(chat.done() for chat in chats)
        parsing_may_end.set()
        assert [status for status, _ in await asyncio.gather(*chats)] == [200] * 12


async def test_a_request_that_waits_too_long_for_a_thread_is_a_503(
    local_grpc: Local, parsing_may_end: threading.Event
) -> None:
    """The two that have a thread take longer, and are answered."""
    async with front_of(local_grpc, thread_timeout=0.2) as client:
        chats = [asyncio.create_task(post(client, CHATS_PATH, CHAT)) for _ in range(3)]
        [first], others = await asyncio.wait(chats, return_when=asyncio.FIRST_COMPLETED)
        status, text = await first
        assert (status, "too many requests are being read" in text) == (503, True)
        parsing_may_end.set()
        assert [status for status, _ in await asyncio.gather(*others)] == [200] * 2


@pytest.mark.slow
@pytest.mark.case(100, 126)
@pytest.mark.parametrize("seconds", [0.0, 1.0])
async def test_requests_that_run_at_the_drain_limit_are_told_so(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", answer_one_token_and_wait)
    triton, lines = local_grpc.triton, list[str]()

    async def stream(client: httpx.AsyncClient, url: str) -> None:
        body = {**COMPLETION, "stream": True}
        async with client.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)

    async def come_late(client: httpx.AsyncClient, url: str, app: OpenAIApp) -> httpx.Response:
        await until(lambda: app.admission.is_closed)
        return await client.post(url, json=COMPLETION)

    async with (
        app_of(local_grpc, drain_seconds=seconds) as app,
        httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as client,
    ):
        async with serving(app) as [listening]:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}{COMPLETIONS_PATH}"
            answering = asyncio.create_task(client.post(url, json=COMPLETION))
            streaming = asyncio.create_task(stream(client, url))
            await until(lambda: lines and len(triton.arrivals) == 2)
            late = asyncio.create_task(come_late(client, url, app)) if seconds else None
            begin = time.monotonic()
        duration = time.monotonic() - begin
        await streaming
        whole = await answering
        if late is not None:
            found = await late
            assert (found.status_code, found.headers["Retry-After"]) == (503, "1")
    first, error, done = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(first)["choices"][0]["text"] == " 1"
    assert "shutting down" in json.loads(error)["error"]["message"]
    assert done == "[DONE]"
    assert (whole.status_code, "shutting down" in whole.text) == (503, True)
    assert seconds <= duration < seconds + 20
    assert all(arrival.is_left.wait(WAIT_SECONDS) for arrival in triton.arrivals)


# Browsers.

PAGE = "https://chat.example"
# What Firefox sends for a page that uses the `openai` package for JavaScript.
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def ask_from_page(
    local: Local, origins: Sequence[str], body: object = None, origin: str = PAGE
) -> httpx.Response:
    """The answer to a page of ``origin``: to its preflight, or to its request with ``body``."""
    method, headers = ("OPTIONS", PREFLIGHT) if body is None else ("POST", {})
    async with front_of(local, allowed_origins=tuple(origins)) as client:
        return await client.request(
            method, CHATS_PATH, headers={**headers, "Origin": origin}, json=body
        )


@pytest.mark.fast(1)
@pytest.mark.parametrize(("origins", "named"), [([PAGE, "http://b"], PAGE), (["*"], "*")])
async def test_a_page_of_an_allowed_origin_may_call(
    local_grpc: Local, origins: list[str], named: str
) -> None:
    preflight = await ask_from_page(local_grpc, origins)
    assert preflight.status_code == 200
    assert preflight.headers["Access-Control-Allow-Origin"] == named
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    wanted = PREFLIGHT["Access-Control-Request-Headers"]
    assert preflight.headers["Access-Control-Allow-Headers"] == wanted
    for body, status in ((CHAT, 200), ({**CHAT, "stream": True}, 200), ({}, 400)):
        answer = await ask_from_page(local_grpc, origins, body)
        assert answer.status_code == status
        assert answer.headers["Access-Control-Allow-Origin"] == named
        if named == PAGE:  # a cache must not give the answer for one page to another
            assert "Origin" in answer.headers["Vary"]


@pytest.mark.parametrize(
    ("origins", "origin", "status"), [([], PAGE, 405), ([PAGE], "https://evil.example", 400)]
)
async def test_no_other_page_may_call(
    local_grpc: Local, origins: list[str], origin: str, status: int
) -> None:
    preflight = await ask_from_page(local_grpc, origins, origin=origin)
    answer = await ask_from_page(local_grpc, origins, CHAT, origin)
    assert preflight.status_code == status
    for each in (preflight, answer):
        assert "Access-Control-Allow-Origin" not in each.headers


@pytest.mark.parametrize("origin", ["https://chat.example/", "chat.example", "https://a/b", ""])
def test_an_invalid_origin_is_named(origin: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--allow-origin {origin} is no origin"):
        cors(Starlette(), [PAGE, "null", "chrome-extension://abc", origin])
