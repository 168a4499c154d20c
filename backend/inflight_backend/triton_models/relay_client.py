"""Relays requests to ``tensorrt_llm`` from our other models in the same server.

Unlike an ensemble they pass cancellation on: a client that leaves has its request stopped.
"""

from __future__ import annotations

import json
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar

from inflight_backend.errors import CapacityExceeded, ServingError
from inflight_backend.log import get_logger
from inflight_backend.process_guard import exit_with_parent
from inflight_backend.requests.inference_request import Array
from inflight_backend.triton.relay_wire import (
    RelayedRequest,
    RelayedResponse,
    Tensors,
    allow_many_connections,
    connect,
    pack,
    read_messages,
)
from inflight_backend.triton.watchdog import PeriodicTask, PeriodicTasks
from inflight_backend.triton_io.inputs import RequestHead, read_head
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender

_logger = get_logger(__name__)

Convert = Callable[[Iterator[Tensors]], Iterable[Tensors]]
"""From the responses of ``tensorrt_llm`` to those the client gets."""

_MAX_REQUESTS = 512  # threads; each waits for the responses of one request
_CANCEL_CHECK_SECONDS = 0.1
_NOT_RELAYED = "the request could not be relayed"


class RelayedCall:
    """One request on its way, and the answer to it."""

    def __init__(self, model_name: str, stream: ResponseSender, request: RelayedRequest) -> None:
        """``stream``: of the client, which may leave before the end."""
        self.stream = stream
        self._model_name = model_name
        self._message = pack(request)  # now, since Triton may take the inputs back
        # That of the model is opened here, where it can still be refused.
        self._connections = {model_name: _new_socket()}
        self._connected: set[str] = set()
        self._is_stopped = self._is_closed = False
        self.last: RelayedResponse | None = None  # which ends the answer, once it is there
        self._lock = threading.Lock()  # what is closed may be another connection at once

    def responses(self) -> Iterator[Tensors]:
        """All tensors of the answer; `last` says how it ended when there are no more."""
        message, self._message = self._message, b""  # which may be a prompt of many MB
        for response in self.ask(self._model_name, message):
            if response.is_final:
                self.last = response
            if response.tensors is not None:
                yield response.tensors

    def ask(self, model_name: str, message: bytes) -> Iterator[RelayedResponse]:
        """The responses of ``model_name`` to a packed request; the last one is final.

        Its connection stays open until `close`, for what is asked next: read to the end.
        """
        try:
            connection = self._connect(model_name)
            if not self._is_stopped:
                connection.sendall(message)
                for response in read_messages(connection):
                    assert isinstance(response, RelayedResponse), "the other side answers"
                    yield response
                    if response.is_final:
                        return
        except CapacityExceeded as error:
            yield RelayedResponse(None, str(error), error.code, is_final=True)
            return
        except ConnectionError:
            pass  # as if it had ended amid the answer
        except OSError as error:
            yield RelayedResponse(None, _no_connection(model_name, error), "UNAVAILABLE", True)
            return
        text = "" if self._is_stopped else f"the process of the model '{model_name}' has ended"
        yield RelayedResponse(None, text, "INTERNAL" if text else "", is_final=True)

    def _connect(self, model_name: str) -> socket.socket:
        connection = self._connections.get(model_name)
        if connection is None:
            connection = _new_socket()
            with self._lock:
                self._connections[model_name] = connection
        if model_name not in self._connected:
            connect(connection, model_name)
            self._connected.add(model_name)
        return connection

    def stop_if_needless(self) -> None:
        """Stop the request of a client that has gone, or has its end before it came."""
        if self.last is None and (self.stream.is_closed or self.stream.is_cancelled()):
            with self._lock:
                self._is_stopped = True
                self._shut()

    def close(self) -> None:
        """Stop the request if it still runs, and give the connections back."""
        with self._lock:
            self._shut()
            self._is_closed = True
            for connection in self._connections.values():
                connection.close()

    def _shut(self) -> None:
        """The models stop the request; the thread that reads its answer is at its end."""
        if self._is_closed:
            return
        for connection in self._connections.values():
            with suppress(OSError):  # while it is not connected, which it may never be
                connection.shutdown(socket.SHUT_RDWR)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _no_connection(model_name: str, error: OSError) -> str:
    return f"no connection to '{model_name}' can be opened: {error.strerror}"


class RelayModel(ABC):
    """A Triton model that puts its requests to ``tensorrt_llm``; each kind says in which words.

    Each request on its way has a thread, and is known here until its connection is closed. A
    periodic task stops those whose clients have left.

    ``tells_end_at_once``: in a stream the last response says that it is the last, and holds
    something; else an empty one follows, which clients get only if they ask for it.
    """

    tells_end_at_once: ClassVar[bool] = False

    def open(self, args: dict[str, str], model_name: str) -> None:
        """Start what relays to ``model_name``."""
        import triton_python_backend_utils as pb_utils  # exists only inside Triton

        exit_with_parent(args["model_name"])
        policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
        self._is_decoupled = policy.get("decoupled", False)
        self._factory = ResponseFactory(pb_utils, self._is_decoupled)
        self._coded = ResponseFactory(pb_utils, self._is_decoupled, tells_codes=True)
        self._model_name = model_name
        self._live: set[RelayedCall] = set()
        allow_many_connections()
        self._pool = ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="Relay")
        self._periodic_tasks = PeriodicTasks(
            [PeriodicTask(self._stop_needless, _CANCEL_CHECK_SECONDS)],
            is_busy=lambda: bool(self._live),
        )

    @abstractmethod
    def translate(
        self, request: Any, head: RequestHead
    ) -> tuple[Mapping[str, Array], Sequence[str], Convert]:
        """Inputs, outputs wanted, and how answers are told; `ServingError` for a bad request."""

    def execute(self, requests: Sequence[Any]) -> None:
        """Take the requests; their responses leave through their response senders."""
        for request in requests:
            head = read_head(request)
            factory = self._coded if head.asks_for_codes else self._factory
            stream = ResponseSender(request.get_response_sender(), factory)
            try:
                inputs, outputs, convert = self.translate(request, head)
                self._start(RelayedRequest(dict(inputs), list(outputs)), stream, convert)
            except ServingError as error:
                stream.fail(str(error), error.code)
            except BaseException:  # ours: the requests behind it must not be lost
                _logger.exception("a request could not be taken")
                stream.fail("the request could not be taken", "INTERNAL")

    def reword(self, error: str) -> str:
        """An error of ``tensorrt_llm`` with the names that the client knows."""
        return error

    def make_call(self, request: RelayedRequest, stream: ResponseSender) -> RelayedCall:
        """What gets the answer to a translated request; `ServingError` for one that it refuses."""
        return RelayedCall(self._model_name, stream, request)

    def finalize(self) -> None:
        """Let what runs end, then stop the threads."""
        self._pool.shutdown()
        self._periodic_tasks.close()

    def _start(self, request: RelayedRequest, stream: ResponseSender, convert: Convert) -> None:
        if len(self._live) >= _MAX_REQUESTS:
            raise CapacityExceeded(
                f"{_MAX_REQUESTS} requests are on their way through this model, which is the "
                "limit; try again later"
            )
        try:
            call = self.make_call(request, stream)
        except OSError as error:
            raise CapacityExceeded(_no_connection(self._model_name, error)) from None
        self._live.add(call)
        self._periodic_tasks.wake()
        self._pool.submit(self._run, call, convert)

    def _run(self, call: RelayedCall, convert: Convert) -> None:
        """Pass the answer on; whatever happens, the stream ends exactly once, the connection last:
        until then ``tensorrt_llm`` must not leave."""
        try:
            self._pass_on(call, convert)
        except BaseException:  # also a panic of a library
            _logger.exception("a request could not be relayed")
            call.stream.abandon(_NOT_RELAYED)
        call.close()
        self._live.discard(call)

    def _pass_on(self, call: RelayedCall, convert: Convert) -> None:
        stream = call.stream
        whole: Tensors = {}
        for tensors in convert(call.responses()):
            if self._is_decoupled:
                is_at_end = call.last is not None and not call.last.error
                stream.send(tensors, is_final=self.tells_end_at_once and is_at_end)
            else:
                whole = tensors
        if call.last is not None and call.last.error:
            stream.send_error(self.reword(call.last.error), call.last.code)
        elif self._is_decoupled:
            stream.end()
        else:
            stream.send(whole, is_final=True)

    def _stop_needless(self) -> None:
        for call in list(self._live):
            call.stop_if_needless()
