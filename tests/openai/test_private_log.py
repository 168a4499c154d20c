"""What a failing request leaves in the log of `inflight openai`: where, and none of its text."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from unittest import mock

import pytest

from inflight_openai import app
from inflight_openai.app import Front
from inflight_openai.running import make_runner
from inflight_openai.settings import FrontSettings

BODY = b'{"prompt": "SECRETWORD"}'


async def answers_to(*requests: bytes) -> list[bytes]:
    """The status lines to requests on one connection to a front without a server behind it."""
    from aiohttp import web

    nobody: Any = None
    settings = FrontSettings()
    runner = make_runner(settings, Front(settings, nobody, nobody))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        lines = []
        for request in requests:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            lines.append(head.partition(b"\r\n")[0])
            (size,) = [int(x[15:]) for x in head.split(b"\r\n") if x.startswith(b"Content-Length")]
            await reader.readexactly(size)
        writer.close()
        return lines
    finally:
        await runner.cleanup()


def post(body: bytes, size: int, header: str = "") -> bytes:
    """A request that says its body has ``size`` bytes."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{header}Content-Length: {size}\r\n\r\n"
    return head.encode() + body


class Panic(BaseException):
    """As of a library in Rust."""


@pytest.mark.case(123)
@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_what_an_exception_quotes_is_not_logged(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    caplog.set_level(logging.DEBUG)
    error = kind("no such thing in 'SECRETWORD'")
    with mock.patch.object(app, "parse_completion", side_effect=error):
        (line,) = asyncio.run(answers_to(post(BODY, len(BODY))))
    assert b" 500 " in line
    assert kind.__name__ in caplog.text
    assert "in <lambda>" in caplog.text
    assert "SECRETWORD" not in caplog.text


@pytest.mark.case(123)
def test_a_body_longer_than_it_says_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What is left over comes to aiohttp as the next request, which it cannot read."""
    caplog.set_level(logging.DEBUG)
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    lines = asyncio.run(answers_to(health, b"SECRETWORD{} /\r\n\r\n"))
    assert b" 400 " in lines[1]
    assert "Error handling request" in caplog.text
    assert "SECRETWORD" not in caplog.text


@pytest.mark.case(123)
def test_a_body_that_is_not_encoded_as_it_says_is_the_client_s_mistake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And no failure of ours, also in the log."""
    (line,) = asyncio.run(answers_to(post(BODY, len(BODY), "Content-Encoding: gzip\r\n")))
    assert b" 400 " in line
    assert "a request failed" not in caplog.text
