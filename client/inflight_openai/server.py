"""One run of `inflight openai`: ask the server for its model, listen, drain, exit."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from queue import Full, Queue
from typing import TextIO

import anyio
import typer
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inflight_backend.log import leave_out_messages
from inflight_client.cli import EXIT_INTERRUPTED
from inflight_openai.app import OpenAIApp
from inflight_openai.prompts import PromptReader, make_prompt_reader
from inflight_openai.settings import FrontSettings
from inflight_openai.triton_client import MetricsPage, TritonClient

HEAD_SECONDS = 30.0
"""For the head of a request, and for a new connection to begin one."""

MAX_HEAD_BYTES = 2**16

_KEEP_ALIVE_SECONDS = 75
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_SECONDS = 10  # of uvicorn's own limit, after the drain has ended all requests
_FLUSH_SECONDS = 0.5
_MAX_LINES = 1000  # of the log that wait to be written; more are dropped


def run(settings: FrontSettings) -> None:
    """Serve until asked to stop; `InflightError` or ``OSError`` if starting fails."""
    console = Console()
    logging.root.addHandler(console)
    try:
        asyncio.run(_run(settings, console))
    except KeyboardInterrupt:  # a second Ctrl-C does not wait for running requests
        raise typer.Exit(EXIT_INTERRUPTED) from None


async def _run(settings: FrontSettings, console: Console) -> None:
    starting, stop = anyio.CancelScope(), asyncio.Event()

    def on_signal() -> None:
        starting.cancel()
        stop.set()

    triton = TritonClient(settings.url, settings.timeout, settings.headers)
    try:
        with _first_signal(on_signal):
            metrics = MetricsPage(settings.metrics_url, triton.address)
            with starting:
                description = await triton.describe()
            if starting.cancelled_caught:
                return
            reader = make_prompt_reader(
                description, settings.served_name, settings.chat_template, settings.tool_parser
            )
            reader.adapters = frozenset(description.get("lora_adapters", ()))
            async with serving(OpenAIApp(settings, triton, reader, metrics)):
                console.print(_ready_block(settings, triton, reader), sys.stdout)
                await stop.wait()
                seconds = f"{settings.drain_seconds:g} s"
                console.print(f"stopping: running requests may finish within {seconds}", sys.stderr)
    finally:
        await triton.close()


@contextmanager
def _first_signal(callback: Callable[[], None]) -> Iterator[None]:
    """Call ``callback`` at the first signal; after it signals do what they do by default."""
    loop = asyncio.get_running_loop()
    # nohup ignores SIGHUP on purpose.
    numbers = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        restore()
        callback()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        restore()


@asynccontextmanager
async def serving(app: OpenAIApp) -> AsyncIterator[Sequence[socket.socket]]:
    """Serve ``app`` on the sockets until the block ends. Then let running requests finish for the
    drain time, while new ones are told that it stops, end the others, and close."""
    settings = app.settings
    config = uvicorn.Config(
        app.asgi(),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_seconds) + _LAST_SECONDS,
    )
    sockets = await _listen(settings)
    server = _Server(config)
    task = asyncio.create_task(server.serve(list(sockets)))
    try:
        yield sockets
    finally:
        await app.admission.close(settings.drain_seconds)
        server.should_exit = True  # not before: it listens no longer then
        await task


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run`."""
        yield


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, with limits for clients that send or read slowly.

    The head of a request has `HEAD_SECONDS` and `MAX_HEAD_BYTES`. A message of the application
    waits until the kernel has those before it (uvicorn's own limit leaves 64 KiB in a buffer), and
    the application finds the transport in ``scope["state"]``, to hang up.
    """

    _deadline: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)
        self.app_state = {"transport": transport}
        self._deadline = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self._deadline is not None:  # still in a head
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def on_headers_complete(self) -> None:
        """A head ends."""
        self._end_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end_head()
        super().connection_lost(exc)
        # After a reset uvicorn leaves its timer for the next request to the event loop, and with it
        # the connection and all of its last request.
        self._unset_keepalive_if_required()

    def _end_head(self) -> None:
        self._num_head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


async def _listen(settings: FrontSettings) -> list[socket.socket]:
    host, port = settings.host, settings.port
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = [
            socket.create_server(address, family=family)
            for family, _, _, _, address in dict.fromkeys(found)
        ]
    except OSError as error:
        is_known = error.errno is not None and error.errno > 0  # not one of name resolution
        reason = os.strerror(error.errno or 0) if is_known else error.strerror or str(error)
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise OSError(
                f"--port {port} cannot be used on {host} ({reason}): "
                "stop what uses it or choose another port"
            ) from None
        raise OSError(f"--host {host} cannot be used ({reason})") from None
    for each in listening:  # asyncio does it for sockets of its own only
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class Console(logging.Handler):
    """The log on stderr, without what exceptions say, and other lines; written by a thread.

    A write may wait for ever (a pager, Ctrl-S) or fail (a reader that is gone, a full disk), and
    the event loop must not. It bypasses the buffers of Python's streams, whose last flush would
    otherwise change the exit code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(leave_out_messages)
        self._lines: Queue[tuple[int, bytes]] = Queue(_MAX_LINES)
        threading.Thread(target=self._write, name="Console", daemon=True).start()

    def print(self, text: str, stream: TextIO | None) -> None:
        """A line on ``stream``; dropped if too many wait, or if the stream was closed at start."""
        if stream is not None:
            with suppress(Full):
                self._lines.put_nowait((stream.fileno(), f"{text}\n".encode(errors="replace")))

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        with suppress(Exception):  # a record whose arguments do not fit its message
            self.print(self.format(record), sys.stderr)

    def flush(self) -> None:
        """Wait for the thread, but not long: there may be no reader. Called at exit."""
        done = self._lines.all_tasks_done
        with done:
            done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_SECONDS)

    def _write(self) -> None:
        while True:
            descriptor, line = self._lines.get()
            with suppress(OSError):
                while line:
                    line = line[os.write(descriptor, line) :]
            self._lines.task_done()


def _ready_block(settings: FrontSettings, triton: TritonClient, reader: PromptReader) -> str:
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    page = f"\n  page       http://{host}:{settings.port}/" if settings.has_page else ""
    chat = "yes" if reader.has_template else "no: the checkpoint has no chat template"
    return f"""
inflight openai is ready

  API        http://{host}:{settings.port}/v1{page}
  model      {reader.name}, up to {reader.limits.max_seq_len} tokens per request
  chat       {chat}
  server     {triton.address}

Ctrl-C stops it."""
