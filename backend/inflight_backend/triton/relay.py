"""Requests to ``tensorrt_llm`` from inside the server, for models that speak for it.

A call through one costs about twice the CPU of a call of ``tensorrt_llm`` itself. Unlike an
ensemble it passes cancellation on: a client that leaves has its request stopped by id.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_backend.errors import CapacityExceeded, ServingError
from inflight_backend.private_log import get_logger
from inflight_backend.triton.coded_errors import CodedFactory
from inflight_backend.triton.housekeeper import (
    Chore,
    Housekeeper,
    exit_with_parent,
)
from inflight_backend.triton.mailbox import Part, RelayedError, Tensors, unpack
from inflight_backend.triton.request_head import RequestHead, read_head
from inflight_backend.triton.stream import ResponseFactory, ResponseStream
from inflight_client.protocol import (
    ERROR_CODES_PARAMETER,
    RELAY_NEXT,
    RELAY_OUTPUT,
    RELAY_PARAMETER,
)

_logger = get_logger(__name__)

Array = npt.NDArray[Any]

Convert = Callable[[Iterator[Tensors]], Iterable[Tensors]]
"""From the responses of ``tensorrt_llm`` to those the client gets."""

_CODED = re.compile(
    r"\[(INTERNAL|INVALID_ARG|UNSUPPORTED|UNAVAILABLE|ALREADY_EXISTS)\] (.*)", re.DOTALL
)
_MAX_REQUESTS = 512  # threads; each waits for the responses of one request
_CANCEL_CHECK_SECONDS = 0.1
_NOT_RELAYED = "the request could not be relayed"
_STOP_TIMEOUT_MICROSECONDS = 5_000_000


@dataclass(frozen=True, slots=True)
class _Errand:
    """Whoever has the lock may stop the inner request, or say that it is over."""

    stream: ResponseStream
    lock: threading.Lock = field(default_factory=threading.Lock)


class Relay:
    """Owner of the requests on their way through one model.

    Each has a thread, and is known here until its inner request has ended, whatever became of its
    stream. The housekeeper stops the inner requests of streams that have ended before them.
    """

    def __init__(self, pb_utils: Any, model_name: str, *, is_decoupled: bool) -> None:
        self._pb_utils = pb_utils
        self._model_name = model_name
        self._is_decoupled = is_decoupled
        self._live: dict[str, _Errand] = {}
        self._pool = ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="Relay")
        self._housekeeper = Housekeeper([Chore(self._stop_needless, _CANCEL_CHECK_SECONDS)])

    def start(
        self,
        inputs: Mapping[str, Array],
        requested: Sequence[str],
        stream: ResponseStream,
        convert: Convert = iter,
    ) -> None:
        """Ask for the outputs ``requested``, under an id of its own; ``stream`` gets the answer.

        `CapacityExceeded` if too many requests are on their way.
        """
        if len(self._live) >= _MAX_REQUESTS:
            raise CapacityExceeded(
                f"{_MAX_REQUESTS} requests are on their way through this model, which is the "
                "limit; try again later"
            )
        packed = [RELAY_OUTPUT] if requested and self._is_decoupled else []
        inner = self._pb_utils.InferenceRequest(
            model_name=self._model_name,
            requested_output_names=[*requested, *packed],
            inputs=[self._pb_utils.Tensor(name, tensor) for name, tensor in inputs.items()],
            request_id=f"relay-{uuid.uuid4().hex}",
            parameters={RELAY_PARAMETER if self._is_decoupled else ERROR_CODES_PARAMETER: True},
        )
        self._live[inner.request_id()] = _Errand(stream)
        self._pool.submit(self._run, inner, stream, convert)

    def close(self) -> None:
        """Let what runs end, then stop the threads."""
        self._pool.shutdown()
        self._housekeeper.close()

    def _run(self, inner: Any, stream: ResponseStream, convert: Convert) -> None:
        """Pass the responses on; whatever happens, the stream ends exactly once.

        Its end comes last, when no call is on its way: from then on Triton may unload this model,
        which now and then took too long or ended the server just after a client had left (24.10).
        """
        parts = self._parts_of(inner)
        errors: list[RelayedError] = []
        whole: Tensors = {}
        try:
            for tensors in convert(_told(parts, errors)):
                if self._is_decoupled:
                    stream.send(tensors, is_final=False)
                else:
                    whole = tensors
        except BaseException:  # also a panic of a library
            _logger.exception("a request could not be relayed")
            errors.insert(0, RelayedError(_NOT_RELAYED, "INTERNAL"))
            with suppress(Exception):
                self._stop(inner.request_id())  # if it was a call that failed, that was no end
                for _ in parts:  # to their end, which is near
                    pass
        with self._live[inner.request_id()].lock:
            del self._live[inner.request_id()]
        try:
            if errors:
                stream.send_error(errors[0].message, errors[0].code)
            elif self._is_decoupled:
                stream.end()
            else:
                stream.send(whole, is_final=True)
        except BaseException:
            _logger.exception("the end of a relayed request could not be sent")
            stream.abandon(_NOT_RELAYED)

    def _ask(self, inner: Any) -> Iterator[Any]:
        """The responses to a request, which must be read to their end."""
        return iter(inner.exec(decoupled=True) if self._is_decoupled else [inner.exec()])

    def _parts_of(self, inner: Any) -> Iterator[Part]:
        """All parts of the answer to ``inner``; of a model that knows no parts, its responses."""
        request, is_over = inner, False
        while not is_over:
            is_over = True
            for response in self._ask(request):
                if response.has_error():
                    yield _read_error(response.error().message())
                    continue
                tensors = {each.name(): each.as_numpy() for each in response.output_tensors()}
                if RELAY_OUTPUT in tensors:
                    parts, is_over = unpack(tensors[RELAY_OUTPUT])
                    yield from parts
                elif tensors or not self._is_decoupled:  # an end is empty, but that of a unary call
                    yield tensors
            request = None if is_over else self._next_of(inner)

    def _next_of(self, inner: Any) -> Any:
        return self._pb_utils.InferenceRequest(
            model_name=self._model_name,
            requested_output_names=[RELAY_OUTPUT],
            inputs=[self._pb_utils.Tensor("streaming", np.array([[True]]))],  # it must have one
            request_id=inner.request_id(),
            parameters={RELAY_PARAMETER: RELAY_NEXT},
        )

    def _stop_needless(self) -> None:
        """Stop the inner request of every client that has gone or has its end already; repeated
        until it has ended, one after the other."""
        for request_id, errand in list(self._live.items()):
            if errand.stream.is_closed or errand.stream.is_cancelled():
                try:
                    with errand.lock:
                        if request_id in self._live:
                            self._stop(request_id)
                except Exception:
                    _logger.exception("a relayed request could not be stopped")

    def _stop(self, request_id: str) -> None:
        stop = self._pb_utils.InferenceRequest(
            model_name=self._model_name,
            requested_output_names=[],
            inputs=[self._pb_utils.Tensor("stop", np.array([[True]]))],
            request_id=request_id,
            timeout=_STOP_TIMEOUT_MICROSECONDS,
        )
        for response in self._ask(stop):
            if response.has_error():
                _logger.warning("a relayed request could not be stopped")


class RelayModel(ABC):
    """A Triton model that puts its requests to ``tensorrt_llm``; each kind says in which words."""

    def open(self, args: dict[str, str], model_name: str) -> None:
        """Start what relays to ``model_name``."""
        import triton_python_backend_utils as pb_utils  # exists only inside Triton

        exit_with_parent(args["model_name"])
        self._factory, self._coded = ResponseFactory(pb_utils), CodedFactory(pb_utils)
        policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
        is_decoupled = policy.get("decoupled", False)
        self._relay = Relay(pb_utils, model_name, is_decoupled=is_decoupled)

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
            stream = ResponseStream(request.get_response_sender(), factory)
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


def _read_error(text: str) -> RelayedError:
    """Triton passes on no code but that in the text."""
    coded = _CODED.fullmatch(text)
    return RelayedError(coded[2], coded[1]) if coded else RelayedError(text, "INTERNAL")
