"""The live page over a local server: its files, its stream of events, and its calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import httpx
import pytest
from client.conftest import Local
from support.local_server import Arrival, LocalTriton, ModelError
from support.openai_front import app_of, client_of, front_of

from inflight_openai.page import feed, routes, whatif
from inflight_openai.page.feed import MAX_SHARE, PERIOD_SECONDS, LiveFeed
from inflight_openai.page.routes import FILES
from inflight_openai.page.texts import MAX_PROMPT_TOKENS, TextLog
from inflight_openai.triton_client import Piece, TritonClient

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_loop")]

MAX_BYTES = 300_000
CALLS = [
    ("GET", "/page/info"),
    ("GET", "/page/events"),
    ("GET", "/page/blocks"),
    ("GET", "/page/text"),
    ("POST", "/page/stop"),
    ("POST", "/page/whatif"),
]


async def events(client: httpx.AsyncClient, number: int) -> list[dict[str, Any]]:
    """The first events."""
    found: list[dict[str, Any]] = []
    async with client.stream("GET", "/page/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == number:
                break
    return found


async def test_files_are_small_and_load_nothing_from_elsewhere(local_grpc: Local) -> None:
    assert sum(len(content) for content, _ in FILES.values()) <= MAX_BYTES
    async with front_of(local_grpc, api_keys=("secret",)) as client:
        for path, (content, kind) in FILES.items():
            answer = await client.get(path)
            assert (answer.status_code, answer.content) == (200, content)
            assert answer.headers["content-type"] == kind
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            if path != "/page/uplot.LICENSE.txt":
                assert b"//cdn" not in content
        index = FILES["/"][0].decode()
        assert "<script>" not in index
        assert "onclick" not in index
        assert "style=" not in index


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_no_other_origin_may_call(local_grpc: Local, method: str, path: str) -> None:
    async with front_of(local_grpc, allowed_origins=("*",)) as client:
        for site in ("cross-site", "same-site"):
            headers = {"Sec-Fetch-Site": site, "Origin": "http://other"}
            answer = await client.request(method, path, json={}, headers=headers)
            assert answer.status_code == 403
            assert "Access-Control-Allow-Origin" not in answer.headers
        headers = {"Origin": "http://other", "Access-Control-Request-Method": method}
        preflight = await client.options(path, headers=headers)
        assert preflight.status_code == 405
        assert "Access-Control-Allow-Origin" not in preflight.headers
        own = await client.get("/page/info", headers={"Sec-Fetch-Site": "same-origin"})
        assert own.status_code == 200


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_calls_need_the_key(local_grpc: Local, method: str, path: str) -> None:
    async with front_of(local_grpc, api_keys=("secret",)) as client:
        assert (await client.request(method, path, json={})).status_code == 401


async def test_without_the_page_there_is_none(local_grpc: Local) -> None:
    async with front_of(local_grpc, has_page=False) as client:
        assert (await client.get("/")).status_code == 404
        assert (await client.get("/page/info")).status_code == 404


async def test_info_says_what_the_playground_needs(local_grpc: Local) -> None:
    async with front_of(local_grpc) as client:
        info = (await client.get("/page/info")).json()
    assert info.pop("version")
    assert "guaranteed_no_evict" in info.pop("policies")
    assert info == {
        "model": "demo",
        "models": ["demo"],
        "has_chat": True,
        "max_seq_len": 100,
        "shows_text": False,
    }


async def test_each_viewer_follows_its_own_cursor(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "PERIOD_SECONDS", 0.01)
    async with front_of(local_grpc) as client:
        both = await asyncio.gather(events(client, 3), events(client, 3))
        assert [[each["since"] for each in found] for found in both] == [["0", "1", "2"]] * 2
        assert (await client.get("/page/blocks")).json() == {"blocks": [[1, 2], [-1, 6]]}


async def test_a_server_that_is_away_is_told_and_asked_again(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(feed, "PERIOD_SECONDS", 0.01)
    answer, num_calls = LocalTriton.answer, 0

    def sometimes(self: LocalTriton, arrival: Arrival) -> Any:
        nonlocal num_calls
        num_calls += bool(arrival.values.get("live"))
        if num_calls == 2:
            raise ModelError("the server is shutting down")
        return answer(self, arrival)

    monkeypatch.setattr(LocalTriton, "answer", sometimes)
    async with front_of(local_grpc) as client:
        found = await events(client, 3)
    assert [each.get("since") for each in found] == ["0", None, "1"]
    assert found[1] == {"down": "the server is shutting down"}


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        ('{"request_id": "mine"}', "application/json", 200),
        ('{"request_id": "mine"}', "text/plain", 415),  # what any page's form could send
        ('{"request_id": ""}', "application/json", 400),
        ("[]", "application/json", 400),
        ("[" * 10_000, "application/json", 400),  # deeper than the parser goes
        ("x" * 20_000, "application/json", 413),
    ],
)
async def test_stop(local_grpc: Local, body: str, kind: str, status: int) -> None:
    async with front_of(local_grpc) as client:
        answer = await client.post("/page/stop", content=body, headers={"Content-Type": kind})
        assert answer.status_code == status
    assert local_grpc.triton.stops == ({"mine"} if status == 200 else set())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"policy": "other"}, "policy: choose one of "),
        ({"policy": []}, "policy: choose one of "),
        ({"num_blocks": 0}, "num_blocks: expected a number from 1"),
        ({"max_batch_size": True}, "max_batch_size: expected a number from 1"),
        ({"color": 1}, "color: not a setting of a prediction"),
        ({}, "the recording has format version 1"),  # what the local server sends
    ],
)
async def test_a_prediction_that_cannot_be_made_says_why(
    local_grpc: Local, body: dict[str, Any], message: str
) -> None:
    async with front_of(local_grpc) as client:
        answer = await client.post("/page/whatif", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("shows_text", [False, True])
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_texts_are_shown_if_they_are_to_be(
    local_grpc: Local,
    monkeypatch: pytest.MonkeyPatch,
    shows_text: bool,
    is_streaming: bool,
) -> None:
    def answer(self: LocalTriton, arrival: Arrival) -> Any:
        self.arrive(arrival.request_id, arrival.values, arrival.outputs)
        yield {"text_output": [" 3"], "sequence_length": [2]}
        yield {"text_output": [" 4"], "sequence_length": [2]}

    monkeypatch.setattr(LocalTriton, "answer", answer)
    body = {"model": "demo", "prompt": ["1 2", "5 6"], "max_tokens": 4, "stream": is_streaming}
    async with front_of(local_grpc, shows_text=shows_text) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        second = max(each.request_id for each in local_grpc.triton.arrivals)
        found = await client.get("/page/text", params={"id": second})
        if shows_text:
            assert found.json() == {"prompt": "5 6", "answer": " 3 4"}
            other = await client.get("/page/text", params={"id": "other"})
            assert other.status_code == 404
        else:
            assert found.status_code == 404


async def test_a_prediction_whose_process_is_killed_says_so(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def code(self: TritonClient) -> str:
        return "import os; os._exit(9)"

    monkeypatch.setattr(TritonClient, "recording", code)
    monkeypatch.setattr(whatif, "run", exec)
    async with front_of(local_grpc) as client:
        answer = await client.post("/page/whatif", json={})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "prediction_ended"


async def test_a_client_that_leaves_ends_its_prediction(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def endless(self: TritonClient) -> str:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()
        return ""

    monkeypatch.setattr(TritonClient, "recording", endless)
    async with front_of(local_grpc) as client:
        asked = asyncio.create_task(client.post("/page/whatif", json={}))
        await asyncio.wait_for(has_begun.wait(), 30)
        assert (await client.post("/page/whatif", json={})).status_code == 429
        asked.cancel()
        await asyncio.wait_for(has_ended.wait(), 30)


async def test_a_viewer_that_does_not_read_gives_its_place_back(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)
    monkeypatch.setattr(feed, "PERIOD_SECONDS", 0.001)
    monkeypatch.setattr(routes, "_SEND_SECONDS", 0.2)

    async def long(self: TritonClient, cursor: str, **_: Any) -> dict[str, Any]:
        return {"cursor": cursor, "cost_us": 1, "padding": "x" * 2**20}

    monkeypatch.setattr(TritonClient, "live", long)
    async with front_of(local_grpc) as client:
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET /page/events HTTP/1.1\r\nHost: here\r\n\r\n")
        await reader.readline()
        assert (await client.get("/page/events")).status_code == 503
        with anyio.fail_after(30):
            while True:
                async with client.stream("GET", "/page/events") as answer:
                    if answer.status_code == 200:
                        break
                await asyncio.sleep(0.01)
        writer.close()


async def test_all_viewers_share_a_map(local_grpc: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "PERIOD_SECONDS", 600.0)
    answer, num_maps = LocalTriton.answer, 0

    def counted(self: LocalTriton, arrival: Arrival) -> Any:
        nonlocal num_maps
        num_maps += bool(arrival.values.get("live_blocks"))
        return answer(self, arrival)

    monkeypatch.setattr(LocalTriton, "answer", counted)
    async with front_of(local_grpc) as client:
        found = await asyncio.gather(*(client.get("/page/blocks") for _ in range(5)))
    assert [each.json() for each in found] == [{"blocks": [[1, 2], [-1, 6]]}] * 5
    assert num_maps == 1


async def test_the_end_of_a_long_prompt_is_kept() -> None:
    async def no_pieces() -> AsyncGenerator[Piece, None]:
        return
        yield

    log = TextLog(lambda ids: f"{len(ids)} to {ids[-1]}")
    assert [each async for each in log.follow(no_pieces(), ["a"], [range(9000)], 1)] == []
    assert log.find("a") == {"prompt": f"{MAX_PROMPT_TOKENS} to 8999", "answer": ""}


async def test_viewers_take_a_bounded_share_of_the_server(local_grpc: Local) -> None:
    async with app_of(local_grpc) as app, client_of(app) as client:
        await events(client, 1)
        watched = LiveFeed(app.triton.live)
        assert watched.period(0.0001) == PERIOD_SECONDS
        assert watched.period(0.05) == pytest.approx(0.05 / MAX_SHARE)
        with watched.place(), watched.place():
            assert watched.period(0.05) == pytest.approx(2 * 0.05 / MAX_SHARE)
            await watched.blocks()
            assert watched.period(0.05) == pytest.approx(3 * 0.05 / MAX_SHARE)
