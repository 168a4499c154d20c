"""Browsers ask before they let a page of another origin call the front."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from client.conftest import Local
from client.openai.front import front_of

from inflight_client.errors import InvalidArgument
from inflight_openai.origins import AllowedOrigins

PAGE = "https://chat.example"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "1 2"}], "max_tokens": 3}
# What Firefox sends for a page that uses the `openai` package for JavaScript.
QUESTION = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def ask(
    local: Local,
    origins: Sequence[str],
    method: str = "OPTIONS",
    headers: Mapping[str, str] = QUESTION,
    origin: str = PAGE,
    body: object = None,
) -> tuple[int, Mapping[str, str]]:
    """Status and headers of one answer."""

    async def run() -> tuple[int, Mapping[str, str]]:
        async with (
            front_of(local, allowed_origins=tuple(origins)) as client,
            client.request(
                method, "/v1/chat/completions", headers={**headers, "Origin": origin}, json=body
            ) as answer,
        ):
            await answer.read()
            return answer.status, answer.headers

    return asyncio.run(run())


@pytest.mark.parametrize(("origins", "named"), [([PAGE, "http://b"], PAGE), (["*"], "*")])
def test_a_page_of_an_allowed_origin_may_call(
    local_grpc: Local, origins: list[str], named: str
) -> None:
    status, headers = ask(local_grpc, origins)
    assert status == 204
    assert headers["Access-Control-Allow-Origin"] == named
    assert "POST" in headers["Access-Control-Allow-Methods"]
    wanted = QUESTION["Access-Control-Request-Headers"]
    assert headers["Access-Control-Allow-Headers"] == wanted
    for is_streaming in (False, True):
        answer = ask(local_grpc, origins, "POST", {}, body={**CHAT, "stream": is_streaming})
        assert (answer[0], answer[1]["Access-Control-Allow-Origin"]) == (200, named)
    # A cache in between must not give the answer for one page to another.
    assert headers.get("Vary") == ("Origin" if named == PAGE else None)
    error = ask(local_grpc, origins, "POST", {}, body={})  # a page is told what is wrong, too
    assert (error[0], error[1]["Access-Control-Allow-Origin"]) == (400, named)


@pytest.mark.parametrize(("origins", "origin"), [([], PAGE), ([PAGE], "https://evil.example")])
def test_no_other_page_may(local_grpc: Local, origins: list[str], origin: str) -> None:
    status, headers = ask(local_grpc, origins, origin=origin)
    assert status == 405
    assert not [name for name in headers if name.startswith("Access-Control-Allow")]
    _, headers = ask(local_grpc, origins, "POST", {}, origin, CHAT)
    assert "Access-Control-Allow-Origin" not in headers
    assert headers.get("Vary") == ("Origin" if origins else None)


@pytest.mark.parametrize("origin", ["null", "chrome-extension://abc", "http://localhost:3000"])
def test_pages_of_files_extensions_and_ports_have_origins(local_grpc: Local, origin: str) -> None:
    _, headers = ask(local_grpc, [origin], origin=origin)
    assert headers["Access-Control-Allow-Origin"] == origin


@pytest.mark.parametrize("origin", ["https://chat.example/", "chat.example", "https://a/b", ""])
def test_what_is_no_origin_is_told(origin: str) -> None:
    with pytest.raises(InvalidArgument, match="is no origin"):
        AllowedOrigins([PAGE, origin])


def test_a_method_that_is_not_there_is_an_error_as_ever(local_grpc: Local) -> None:
    status, _ = ask(local_grpc, ["*"], headers={})
    assert status == 405
