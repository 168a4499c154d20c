"""One run of the front: ask the server what it serves, listen, and stop in good order."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import typer
from aiohttp import web

from inflight_openai.app import Front
from inflight_openai.messages import LogHandler, say
from inflight_openai.private_log import get_logger
from inflight_openai.prompts import PromptReader, make_prompt_reader
from inflight_openai.server_info import find_metrics_url
from inflight_openai.settings import FrontSettings
from inflight_openai.upstream import Upstream

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 130
_CLOSING_SECONDS = 0.5  # the front waits for its requests itself; aiohttp takes this long twice

_Result = TypeVar("_Result")


def run(settings: FrontSettings) -> None:
    """Serve until asked to stop; `InflightError` or ``OSError`` if starting fails."""
    logging.root.addHandler(LogHandler())
    try:
        asyncio.run(_run(settings))
    except KeyboardInterrupt:  # a second Ctrl-C does not wait for running requests
        raise typer.Exit(_INTERRUPTED) from None


def make_runner(settings: FrontSettings, front: Front) -> web.AppRunner:
    """What serves the front; nothing of a request is logged."""
    return web.AppRunner(
        front.app(),
        access_log=None,
        logger=get_logger(__name__),  # aiohttp's own quotes what it cannot read
        handler_cancellation=True,
        shutdown_timeout=_CLOSING_SECONDS,
    )


async def _run(settings: FrontSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # nohup ignores SIGHUP on purpose.
    numbers = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    upstream = Upstream(settings.url, settings.timeout, settings.headers)
    try:
        metrics_url = find_metrics_url(settings.metrics_url, upstream.address)
        settings = replace(settings, metrics_url=metrics_url)
        description = await _unless(stop, upstream.describe())
        if description is None:
            return
        reader = make_prompt_reader(description, settings.served_name, settings.chat_template)
        runner = make_runner(settings, Front(settings, upstream, reader))
        await runner.setup()
        try:
            await _listen(runner, settings)
            say(_ready_block(settings, upstream, reader))
            await stop.wait()
            say(
                f"stopping: running requests may finish within {settings.drain_seconds:g} s",
                err=True,
            )
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
            await runner.cleanup()
    finally:
        await upstream.close()


async def _listen(runner: web.AppRunner, settings: FrontSettings) -> None:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        is_known = error.errno is not None and error.errno > 0  # not one of looking a name up
        reason = os.strerror(error.errno or 0) if is_known else error.strerror or str(error)
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise OSError(
                f"--port {settings.port} cannot be used on {settings.host} ({reason}): "
                "stop what uses it or choose another port"
            ) from None
        raise OSError(f"--host {settings.host} cannot be used ({reason})") from None


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """What ``work`` gives; None if ``stop`` is set before."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _ready_block(settings: FrontSettings, upstream: Upstream, reader: PromptReader) -> str:
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    chat = "yes" if reader.has_template else "no: the checkpoint has no chat template"
    return f"""
inflight openai is ready

  API        http://{host}:{settings.port}/v1
  model      {reader.name}, up to {reader.limits.max_seq_len} tokens per request
  chat       {chat}
  server     {upstream.address}

Ctrl-C stops it."""
