"""The HTTP side: routes, admission, streams of events, and errors in OpenAI's shape.

A request to a model is admitted before its body is read, and holds its place until the last byte of
its answer is with the kernel. It ends early for three reasons, each by cancelling its scope: its
time is over, the server stops, or its client leaves. The cancellation closes the gRPC stream, which
ends the request on the server. Nothing of a prompt or an answer is logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight_client.errors import InflightError, InvalidArgument, ServerError
from inflight_openai.errors import (
    NO_MODEL,
    ApiError,
    bad_field,
    from_server,
    model_not_found,
)
from inflight_openai.generation import (
    GenerationRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from inflight_openai.page.routes import FILES, Page
from inflight_openai.page.texts import TextLog
from inflight_openai.prompts import PromptReader
from inflight_openai.responses import DONE, EventWriter, Head, WholeAnswer, error_event
from inflight_openai.responses_api.request import parse_response
from inflight_openai.responses_api.writer import ResponseWriter
from inflight_openai.schema import UnknownFields
from inflight_openai.settings import FrontSettings
from inflight_openai.triton_client import (
    MetricsPage,
    Piece,
    TritonClient,
    call_names,
    encode_calls,
    with_histograms,
    with_lora_requests,
)

_logger = logging.getLogger(__name__)

_NUM_THREADS = 4  # each that works delays the event loop by up to 5 ms, a turn at Python's lock
_NUM_CHAT_THREADS = 2  # of their own: slow templates hold up chats only
_MAX_INLINE_TOKENS = 4096  # of an answer that the event loop encodes itself, in about 0.1 ms
_LAST_SECONDS = 1.0  # for a client to read why its request was ended

_CALLS = (
    "POST /v1/completions, /v1/chat/completions, /v1/responses, /tokenize and /detokenize, "
    "GET /v1/models, /health, /metrics, /version, /server_info and /model_info"
)
_OPEN_PATHS = frozenset({"/health", "/ping", *FILES})
"""Asked without a key: by programs that watch a server, and the files of the page."""

_NO_KEY = ApiError(
    401,
    "a key is needed, and there is none here, or a wrong one: Authorization: Bearer KEY",
    code="invalid_api_key",
)
_REQUEST_ID = "x-request-id"
_GIVEN_IDS = (_REQUEST_ID, "x-client-request-id")
"""A client's own id, of which the first one counts: as gateways and vLLM have it; OpenAI's."""

_FITTING_ID = re.compile(r"[\x21-\x7e]{1,512}")  # OpenAI's bounds
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+|null")  # null: a page from a file
_JSON_HEADERS = {"Content-Type": "application/json; charset=utf-8"}
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
        self._created = int(time.time())
        self.admission = Admission(settings.max_requests, settings.timeout)
        self.unknown = UnknownFields(is_strict=settings.is_strict)
        self.threads = anyio.CapacityLimiter(_NUM_THREADS)
        self._metrics_page = metrics
        self.texts = TextLog(reader.decode) if settings.shows_text else None

    def asgi(self) -> ASGIApp:
        """The application; `InvalidArgument` for an allowed origin that is none.

        Starlette's middleware wraps every message, so that the events of streams go around it.
        """
        pages = self._pages_for_gateways()
        page = Page(self.triton, self._describe, lambda: self.admission.is_closed, self.texts)
        changes = [
            Route("/v1/load_lora_adapter", self._load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload_adapter, methods=["POST"]),
        ]
        info = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ping", self._health),
                Route("/metrics", self._metrics),
                *(changes if self.settings.loads_adapters else ()),
                Route("/v1/models", self._list_models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                *(Route(path, _not_served, methods=["POST"]) for path in _NOT_SERVED),
                Route("/v1/models/{name:path}", self._find_model),  # names may have slashes
                *(Route(path, JSONResponse(pages[path]), methods=["GET"]) for path in pages),
                *(page.routes() if self.settings.has_page else ()),
            ],
            exception_handlers={HTTPException: _http_error, ApiError: _api_error},
        )
        info.router.redirect_slashes = False
        chat_threads = anyio.CapacityLimiter(_NUM_CHAT_THREADS)
        app = Router(
            routes=[
                Route("/v1/completions", GenerationCall(self, parse_completion, self.threads)),
                Route("/v1/chat/completions", GenerationCall(self, parse_chat, chat_threads)),
                Route("/v1/responses", GenerationCall(self, parse_response, chat_threads)),
            ],
            default=info,
            redirect_slashes=False,
        )
        guarded = require_key(app, self.settings.api_keys)
        shared = cors(
            guarded, self.settings.allowed_origins or ()
        )  # which answers before a key is sent
        return with_request_ids(shared)

    def _card(self, name: str) -> dict[str, Any]:
        """The model, or one of its adapters, whose ``parent`` is the model."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "inflight",
            "root": name,
            "parent": None if name == self.reader.name else self.reader.name,
            "max_model_len": self.reader.limits.max_seq_len,
        }

    async def _list_models(self, request: Request) -> Response:
        await self.refresh_adapters()
        names = [self.reader.name, *sorted(self.reader.adapters)]
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def _find_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.reader.name:
            await self.refresh_adapters()
            if name not in self.reader.adapters:
                raise model_not_found(self.reader.name)
        return JSONResponse(self._card(name))

    def _describe(self) -> dict[str, Any]:
        """What the page shows of the model, and needs to talk to it."""
        return {
            "model": self.reader.name,
            "models": [self.reader.name, *sorted(self.reader.adapters)],
            "has_chat": self.reader.has_template,
            "max_seq_len": self.reader.limits.max_seq_len,
            "shows_text": self.settings.shows_text,
            "version": version("inflight"),
        }

    def run(
        self, generation: GenerationRequest, calls: Sequence[bytes], name: str
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of a request that the server knows by ``name``; close the generator."""
        pieces = self.triton.run(generation, calls)
        if self.texts is None:
            return pieces
        names = call_names(name, len(calls))
        return self.texts.follow(pieces, names, generation.prompts, generation.num_answers)

    async def refresh_adapters(self) -> None:
        """Other fronts load and unload them, too. What was known stays where the server does not
        answer, or runs without."""
        with suppress(InflightError):
            self.reader.adapters = await self.triton.adapters()

    async def _load_adapter(self, request: Request) -> Response:
        """vLLM's call: ``{"lora_name", "lora_path"}``."""
        name, path = await self._read_strings(request, "lora_name", "lora_path")
        if name == self.reader.name:
            raise bad_field("lora_name", "the model itself has this name")
        await self._change_adapters(lora_name=name, lora_path=path)
        return Response(f"Success: LoRA adapter '{name}' added successfully")

    async def _unload_adapter(self, request: Request) -> Response:
        """vLLM's call: ``{"lora_name"}``."""
        (name,) = await self._read_strings(request, "lora_name")
        await self.refresh_adapters()
        if name not in self.reader.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")
        await self._change_adapters(lora_name=name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully")

    async def _change_adapters(self, **change: str) -> None:
        try:
            self.reader.adapters = await self.triton.adapters(**change)
        except ServerError as error:
            raise from_server(error, "lora_name") from None

    async def _read_strings(self, request: Request, *names: str) -> list[str]:
        """These fields of a JSON object; others, as vLLM has some, ask for nothing here."""
        try:
            body = json.loads(await _read_body(request, self.settings))
        except (ValueError, RecursionError):  # or nested too deeply
            raise ApiError(400, "the body is not JSON") from None
        values = [body.get(name) if isinstance(body, dict) else None for name in names]
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, str) or not value:
                raise bad_field(name, "expected a string")
        return [str(value) for value in values]

    def _pages_for_gateways(self) -> dict[str, dict[str, Any]]:
        """Path -> content, as vLLM and SGLang have them. Clients that look for files find the model
        under its name, as at a hub, and no path of this machine."""
        limits, name, own_version = self.reader.limits, self.reader.name, version("inflight")
        paths = {"model_path": name, "tokenizer_path": name}
        model_info = {**paths, "is_generation": True}
        server_info = {
            **paths,
            "served_model_name": name,
            "version": own_version,
            "context_length": limits.max_seq_len,
            "max_req_input_len": limits.max_input_len,
            "max_running_requests": self.settings.max_requests,
            "vocab_size": limits.vocab_size,
        }
        return {
            "/version": {"version": own_version},
            "/server_info": server_info,
            "/get_server_info": server_info,
            "/model_info": model_info,
            "/get_model_info": model_info,
        }

    async def _health(self, request: Request) -> Response:
        """200 while requests are taken: the model says so and this process does not stop."""
        try:
            is_ready = not self.admission.is_closed and await self.triton.is_ready()
        except InflightError:
            is_ready = False
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def _tokenize(self, request: Request) -> Response:
        """vLLM's call: the tokens of a prompt, or of a chat."""
        raw = await _read_body(request, self.settings)
        with anyio.fail_after(self.settings.thread_timeout):
            ids, names = await anyio.to_thread.run_sync(
                lambda: parse_tokenize(raw, self.reader, self.unknown), limiter=self.threads
            )
        limit = self.reader.limits.max_seq_len
        told = {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names}
        return JSONResponse(told)

    async def _detokenize(self, request: Request) -> Response:
        """vLLM's call: the text of tokens."""
        raw = await _read_body(request, self.settings)
        with anyio.fail_after(self.settings.thread_timeout):
            text = await anyio.to_thread.run_sync(
                lambda: parse_detokenize(raw, self.reader), limiter=self.threads
            )
        return JSONResponse({"prompt": text})

    async def _metrics(self, request: Request) -> Response:
        labels = asyncio.create_task(self.triton.lora_requests())  # both may take seconds
        try:
            content, kind = await self._metrics_page.read()
            content = with_lora_requests(with_histograms(content), await labels)
        finally:
            labels.cancel()
        return Response(content, headers={"Content-Type": kind})


class Place:
    """The place of a running request; its time is over after ``timeout`` seconds."""

    def __init__(self, timeout: float) -> None:
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + timeout)
        self.reason: ApiError | None = ApiError(
            504, "the answer took too long and was given up", code="timeout"
        )

    def end(self, reason: ApiError | None) -> None:
        """Cancel the request; ``reason`` is what its client hears, None if it has left."""
        self.reason = reason
        self.scope.cancel()

    def check(self) -> None:
        """`ApiError` if the request was ended and its client should hear why."""
        if self.scope.cancelled_caught and self.reason is not None:
            raise self.reason


class Admission:
    """Counts running requests, and with them the bodies and answers in memory."""

    def __init__(self, max_requests: int, timeout: float) -> None:
        self._max_requests = max_requests
        self._timeout = timeout
        self._places: set[Place] = set()
        self.is_closed = False

    @property
    def num_running(self) -> int:
        """Requests that hold a place."""
        return len(self._places)

    def admit(self) -> Place:
        """A place, to be released; `ApiError` if there is none."""
        if self.is_closed:
            raise ApiError(503, "the server is shutting down")
        if self.num_running >= self._max_requests:
            message = f"{self.num_running} requests are running; try again later"
            raise ApiError(429, message, code="busy")
        place = Place(self._timeout)
        self._places.add(place)
        return place

    def release(self, place: Place) -> None:
        """The request has ended."""
        self._places.remove(place)

    async def close(self, seconds: float) -> None:
        """Admit no more requests; end those that still run after ``seconds``."""
        self.is_closed = True
        with anyio.move_on_after(seconds):
            while self._places:
                await anyio.sleep(0.02)
        for place in self._places:
            place.end(ApiError(503, "the server is shutting down: the answer was given up"))


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A call of the model, as an ASGI application: from the head of a request to the last byte of
    its answer."""

    app: OpenAIApp
    parse: _Parse
    threads: anyio.CapacityLimiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        reply, place = Reply(scope, send), None
        try:
            place = self.app.admission.admit()
            with place.scope:
                await self._respond(Request(scope, receive), reply, place)
            place.check()
        except Exception as error:
            await reply.fail(_described(error))
        except asyncio.CancelledError:  # by uvicorn, or the event loop at its end
            pass
        finally:
            await reply.close()
            if place is not None:
                self.app.admission.release(place)

    async def _respond(self, request: Request, reply: Reply, place: Place) -> None:
        if request.method != "POST":
            raise _no_such_call(request, 405, "Method Not Allowed", "POST")
        try:
            raw = await _read_body(request, self.app.settings)
        except ClientDisconnect:
            return
        watch = asyncio.create_task(_end_without_client(request, place))
        try:
            own_id = request.scope["state"]["own_id"]
            generation, head, calls, name = await self._prepared(raw, own_id)
            answer = self._stream if generation.is_streaming else self._answer
            await answer(generation, head, self.app.run(generation, calls, name), reply)
        finally:
            watch.cancel()

    async def _prepared(
        self, raw: bytes, own_id: str
    ) -> tuple[GenerationRequest, Head, list[bytes], str]:
        """A model that is not known may be an adapter that another front has loaded."""
        app = self.app
        try:
            return await self._in_thread(self.threads, lambda: self._prepare(raw, own_id))
        except ApiError as error:
            known = app.reader.adapters
            if error.code != NO_MODEL:
                raise
            await app.refresh_adapters()
            if app.reader.adapters == known:
                raise
        return await self._in_thread(self.threads, lambda: self._prepare(raw, own_id))

    def _prepare(self, raw: bytes, own_id: str) -> tuple[GenerationRequest, Head, list[bytes], str]:
        app = self.app
        generation = self.parse(raw, app.reader, app.unknown, app.settings)
        kind = "chatcmpl-" if generation.is_chat else "cmpl-"
        kind = kind if generation.response_fields is None else "resp_"
        # A client's id is for its answer alone: two of the same would clash on the server.
        answer_id = kind + (generation.request_id or own_id)
        head = Head(answer_id, int(time.time()), generation.model, generation.is_chat)
        calls = encode_calls(
            generation, kind + own_id, tells_cached=app.triton.takes("return_num_cached_tokens")
        )
        return generation, head, calls, kind + own_id

    async def _in_thread(
        self, threads: anyio.CapacityLimiter, work: Callable[[], _Result]
    ) -> _Result:
        """The result of ``work``; `ApiError` if none of ``threads`` is free in time."""
        try:
            with anyio.fail_after(self.app.settings.thread_timeout):  # ends no work that has begun
                return await anyio.to_thread.run_sync(work, limiter=threads)
        except TimeoutError:
            raise ApiError(503, "too many requests are being read; try again later") from None
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # a panic of the tokenizers library
            raise _described(error) from None

    async def _answer(
        self,
        generation: GenerationRequest,
        head: Head,
        source: AsyncGenerator[Piece, None],
        reply: Reply,
    ) -> None:
        answer: WholeAnswer | ResponseWriter
        if generation.response_fields is None:
            answer = WholeAnswer(head, generation, self.app.reader.token)
        else:
            answer = self._response_writer(head, generation)
        async with aclosing(source) as pieces:
            async for piece in pieces:
                answer.add(piece)
        if generation.has_log_probs or answer.num_tokens > _MAX_INLINE_TOKENS:
            body = await self._in_thread(self.app.threads, answer.encode)
        else:
            body = answer.encode()
        await reply.send(200, _JSON_HEADERS, body)

    async def _stream(
        self,
        generation: GenerationRequest,
        head: Head,
        source: AsyncGenerator[Piece, None],
        reply: Reply,
    ) -> None:
        """The head leaves with the first event: a refusal of the server gets its own status."""
        writer: EventWriter | ResponseWriter
        writer, done = EventWriter(head, generation, self.app.reader.token), DONE
        if generation.response_fields is not None:
            writer, done = self._response_writer(head, generation), b""
        async with aclosing(source) as pieces:
            async for piece in pieces:
                if event := writer.piece(piece):
                    await reply.stream(event)
        await reply.stream(writer.ending() + done)
        await reply.finish()

    def _response_writer(self, head: Head, generation: GenerationRequest) -> ResponseWriter:
        reader = self.app.reader
        return ResponseWriter(head, generation, reader.token, reader.count_tokens)


async def _end_without_client(request: Request, place: Place) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    place.end(None)


async def _read_body(request: Request, settings: FrontSettings) -> bytes:
    """The body; `ApiError` if it is too large, too slow or not encoded as its head says."""
    limit, seconds = settings.max_body_bytes, settings.body_timeout
    too_large = ApiError(413, f"the body has more than {limit} bytes")
    if int(request.headers.get("content-length", "0")) > limit:
        raise too_large
    body = bytearray()
    try:
        with anyio.fail_after(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None
    encoding = request.headers.get("content-encoding", "").lower()
    if encoding in ("", "identity"):
        return bytes(body)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(415, "Content-Encoding: only gzip and deflate are supported")
    try:
        content = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, limit + 1)
    except zlib.error:
        raise ApiError(400, "the body cannot be read: it is not encoded as it says") from None
    if len(content) > limit:
        raise too_large
    return content


class Reply:
    """Writes one response; every message waits until the kernel has those before it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._is_started = False
        self._is_stream = False
        self._is_finished = False

    async def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """A whole response."""
        await self._start(status, {**headers, "Content-Length": str(len(body))})
        await self._write(body)
        await self.finish()

    async def stream(self, data: bytes) -> None:
        """The next events of a stream."""
        if not self._is_started:
            self._is_stream = True
            await self._start(200, _STREAM_HEADERS)
        await self._write(data)

    async def finish(self) -> None:
        """The end, once the kernel has the whole body."""
        await self._send({"type": "http.response.body", "body": b""})
        self._is_finished = True

    async def fail(self, error: ApiError) -> None:
        """Tell the client why its request was ended, if it can still be told, and reads soon."""
        with anyio.move_on_after(_LAST_SECONDS):
            if not self._is_started:
                body = json.dumps(error.body).encode()
                await self.send(error.status, _error_headers(error), body)
            elif self._is_stream:
                await self.stream(error_event(error.body) + DONE)
                await self.finish()

    async def close(self) -> None:
        """Hang up unless the response is finished: the client does not read it, or has left."""
        if not self._is_finished:
            self._scope["state"]["transport"].abort()  # set by `server.Connection`
            await asyncio.sleep(0)  # until uvicorn knows

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._is_started = True
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


def with_request_ids(app: ASGIApp) -> ASGIApp:
    """``app`` whose every response names its request in ``x-request-id``: as the client did, or by
    an id of ours, with which the server's own name of a generation ends."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        headers, own_id = Headers(scope=scope), uuid.uuid4().hex
        scope["state"]["own_id"] = own_id
        given = (headers.get(name, "") for name in _GIVEN_IDS)
        shown = next(filter(_FITTING_ID.fullmatch, given), own_id)
        pair = (_REQUEST_ID.encode(), shown.encode())

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), pair]}
            await send(message)

        await app(scope, receive, send_named)

    return named


def require_key(app: ASGIApp, keys: Sequence[str]) -> ASGIApp:
    """``app`` for clients that send one of ``keys``, compared in constant time; for all if there
    are none."""
    digests = [_digest(key) for key in keys]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            kind, _, given = Request(scope).headers.get("authorization", "").partition(" ")
            digest = _digest(given.strip())
            matches = [hmac.compare_digest(digest, each) for each in digests]
            if kind.lower() != "bearer" or not any(matches):
                await (await _api_error(Request(scope), _NO_KEY))(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded if keys else app


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app`` for pages of ``origins``, too, but for the live page's own files and calls;
    `InvalidArgument` for what is no origin."""
    for each in origins:
        if each != "*" and not _ORIGIN.fullmatch(each):
            raise InvalidArgument(
                f"--allow-origin {each} is no origin: it is like https://chat.example:8443, "
                "without a path or a slash at its end; * is any."
            )
    if not origins:
        return app
    # Headers of the `openai` package are many and change.
    shared = CORSMiddleware(
        app,
        origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=(_REQUEST_ID,),
    )

    async def chosen(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        is_page = path in FILES or path.startswith("/page/")
        await (app if is_page else shared)(scope, receive, send)

    return chosen


_NOT_SERVED = {
    "/v1/embeddings": "embeddings need a model made for them; this one generates text",
    "/v1/moderations": "moderations need a model made for them; this one generates text",
    "/v1/images/generations": "this model generates text",
    "/v1/audio/speech": "this model generates text",
    "/v1/audio/transcriptions": "this model reads text",
}
"""Path -> why there is no such call."""


async def _not_served(request: Request) -> Response:
    raise ApiError(404, _NOT_SERVED[request.url.path], code="unsupported_endpoint")


def _no_such_call(request: Request, status: int, reason: str, allow: str | None) -> ApiError:
    calls = f"; there are {_CALLS}" if status in (404, 405) else ""
    return ApiError(status, f"{reason}: {request.method}{calls}", allow=allow)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allow = (error.headers or {}).get("Allow")
    return await _api_error(request, _no_such_call(request, error.status_code, error.detail, allow))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, _error_headers(error))


def _error_headers(error: ApiError) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.allow is not None:
        headers["Allow"] = error.allow
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
