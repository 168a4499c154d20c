"""Receives requests that our other models relay to ``tensorrt_llm``, and returns the answers."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from inflight_backend.log import get_logger
from inflight_backend.triton.relay_wire import (
    RelayedRequest,
    RelayedResponse,
    address_of,
    allow_many_connections,
    is_sibling,
    pack,
    read_message,
)

_logger = get_logger(__name__)

_BACKLOG = 4096
_BIND_PAUSE = 0.05
_ACCEPT_PAUSE = 1.0  # while too many files are open
_CLOSE_SECONDS = 1.0  # for what waits to be written; a message takes 0.02 ms
_SEND_BUFFER_BYTES = 2**13
"""Some twenty tokens of a stream. A relay that is slower than the engine has few of them before it
then, and those behind them travel together."""


class RelayConnection:
    """The way back of one relayed request, in place of Triton's sender; a send never waits.

    What the socket has no room for is written by the thread of the connection, which otherwise
    sleeps until the answer has ended.
    """

    def __init__(self, unix_socket: socket.socket, on_room: Callable[[], None]) -> None:
        """``on_room`` is called when a relay that was behind has caught up."""
        self._socket = unix_socket
        self._on_room = on_room
        self._unsent = bytearray()
        self._has_ended = self._is_gone = False
        self._change = threading.Condition(threading.Lock())  # guards all of these

    @property
    def is_behind(self) -> bool:
        """True while what is sent would only pile up here: the relay is slower than the engine."""
        return bool(self._unsent)

    @property
    def is_done(self) -> bool:
        """True once the whole answer was written, or its reader is gone."""
        with self._change:
            return self._is_gone or (self._has_ended and not self._unsent)

    def send(self, response: RelayedResponse | None = None, flags: int = 0) -> None:
        """See `TritonSender.send`; what is sent after the relay has gone is lost."""
        response = response or RelayedResponse()
        message = pack(replace(response, is_final=True) if flags else response)
        with self._change:
            self._has_ended = bool(flags)
            if not self._is_gone:
                self._unsent += message
                self._write()
            if flags or self._unsent or self._is_gone:
                self._change.notify()

    def is_cancelled(self) -> bool:
        """See `TritonSender.is_cancelled`."""
        with self._change:
            try:
                if self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    self._leave()
            except BlockingIOError:  # nothing follows a request
                pass
            except OSError:
                self._leave()
            return self._is_gone

    def read_request(self) -> RelayedRequest | None:
        """The next request of the relay, which sends it when it has the answer to the one before;
        None when it closes: it does when its own client was told."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        message = read_message(self._socket)
        if message is not None and not isinstance(message, RelayedRequest):
            raise TypeError(f"{type(message).__name__} in place of a request")
        return message

    def begin(self) -> None:
        """An answer follows."""
        with self._change:
            self._has_ended = False

    def write_the_rest(self) -> None:
        """Write what has no room at once, until the whole answer is written."""
        while not self._wait_for_more():
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            poll.poll()
            with self._change:
                self._write()
                has_room = not self._unsent
            if has_room:
                self._on_room()

    def cut(self) -> None:
        """End the connection; its thread wakes up."""
        with self._change:
            self._leave()

    def close(self) -> None:
        """End the connection and give its descriptor back."""
        with self._change:
            self._leave()
            self._socket.close()

    def _wait_for_more(self) -> bool:
        """Wait until something has no room, or no more comes; True for the latter."""
        with self._change:
            self._change.wait_for(lambda: self._unsent or self._has_ended or self._is_gone)
            return not self._unsent

    def _write(self) -> None:
        try:
            while self._unsent:
                num_written = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
                del self._unsent[:num_written]
        except BlockingIOError:
            pass
        except OSError:
            self._leave()

    def _leave(self) -> None:
        self._is_gone = True
        self._unsent.clear()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._change.notify()


class RelayListener:
    """Takes requests until `shut`, writes answers until `close`.

    One thread accepts connections; each has a thread of its own.
    """

    def __init__(
        self,
        model: str,
        accept: Callable[[RelayedRequest, RelayConnection], None],
        on_room: Callable[[], None],
    ) -> None:
        """Listen for the model ``model``, as soon as no other process does.

        While a model is loaded again, Triton has two processes of it for a while. ``accept`` takes
        a request and its way back, and ends that whatever happens; ``on_room`` is called when a
        relay that was behind has caught up.
        """
        allow_many_connections()
        self._address = address_of(model)
        self._accept = accept
        self._on_room = on_room
        self._open: dict[threading.Thread, RelayConnection] = {}
        self._is_shutting = threading.Event()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listener = threading.Thread(target=self._run, name="RelayListener", daemon=True)
        self._listener.start()

    @property
    def num_open(self) -> int:
        """Requests whose relay has not closed yet: it does when its own client was told."""
        return len(self._open)

    @property
    def is_done(self) -> bool:
        """True once no more requests come (see `shut`) and no answer has still to be written."""
        is_shut = not self._listener.is_alive()
        return is_shut and all(connection.is_done for connection in list(self._open.values()))

    def shut(self) -> None:
        """Take no more requests; those of connected relays are still served."""
        self._is_shutting.set()
        with suppress(OSError):  # it is not bound, or shut already
            self._listening.shutdown(
                socket.SHUT_RD
            )  # `accept` gives what has connected, then fails

    def close(self) -> None:
        """Write what still waits, for a second at most, then cut what is open."""
        self.shut()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while not self.is_done and time.monotonic() < deadline:
            time.sleep(0.005)
        self._listener.join()
        for thread, connection in list(self._open.items()):
            connection.cut()
            thread.join()

    def _run(self) -> None:
        try:
            with self._listening:
                if self._bind():
                    self._accept_all()
        except BaseException:
            _logger.exception("no more requests can be relayed")

    def _bind(self) -> bool:
        while not self._is_shutting.is_set():
            try:
                self._listening.bind(self._address)
                self._listening.listen(_BACKLOG)
                return True
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            self._is_shutting.wait(_BIND_PAUSE)
        return False

    def _accept_all(self) -> None:
        """Until the listening socket is shut, and those that had connected before are accepted."""
        while True:
            try:
                unix_socket, _ = self._listening.accept()
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return
                _logger.error("no relay can connect for a while: %s", error.strerror)
                time.sleep(_ACCEPT_PAUSE)
                continue
            if is_sibling(unix_socket):
                self._start(unix_socket)
            else:
                unix_socket.close()

    def _start(self, unix_socket: socket.socket) -> None:
        connection = RelayConnection(unix_socket, self._on_room)
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="RelayConnection", daemon=True
        )
        self._open[thread] = connection  # now, for `is_done`
        try:
            thread.start()
        except RuntimeError:  # too many threads
            _logger.exception("a relayed request cannot be served")
            del self._open[thread]
            connection.close()

    def _serve(self, connection: RelayConnection) -> None:
        """Requests one after another, until the relay has passed on the end, or does not need it:
        nearly always it is one."""
        try:
            while (request := connection.read_request()) is not None:
                connection.begin()
                self._accept(request, connection)
                connection.write_the_rest()
        except BaseException:  # also a panic of a library
            _logger.exception("a relayed request could not be served")
        finally:
            connection.close()
            del self._open[threading.current_thread()]
