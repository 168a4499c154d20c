"""The HTTP side: routes, admission, streams of events, and errors in OpenAI's shape.

A request to a model is admitted before its body is read, and holds its place until the last byte of
its answer is with the kernel. It ends early for three reasons, each by cancelling its scope: its
time is over, the server stops, or its client leaves. The cancellation closes the gRPC stream, which
ends the request on the server. Nothing of a prompt or an answer is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight_client.errors import InflightError, InvalidArgument
from inflight_openai.errors import ApiError, from_server, model_not_found
from inflight_openai.generation import GenerationRequest, parse_chat, parse_completion
from inflight_openai.prompts import PromptReader
from inflight_openai.responses import (
    DONE,
    EventWriter,
    Head,
    error_event,
    new_choices,
    whole_answer,
)
from inflight_openai.schema import UnknownFields
from inflight_openai.settings import FrontSettings
from inflight_openai.triton_client import MetricsPage, Piece, TritonClient, encode_calls

_logger = logging.getLogger(__name__)

_NUM_THREADS = 4  # each that works delays the event loop by up to 5 ms, a turn at Python's lock
_NUM_CHAT_THREADS = 2  # of their own: slow templates hold up chats only
_MAX_INLINE_TOKENS = 4096  # of an answer that the event loop encodes itself, in about 0.1 ms
_LAST_SECONDS = 1.0  # for a client to read why its request was ended

_CALLS = (
    "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, /health, /metrics, /version, "
    "/server_info and /model_info"
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+|null")  # null: a page from a file
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy in between must not collect events
}

_Parse = Callable[[bytes, PromptReader, UnknownFields, FrontSettings], GenerationRequest]
_Result = TypeVar("_Result")


class OpenAIApp:
    """The routes over one inference server."""

    def __init__(
        self,
        settings: FrontSettings,
        triton: TritonClient,
        reader: PromptReader,
        metrics: MetricsPage,
    ) -> None:
        self.settings = settings
        self.triton = triton
        self.reader = reader
        self.admission = Admission(settings.max_requests)
        self._metrics_page = metrics
        self.unknown = UnknownFields(is_strict=settings.is_strict)
        self._created = int(time.time())
        self._version = version("inflight")
        self.threads = anyio.CapacityLimiter(_NUM_THREADS)
        self._chat_threads = anyio.CapacityLimiter(_NUM_CHAT_THREADS)

    def asgi(self) -> ASGIApp:
        """The application; `InvalidArgument` for an allowed origin that is none.

        Starlette's middleware wraps every message, so that the events of streams go around it.
        """
        info = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),  # names may have slashes
                Route("/metrics", self._metrics),
                Route("/version", self._show_version),
                Route("/server_info", self._server_info),
                Route("/get_server_info", self._server_info),
                Route("/model_info", self._model_info),
                Route("/get_model_info", self._model_info),
            ],
            exception_handlers={HTTPException: _http_error, ApiError: _api_error},
        )
        info.router.redirect_slashes = False
        completions = partial(Generation, self, self.threads, parse_completion)
        chats = partial(Generation, self, self._chat_threads, parse_chat)
        app = Router(
            routes=[Route("/v1/completions", completions), Route("/v1/chat/completions", chats)],
            default=info,
            redirect_slashes=False,
        )
        return cors(app, self.settings.allowed_origins)

    async def _health(self, request: Request) -> Response:
        """200 while requests are taken: the model says so and this process does not stop."""
        try:
            is_ready = not self.admission.is_closed and await self.triton.is_ready()
        except InflightError:
            is_ready = False
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self.reader.name:
            raise model_not_found(self.reader.name)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.reader.name,
            "object": "model",
            "created": self._created,
            "owned_by": "inflight",
            "max_model_len": self.reader.limits.max_seq_len,
        }

    # For gateways and monitoring. Paths and keys are those of vLLM and SGLang; clients that look
    # for files find the model under its name, as at a hub, and no path of this machine.

    async def _metrics(self, request: Request) -> Response:
        content, kind = await self._metrics_page.read()
        return Response(content, headers={"Content-Type": kind})

    async def _show_version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def _server_info(self, request: Request) -> Response:
        limits = self.reader.limits
        return JSONResponse(
            self._paths()
            | {
                "served_model_name": self.reader.name,
                "version": self._version,
                "context_length": limits.max_seq_len,
                "max_req_input_len": limits.max_input_len,
                "max_running_requests": self.settings.max_requests,
                "vocab_size": limits.vocab_size,
            }
        )

    async def _model_info(self, request: Request) -> Response:
        return JSONResponse(self._paths() | {"is_generation": True})

    def _paths(self) -> dict[str, Any]:
        return {"model_path": self.reader.name, "tokenizer_path": self.reader.name}


class Admission:
    """Counts running requests, and with them the bodies and answers in memory."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._running: set[Generation] = set()
        self.is_closed = False

    @property
    def num_running(self) -> int:
        """Requests that hold a place."""
        return len(self._running)

    @contextmanager
    def admit(self, generation: Generation) -> Iterator[None]:
        """A place until the block ends; `ApiError` if there is none."""
        if self.is_closed:
            raise ApiError(503, "the server is shutting down")
        if self.num_running >= self._max_requests:
            message = f"{self.num_running} requests are running; try again later"
            raise ApiError(429, message, code="busy")
        self._running.add(generation)
        try:
            yield
        finally:
            self._running.discard(generation)

    async def close(self, seconds: float) -> None:
        """Admit no more requests; end those that still run after ``seconds``."""
        self.is_closed = True
        with anyio.move_on_after(seconds):
            while self._running:
                await anyio.sleep(0.02)
        for generation in self._running:
            generation.end(ApiError(503, "the server is shutting down: the answer was given up"))


class Generation:
    """One request to a model, from its head to the last byte of its answer.

    An ASGI application for one call, which answers when it is awaited, like Starlette's endpoints.
    """

    def __init__(
        self,
        app: OpenAIApp,
        threads: anyio.CapacityLimiter,
        parse: _Parse,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._request = Request(scope, receive)
        self._reply = Reply(scope, send)
        self._app = app
        self._threads = threads
        self._parse = parse
        self._settings = app.settings
        self._reason = ApiError(504, "the answer took too long and was given up", code="timeout")
        self._cancel_scope = anyio.CancelScope()
        self._has_client = True

    def __await__(self) -> Generator[Any, None, None]:
        return self._respond().__await__()

    def end(self, reason: ApiError) -> None:
        """Cancel the request and tell its client why."""
        self._reason = reason
        self._cancel_scope.cancel()

    async def _respond(self) -> None:
        try:
            with self._app.admission.admit(self):
                await self._run_until_cancelled()
        except ApiError as error:  # not admitted
            await self._reply.fail(error)
        except asyncio.CancelledError:  # by uvicorn, or the event loop at its end
            pass
        finally:
            await self._reply.close()

    async def _run_until_cancelled(self) -> None:
        self._cancel_scope.deadline = anyio.current_time() + self._settings.timeout
        try:
            with self._cancel_scope:
                await self._run()
            if self._cancel_scope.cancelled_caught and self._has_client:
                raise self._reason
        except Exception as error:
            await self._reply.fail(_described(error))

    async def _run(self) -> None:
        if self._request.method != "POST":
            raise _no_such_call(self._request, 405, "Method Not Allowed")
        try:
            raw = await self._read()
        except ClientDisconnect:
            self._has_client = False
            return
        watch = asyncio.create_task(self._end_without_client())
        try:
            generation, head, calls = await self._in_thread(
                self._threads, lambda: self._prepare(raw)
            )
            async with aclosing(self._app.triton.run(generation, calls)) as pieces:
                answer = self._stream if generation.is_streaming else self._answer
                await answer(head, generation, pieces)
        finally:
            watch.cancel()

    async def _end_without_client(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._has_client = False
        self._cancel_scope.cancel()

    async def _read(self) -> bytes:
        """The body; `ApiError` if it is too large, too slow or not encoded as its head says."""
        limit, seconds = self._settings.max_body_bytes, self._settings.body_timeout
        too_large = ApiError(413, f"the body has more than {limit} bytes")
        headers = self._request.headers
        if int(headers.get("content-length", "0")) > limit:
            raise too_large
        body = bytearray()
        try:
            with anyio.fail_after(seconds):
                async for chunk in self._request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None
        encoding = headers.get("content-encoding", "identity")
        if encoding == "identity":
            return bytes(body)
        if encoding not in ("gzip", "deflate"):
            raise ApiError(415, "Content-Encoding: only gzip and deflate are supported")
        try:
            content = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, limit + 1)
        except zlib.error:
            raise ApiError(400, "the body cannot be read: it is not encoded as it says") from None
        if len(content) > limit:
            raise too_large
        return content

    def _prepare(self, raw: bytes) -> tuple[GenerationRequest, Head, list[bytes]]:
        generation = self._parse(raw, self._app.reader, self._app.unknown, self._settings)
        kind, own_id = ("chatcmpl-" if generation.is_chat else "cmpl-"), uuid.uuid4().hex
        # A client's id is for its answer alone: two of the same would clash on the server.
        answer_id = kind + (generation.request_id or own_id)
        head = Head(answer_id, int(time.time()), self._app.reader.name, generation.is_chat)
        return generation, head, encode_calls(generation, kind + own_id)

    async def _in_thread(
        self, threads: anyio.CapacityLimiter, work: Callable[[], _Result]
    ) -> _Result:
        """The result of ``work``; `ApiError` if none of ``threads`` is free in time."""
        try:
            with anyio.fail_after(self._settings.thread_timeout):  # ends no work that has begun
                return await anyio.to_thread.run_sync(work, limiter=threads)
        except TimeoutError:
            raise ApiError(503, "too many requests are being read; try again later") from None
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # a panic of the tokenizers library
            raise _described(error) from None

    async def _answer(
        self, head: Head, generation: GenerationRequest, pieces: AsyncGenerator[Piece, None]
    ) -> None:
        choices = new_choices(generation)
        async for piece in pieces:
            choices[piece.index].add(piece)
        token_of = self._app.reader.token

        def encode() -> bytes:
            return json.dumps(whole_answer(head, generation, choices, token_of)).encode()

        num_tokens = sum(choice.num_tokens for choice in choices)
        if generation.has_log_probs or num_tokens > _MAX_INLINE_TOKENS:
            body = await self._in_thread(self._app.threads, encode)
        else:
            body = encode()
        await self._reply.start(200, {"Content-Type": "application/json; charset=utf-8"}, len(body))
        await self._reply.write(body)
        await self._reply.finish()

    async def _stream(
        self, head: Head, generation: GenerationRequest, pieces: AsyncGenerator[Piece, None]
    ) -> None:
        """The head leaves with the first piece: a refusal of the server gets its own status."""
        reply, writer = self._reply, EventWriter(head, generation, self._app.reader.token)
        choices = new_choices(generation)
        opening = b"".join(writer.opening(index) for index in range(len(choices)))

        async def start() -> None:
            await reply.start(200, _STREAM_HEADERS)
            await reply.write(opening)

        async for piece in pieces:
            if not reply.is_started:
                await start()
            choice = choices[piece.index]
            choice.add(piece)
            if event := writer.piece(piece.index, piece, choice):
                await reply.write(event)
        if not reply.is_started:
            await start()
        ends = [writer.end(index, choice) for index, choice in enumerate(choices)]
        await reply.write(b"".join(ends) + writer.usage() + DONE)
        await reply.finish()


class Reply:
    """Writes one response; every message waits until the kernel has those before it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.is_started = False
        self._is_stream = False
        self._is_finished = False

    async def start(self, status: int, headers: dict[str, str], size: int | None = None) -> None:
        """The head; ``size`` of the body in bytes, or None for a stream."""
        if size is not None:
            headers = {**headers, "Content-Length": str(size)}
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.is_started, self._is_stream = True, size is None
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes) -> None:
        """A part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """The end, once the kernel has the whole body."""
        await self._send({"type": "http.response.body", "body": b""})
        self._is_finished = True

    async def fail(self, error: ApiError) -> None:
        """Tell the client why its request was ended, if it can still be told, and reads soon."""
        with anyio.move_on_after(_LAST_SECONDS):
            if not self.is_started:
                body = json.dumps(error.body).encode()
                await self.start(error.status, _error_headers(error), len(body))
                await self.write(body)
                await self.finish()
            elif self._is_stream:
                await self.write(error_event(error.body) + DONE)
                await self.finish()

    async def close(self) -> None:
        """Hang up unless the response is finished: the client does not read it, or has left."""
        if not self._is_finished:
            self._scope["state"]["transport"].abort()  # set by `server.Connection`
            await asyncio.sleep(0)  # until uvicorn knows


def cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app`` for pages of ``origins``, too; `InvalidArgument` for what is no origin."""
    for each in origins:
        if each != "*" and not _ORIGIN.fullmatch(each):
            raise InvalidArgument(
                f"--allow-origin {each} is no origin: it is like https://chat.example:8443, "
                "without a path or a slash at its end; * is any."
            )
    if not origins:
        return app
    # Headers of the `openai` package are many and change.
    return CORSMiddleware(app, origins, allow_methods=("GET", "POST"), allow_headers=("*",))


def _no_such_call(request: Request, status: int, reason: str) -> ApiError:
    calls = f"; there are {_CALLS}" if status in (404, 405) else ""
    return ApiError(status, f"{reason}: {request.method}{calls}")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _api_error(request, _no_such_call(request, error.status_code, error.detail))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, _error_headers(error))


def _error_headers(error: ApiError) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.status == 408:  # the rest of the body would keep the connection open
        headers["Connection"] = "close"
    return headers


def _described(error: BaseException) -> ApiError:
    """The error that a client gets for an exception; unexpected ones go to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InflightError):
        return from_server(error)
    _logger.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed")
