"""Receives requests that our other models relay to ``tensorrt_llm``, and returns the answers."""

from __future__ import annotations

import asyncio
import errno
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from inflight_backend.log import get_logger
from inflight_backend.triton.relay_wire import (
    LENGTHS,
    LastTensors,
    Part,
    RelayedEnd,
    RelayedRequest,
    address_of,
    allow_many_connections,
    is_sibling,
    pack,
    unpack,
)

_logger = get_logger(__name__)

_BACKLOG = 4096
_MAX_ACCEPTED = 64  # at a time
_BIND_PAUSE = 0.05
_ACCEPT_PAUSE = 1.0  # while too many files are open
_CLOSE_SECONDS = 1.0  # for what waits to be written; a message takes 0.02 ms
_SEND_BUFFER_BYTES = 2**13
"""Some twenty tokens of a stream. A relay that is slower than the engine has few of them before it
then, and those behind them travel together."""
_MAX_POSTED = 64
"""Messages of a stream that the listener's thread has not come to; on a busy machine the engine may
make a thousand tokens meanwhile."""


class RelayConnection:
    """The way back of one relayed request, in place of Triton's sender; a send never waits."""

    writer: asyncio.StreamWriter  # from before there is a request

    def __init__(self, post: Callable[[RelayConnection, bytes], None]) -> None:
        """``post`` takes, from any thread, what is to be written to ``writer``."""
        self._post = post
        self._num_posted = self.num_written = 0
        self._is_ended = False
        self.waits_for_room = False  # of the socket: the relay is slower than the engine
        self.is_gone = False

    @property
    def num_waiting(self) -> int:
        """Messages that are posted and not written yet."""
        return self._num_posted - self.num_written

    @property
    def is_behind(self) -> bool:
        """True while what is sent would only pile up here."""
        return self.waits_for_room or self.num_waiting >= _MAX_POSTED

    @property
    def is_done(self) -> bool:
        """True once the whole answer was written, or its reader is gone."""
        return self.is_gone or (
            self._is_ended  # first, since another thread may post the end just now
            and self.num_waiting == 0
            and not self.waits_for_room
        )

    def send(self, response: Part | None = None, flags: int = 0) -> None:
        """See `TritonSender.send`; what is sent after the relay has gone is lost."""
        if flags and isinstance(response, dict):
            response = LastTensors(response)
        message = b"" if response is None else pack(response)
        if flags:
            message += pack(RelayedEnd())
        self._num_posted += 1
        self._is_ended = bool(flags)
        if not self.is_gone:
            self._post(self, message)

    def is_cancelled(self) -> bool:
        """See `TritonSender.is_cancelled`."""
        return self.is_gone


class RelayListener:
    """Takes requests until `shut`, writes answers until `close`; has two threads of its own."""

    def __init__(
        self,
        model: str,
        accept: Callable[[RelayedRequest, RelayConnection], None],
        on_room: Callable[[], None],
    ) -> None:
        """Listen for the model ``model``, as soon as no other process does.

        While a model is loaded again, Triton has two processes of it for a while. ``accept`` takes
        a request and its way back; ``on_room`` is called when a relay that was behind has caught
        up.
        """
        allow_many_connections()
        self._address = address_of(model)
        self._accept = accept
        self._on_room = on_room
        self._open: set[RelayConnection] = set()
        self._accepted: queue.SimpleQueue[tuple[RelayedRequest, RelayConnection] | None]
        self._accepted = queue.SimpleQueue()
        self._posted: deque[tuple[RelayConnection, bytes]] = deque()
        self._is_writing = False
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself would forget them
        self._loop = asyncio.new_event_loop()
        self._shutting, self._closing = asyncio.Event(), asyncio.Event()
        self._is_shut = False
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run, "RelayListener"), (self._take, "RelayAccept"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        """Requests whose relay has not closed yet: it does when its own client was told."""
        return len(self._open)

    @property
    def is_done(self) -> bool:
        """True once no more requests come (see `shut`) and no answer has still to be written."""
        return self._is_shut and all(connection.is_done for connection in list(self._open))

    def shut(self) -> None:
        """Take no more requests; those of connected relays are still served."""
        self._tell(self._shutting.set)

    def close(self) -> None:
        """Write what still waits, for a second at most, then cut what is open."""
        self.shut()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while not self.is_done and time.monotonic() < deadline:
            time.sleep(0.005)
        self._tell(self._closing.set)
        self._accepted.put(None)
        for thread in self._threads:
            thread.join()

    def _take(self) -> None:
        while (taken := self._accepted.get()) is not None:
            try:
                self._accept(*taken)
            except BaseException:  # no other thread would take the next ones
                _logger.exception("a relayed request could not be taken")

    def _post(self, connection: RelayConnection, message: bytes) -> None:
        self._posted.append((connection, message))
        if not self._is_writing:  # one call for all that is sent in a round
            self._is_writing = True
            self._tell(self._write)

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(what)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        except BaseException:
            _logger.exception("no more requests can be relayed")
        finally:
            self._is_shut = True
            self._loop.close()

    async def _listen(self) -> None:
        if (listening := await self._bind()) is not None:
            with listening:
                self._watch(listening)
                await self._shutting.wait()
                listening.shutdown(socket.SHUT_RD)  # who comes later asks a model loaded again
                while self._accept_one(listening):
                    pass
                self._loop.remove_reader(listening)
        self._is_shut = True
        await self._closing.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _bind(self) -> socket.socket | None:
        while not self._shutting.is_set():
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                listening.bind(self._address)
                listening.listen(_BACKLOG)
                return listening
            except OSError as error:
                listening.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            await asyncio.sleep(_BIND_PAUSE)
        return None

    def _watch(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept_some, listening)

    def _accept_some(self, listening: socket.socket) -> None:
        """Not all: a sender without end would keep all others from being served."""
        for _ in range(_MAX_ACCEPTED):
            if not self._accept_one(listening):
                return

    def _accept_one(self, listening: socket.socket) -> bool:
        """False without a connection. (asyncio's servers lose those when they are closed.)"""
        try:
            unix_socket, _ = listening.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            _logger.error("no relay can connect for a while: %s", error.strerror)
            self._loop.remove_reader(listening)
            self._loop.call_later(_ACCEPT_PAUSE, self._watch, listening)
            return False
        if is_sibling(unix_socket):
            connection = RelayConnection(self._post)
            self._open.add(connection)  # now, for `is_done`
            self._start(self._serve(connection, unix_socket))
        else:
            unix_socket.close()  # now, so that many of them take no descriptors from others
        return True

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: RelayConnection, unix_socket: socket.socket) -> None:
        """One request: its relay closes when it has passed on the end, or does not need it."""
        writer = None
        try:
            unix_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            reader, writer = await asyncio.open_unix_connection(sock=unix_socket)
            writer.transport.set_write_buffer_limits(0)
            connection.writer = writer
            self._accepted.put((await _read_request(reader), connection))
            await reader.read(1)
        except (OSError, asyncio.IncompleteReadError):
            pass  # it has gone
        except Exception:
            _logger.exception("a relayed request could not be read")
        finally:
            connection.is_gone = True
            self._open.discard(connection)
            if writer is None:
                unix_socket.close()
            else:
                writer.transport.abort()

    def _write(self) -> None:
        self._is_writing = False  # first: what is posted from now on asks again
        while self._posted:
            connection, message = self._posted.popleft()
            try:
                self._write_to(connection, message)
            except BaseException:  # as MemoryError: the relay must not take the rest for all
                _logger.exception("a part of an answer could not be written; its relay is cut off")
                connection.is_gone = True
                connection.writer.transport.abort()
            connection.num_written += 1  # not before: for `is_done`
            if connection.num_waiting == _MAX_POSTED - 1:  # now: more may be posted any moment
                self._on_room()

    def _write_to(self, connection: RelayConnection, message: bytes) -> None:
        if not connection.is_gone:
            connection.writer.write(message)
        if connection.writer.transport.get_write_buffer_size() and not connection.waits_for_room:
            connection.waits_for_room = True
            self._start(self._wait_for_room(connection))

    async def _wait_for_room(self, connection: RelayConnection) -> None:
        try:
            await connection.writer.drain()
        except OSError:
            pass  # it has gone
        finally:
            connection.waits_for_room = False
            self._on_room()


async def _read_request(reader: asyncio.StreamReader) -> RelayedRequest:
    head_size, contents_size = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
    head, contents = await reader.readexactly(head_size), await reader.readexactly(contents_size)
    message = unpack(head, contents)
    if not isinstance(message, RelayedRequest):
        raise TypeError(f"{type(message).__name__} in place of a request")
    return message
