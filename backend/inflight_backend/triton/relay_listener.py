"""Where ``tensorrt_llm`` takes requests from the models that relay, and sends the answers."""

from __future__ import annotations

import asyncio
import errno
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from inflight_backend.private_log import get_logger
from inflight_backend.triton.relay_messages import (
    LENGTHS,
    Part,
    RelayedEnd,
    RelayedRequest,
    pack,
    unpack,
)
from inflight_backend.triton.relay_socket import address_of, allow_many_connections, is_sibling

_logger = get_logger(__name__)

_BACKLOG = 4096
_BIND_PAUSE = 0.05
_CLOSE_SECONDS = 1.0  # for what waits to be written; a message takes 0.02 ms
_SEND_BUFFER_BYTES = 2**13
"""Some twenty tokens of a stream. A relay that is slower than the engine has few of them before it
then, and those behind them travel together."""


class RelayConnection:
    """The way back of one relayed request, in place of Triton's sender; a send never waits."""

    def __init__(
        self, writer: asyncio.StreamWriter, post: Callable[[RelayConnection, bytes], None]
    ) -> None:
        """``post`` takes, from any thread, what is to be written to ``writer``."""
        self.writer = writer
        self._post = post
        self._num_posted = self.num_written = 0
        self._is_ended = False
        self.is_behind = False  # something waits for room: the relay is slower than the engine
        self.is_gone = False

    @property
    def is_done(self) -> bool:
        """True once the whole answer was written, or nobody is there any more to read it."""
        is_written = self.num_written == self._num_posted and not self.is_behind
        return self.is_gone or (self._is_ended and is_written)

    def send(self, response: Part | None = None, flags: int = 0) -> None:
        """See `TritonSender.send`; what is sent after the relay has gone is lost."""
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
        self._waits: set[asyncio.Task[None]] = set()  # for room; the loop itself would forget them
        self._loop = asyncio.new_event_loop()
        self._shutting, self._closing = asyncio.Event(), asyncio.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run, "RelayListener"), (self._take, "RelayAccept"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        """Relayed requests whose relay has not closed yet: it does when its own client was told."""
        return len(self._open)

    @property
    def is_done(self) -> bool:
        """True while no answer has still to be written."""
        return all(connection.is_done for connection in list(self._open))

    def shut(self) -> None:
        """Take no more requests; what has been taken goes on."""
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
            except BaseException:  # nobody else would take those behind it
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
            self._loop.close()

    async def _listen(self) -> None:
        server = await self._bind()
        await self._shutting.wait()
        if server is not None:
            server.close()
        await self._closing.wait()
        for connection in self._open:
            connection.writer.transport.abort()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    async def _bind(self) -> asyncio.AbstractServer | None:
        while not self._shutting.is_set():
            try:
                return await asyncio.start_unix_server(
                    self._serve,
                    self._address,  # type: ignore[arg-type]  # bytes are a path as well
                    backlog=_BACKLOG,
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            await asyncio.sleep(_BIND_PAUSE)
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request: its relay closes when it has passed on the end, or does not need it."""
        connection = RelayConnection(writer, self._post)
        self._open.add(connection)
        try:
            unix_socket = writer.get_extra_info("socket")
            if is_sibling(unix_socket):
                unix_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
                writer.transport.set_write_buffer_limits(0)
                self._accepted.put((await _read_request(reader), connection))
                await reader.read(1)
        except (OSError, asyncio.IncompleteReadError):
            pass  # it has gone
        except Exception:
            _logger.exception("a relayed request could not be read")
        finally:
            connection.is_gone = True
            self._open.discard(connection)
            writer.close()

    def _write(self) -> None:
        self._is_writing = False  # first: what is posted from now on asks again
        while self._posted:
            connection, message = self._posted.popleft()
            if not connection.is_gone:
                connection.writer.write(message)
            connection.num_written += 1
            if connection.writer.transport.get_write_buffer_size() and not connection.is_behind:
                connection.is_behind = True
                wait = self._loop.create_task(self._wait_for_room(connection))
                self._waits.add(wait)
                wait.add_done_callback(self._waits.discard)

    async def _wait_for_room(self, connection: RelayConnection) -> None:
        try:
            await connection.writer.drain()
        except ConnectionError:
            pass  # it has gone
        finally:
            connection.is_behind = False
            self._on_room()


async def _read_request(reader: asyncio.StreamReader) -> RelayedRequest:
    head_size, contents_size = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
    head, contents = await reader.readexactly(head_size), await reader.readexactly(contents_size)
    message = unpack(head, contents)
    if not isinstance(message, RelayedRequest):
        raise TypeError(f"{type(message).__name__} in place of a request")
    return message
