"""The front over a local server: health, and requests that are many, slow or fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from client.conftest import Local
from client.openai.front import front_of
from yarl import URL

from inflight_client.address import parse_address
from inflight_client.errors import InvalidArgument
from inflight_openai import chat_template
from inflight_openai.server_info import find_metrics_url

WAIT_SECONDS = 60.0
COMPLETION = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "1 2"}], "max_tokens": 3}
SLOW_TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("refusal", ["", "[UNAVAILABLE] the server is shutting down"])
def test_health_is_what_the_model_says(local_grpc: Local, refusal: str) -> None:
    """Triton calls it ready all the same."""
    local_grpc.triton.refusal = refusal

    async def ask() -> int:
        async with front_of(local_grpc) as client, client.get("/health") as answer:
            return answer.status

    assert asyncio.run(ask()) == (503 if refusal else 200)


@pytest.mark.parametrize(
    ("method", "path", "status", "hint"),
    [
        ("POST", "/v1/responses", 404, "Not Found: POST; there are POST /v1/completions"),
        ("GET", "/v1/completions", 405, "Method Not Allowed: GET; there are POST /v1/completions"),
        ("GET", "/v1/models/other", 404, "the model does not exist here; this is demo"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    local_grpc: Local, method: str, path: str, status: int, hint: str
) -> None:
    async def ask() -> tuple[int, Any]:
        async with front_of(local_grpc) as client, client.request(method, path) as answer:
            return answer.status, (await answer.json())["error"]["message"]

    found, message = asyncio.run(ask())
    assert found == status
    assert message.startswith(hint)


def test_the_name_of_a_model_may_have_slashes(local_grpc: Local) -> None:
    """As those of hubs have."""

    async def ask(path: str) -> tuple[int, Any]:
        async with (
            front_of(local_grpc, served_name="org/name") as client,
            client.get(URL(path, encoded=True)) as answer,
        ):
            return answer.status, (await answer.json()).get("id")

    for name in ("org/name", "org%2Fname"):
        assert asyncio.run(ask(f"/v1/models/{name}")) == (200, "org/name")
    assert asyncio.run(ask("/v1/models/org/other"))[0] == 404


async def post(client: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
    async with client.post(path, json=body) as answer:
        return answer.status, await answer.text()


def test_a_slow_template_holds_up_its_own_request_only(
    local_grpc: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 4.0)
    template = tmp_path / "template.jinja"
    template.write_text(SLOW_TEMPLATE)

    async def ask() -> tuple[int, str, int]:
        async with front_of(local_grpc, chat_template=template) as client:
            chat = asyncio.create_task(post(client, "/v1/chat/completions", CHAT))
            num_served = 0
            while not chat.done():
                assert (await post(client, "/v1/completions", COMPLETION))[0] == 200
                num_served += 1
            return *await chat, num_served

    status, text, num_served = asyncio.run(ask())
    assert (status, "it takes longer than 4 s" in text) == (400, True)
    assert num_served > 3, "of those that came before and after it"


def test_who_sends_its_body_slowly_has_one_of_the_places(local_grpc: Local) -> None:
    """So that bodies in memory are bounded by their number."""
    body = json.dumps(COMPLETION).encode()

    async def ask() -> None:
        has_place, is_over = asyncio.Event(), asyncio.Event()

        async def slow_body() -> AsyncIterator[bytes]:
            has_place.set()  # it is asked for (100 Continue)
            yield body[:-1]
            await is_over.wait()
            yield body[-1:]

        async def send_slowly(client: aiohttp.ClientSession) -> int:
            path = "/v1/completions"
            async with client.post(path, data=slow_body(), expect100=True) as answer:
                return answer.status

        async with front_of(local_grpc, max_requests=1) as client:
            slow = asyncio.create_task(send_slowly(client))
            await has_place.wait()
            status, text = await post(client, "/v1/completions", COMPLETION)
            assert (status, "1 requests are running" in text) == (429, True)
            is_over.set()
            assert await slow == 200
            assert (await post(client, "/v1/completions", COMPLETION))[0] == 200

    asyncio.run(asyncio.wait_for(ask(), WAIT_SECONDS))


def test_whatever_fails_in_mid_stream_is_an_event_and_no_second_head(
    local_grpc: Local, caplog: pytest.LogCaptureFixture
) -> None:
    local_grpc.triton.is_strange = True

    async def ask() -> tuple[int, str]:
        async with front_of(local_grpc) as client:
            return await post(client, "/v1/completions", {**COMPLETION, "n": 2, "stream": True})

    status, text = asyncio.run(ask())
    assert status == 200
    assert "HTTP/1.1" not in text
    error, done = [line.removeprefix("data: ") for line in text.splitlines() if line][-2:]
    assert (json.loads(error)["error"]["message"], done) == ("the request failed", "[DONE]")
    assert "IndexError" in caplog.text


@pytest.mark.parametrize(
    ("url", "status", "words"),
    [
        ("", 404, "are not shown here"),
        ("http://127.0.0.1:1/metrics", 503, "cannot be reached: start inflight openai with"),
        ("http://{}/v2/models/none/ready", 502, "answers 400"),
    ],
)
def test_a_metrics_page_that_is_not_there_says_so(
    local_grpc: Local, local_http: Local, url: str, status: int, words: str
) -> None:
    """And nothing of where it should be."""

    async def ask() -> tuple[int, str]:
        own = url.format(local_http.url)
        async with front_of(local_grpc, metrics_url=own) as client, client.get("/metrics") as page:
            return page.status, (await page.json())["error"]["message"]

    found, message = asyncio.run(ask())
    assert (found, words in message, "127.0.0.1" in message) == (status, True, False)


@pytest.mark.parametrize("url", ["8002", "ftp://a/b", "http://"])
def test_a_metrics_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(InvalidArgument, match="--metrics-url"):
        find_metrics_url(url, parse_address("10.0.0.1:9001", "grpc"))


@pytest.mark.parametrize("given", [None, "", "https://m/metrics"])
def test_the_metrics_page_is_the_server_s_unless_another_is_named(given: str | None) -> None:
    found = find_metrics_url(given, parse_address("10.0.0.1:9001", "grpc"))
    assert found == ("http://10.0.0.1:8002/metrics" if given is None else given)


def test_a_client_s_id_names_its_answer_and_not_its_request(local_grpc: Local) -> None:
    """Two of the same would meet on the server."""

    async def ask() -> list[str]:
        async with front_of(local_grpc) as client:
            body = COMPLETION | {"request_id": "mine"}
            return [
                json.loads((await post(client, "/v1/completions", body))[1])["id"] for _ in "12"
            ]

    assert asyncio.run(ask()) == ["cmpl-mine"] * 2
    ids = [arrival.request_id for arrival in local_grpc.triton.arrivals]
    assert len(set(ids)) == len(ids)
    assert "cmpl-mine" not in ids
