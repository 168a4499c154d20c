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

import numpy.typing as npt

from inflight_backend.errors import CapacityExceeded, ServingError
from inflight_backend.log import get_logger
from inflight_backend.process_guard import exit_with_parent
from inflight_backend.triton.relay_wire import (
    LastTensors,
    Part,
    RelayedEnd,
    RelayedError,
    RelayedRequest,
    Tensors,
    allow_many_connections,
    connect,
    pack,
    read_messages,
)
from inflight_backend.triton.watchdog import PeriodicTask, PeriodicTasks
from inflight_backend.triton_io.inputs import RequestHead, read_head
from inflight_backend.triton_io.sender import ErrorCodeFactory, ResponseFactory, ResponseSender

_logger = get_logger(__name__)

Array = npt.NDArray[Any]

Convert = Callable[[Iterator[Tensors]], Iterable[Tensors]]
"""From the responses of ``tensorrt_llm`` to those the client gets."""

_MAX_REQUESTS = 512  # threads; each waits for the responses of one request
_CANCEL_CHECK_SECONDS = 0.1
_NOT_RELAYED = "the request could not be relayed"


class PendingCall:
    """One request on its way: its message, the connection, and the stream that gets the answer."""

    def __init__(self, stream: ResponseSender, message: bytes) -> None:
        self.stream = stream
        self.message = message
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.is_stopped = self.is_over = False
        self.is_at_end = False  # what is told now is the last of the answer
        self._is_closed = False
        self._lock = threading.Lock()  # what is closed may be another connection at once

    def stop(self) -> None:
        """Leave: ``tensorrt_llm`` stops the request, and who reads its answer is at its end."""
        with self._lock:
            self.is_stopped = True
            self._shut()

    def close(self) -> None:
        """Leave, and give the connection back."""
        with self._lock:
            self._shut()
            self._is_closed = True
            self.connection.close()

    def _shut(self) -> None:
        with suppress(OSError):  # while it is not connected, which it may never be
            if not self._is_closed:
                self.connection.shutdown(socket.SHUT_RDWR)


class Relay:
    """Owner of the requests on their way through one model.

    Each has a thread, and is known here until its connection is closed. A periodic task stops those
    whose streams have ended before them.
    """

    def __init__(self, model_name: str, *, is_decoupled: bool, tells_end_at_once: bool) -> None:
        """See `RelayModel` for ``tells_end_at_once``."""
        self._model_name = model_name
        self._is_decoupled = is_decoupled
        self._tells_end_at_once = tells_end_at_once
        self._live: set[PendingCall] = set()
        allow_many_connections()
        self._pool = ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="Relay")
        self._periodic_tasks = PeriodicTasks(
            [PeriodicTask(self._stop_needless, _CANCEL_CHECK_SECONDS)],
            is_busy=lambda: bool(self._live),
        )

    def start(
        self,
        inputs: Mapping[str, Array],
        requested: Sequence[str],
        stream: ResponseSender,
        convert: Convert = iter,
    ) -> None:
        """Ask for the outputs ``requested``; ``stream`` gets the answer.

        `CapacityExceeded` if too many requests are on their way.
        """
        if len(self._live) >= _MAX_REQUESTS:
            raise CapacityExceeded(
                f"{_MAX_REQUESTS} requests are on their way through this model, which is the "
                "limit; try again later"
            )
        packed = pack(RelayedRequest(dict(inputs), requested))  # Triton may take the inputs back
        try:
            errand = PendingCall(stream, packed)
        except OSError as error:
            raise CapacityExceeded(
                f"no connection to '{self._model_name}' can be opened: {error.strerror}"
            ) from None
        self._live.add(errand)
        self._periodic_tasks.wake()
        self._pool.submit(self._run, errand, convert)

    def close(self) -> None:
        """Let what runs end, then stop the threads."""
        self._pool.shutdown()
        self._periodic_tasks.close()

    def _run(self, errand: PendingCall, convert: Convert) -> None:
        """Pass the parts on; whatever happens, the stream ends exactly once, the connection last:
        until then ``tensorrt_llm`` must not leave."""
        stream = errand.stream
        errors: list[RelayedError] = []
        whole: Tensors = {}
        try:
            for tensors in convert(_told(self._parts_of(errand), errors)):
                if self._is_decoupled:
                    is_final = self._tells_end_at_once and errand.is_at_end
                    stream.send(tensors, is_final=is_final)
                else:
                    whole = tensors
        except BaseException:  # also a panic of a library
            _logger.exception("a request could not be relayed")
            errors.insert(0, RelayedError(_NOT_RELAYED, "INTERNAL"))
        try:
            if errors:
                stream.send_error(errors[0].message, errors[0].code)
            elif self._is_decoupled:
                stream.end()
            else:
                stream.send(whole, is_final=True)
        except BaseException:
            _logger.exception("the end of a relayed request could not be sent")
        stream.abandon(_NOT_RELAYED)  # does nothing if it has ended
        errand.close()
        self._live.discard(errand)

    def _parts_of(self, errand: PendingCall) -> Iterator[Part]:
        """All parts of the answer; an error if it has no end, unless the client has left."""
        try:
            connect(errand.connection, self._model_name)
            if errand.is_stopped:
                return
            errand.connection.sendall(errand.message)
            errand.message = b""  # which may be a prompt of many MB
            for message in read_messages(errand.connection):
                if isinstance(message, RelayedEnd):
                    errand.is_over = True
                    return
                assert not isinstance(message, RelayedRequest), "the other side answers"
                errand.is_at_end = isinstance(message, LastTensors)
                yield message
        except CapacityExceeded as error:
            yield RelayedError(str(error), "UNAVAILABLE")
            return
        except ConnectionError:
            pass  # as if it had ended amid the answer
        if not errand.is_stopped:
            text = f"the process of the model '{self._model_name}' has ended"
            yield RelayedError(text, "INTERNAL")

    def _stop_needless(self) -> None:
        """Stop the requests of clients that have gone, or have their end before it came."""
        for errand in list(self._live):
            if errand.is_over:  # its client is being told
                continue
            if errand.stream.is_closed or errand.stream.is_cancelled():
                errand.stop()


class RelayModel(ABC):
    """A Triton model that puts its requests to ``tensorrt_llm``; each kind says in which words.

    ``tells_end_at_once``: in a stream the last response says that it is the last, and holds
    something; else an empty one follows, which clients get only if they ask for it.
    """

    tells_end_at_once: ClassVar[bool] = False

    def open(self, args: dict[str, str], model_name: str) -> None:
        """Start what relays to ``model_name``."""
        import triton_python_backend_utils as pb_utils  # exists only inside Triton

        exit_with_parent(args["model_name"])
        policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
        is_decoupled = policy.get("decoupled", False)
        self._factory = ResponseFactory(pb_utils, is_decoupled)
        self._coded = ErrorCodeFactory(pb_utils, is_decoupled)
        self._relay = Relay(
            model_name, is_decoupled=is_decoupled, tells_end_at_once=self.tells_end_at_once
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
                self._relay.start(inputs, outputs, stream, convert)
            except CapacityExceeded as error:
                stream.fail(str(error), "UNAVAILABLE")
            except ServingError as error:
                stream.fail(str(error), "INVALID_ARG")
            except BaseException:  # ours: the requests behind it must not be lost
                _logger.exception("a request could not be taken")
                stream.fail("the request could not be taken", "INTERNAL")

    def finalize(self) -> None:
        """Let what runs end, then stop the threads."""
        self._relay.close()


def _told(parts: Iterable[Part], errors: list[RelayedError]) -> Iterator[Tensors]:
    """The parts without errors, which go to ``errors``."""
    for part in parts:
        if isinstance(part, RelayedError):
            errors.append(part)
        else:
            yield part
