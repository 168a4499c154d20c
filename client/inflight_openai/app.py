"""The HTTP side: routes, admission, streams of events, and errors in OpenAI's shape.

A client that goes away cancels its handler (aiohttp), which closes the gRPC stream, which ends the
request on the server. Nothing of a prompt or an answer is logged.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from inflight_client.errors import InflightError
from inflight_openai.answers import (
    DONE,
    Choice,
    EventWriter,
    Head,
    error_event,
    new_choices,
    whole_answer,
)
from inflight_openai.aside import Aside
from inflight_openai.errors import ApiError, from_upstream, model_not_found
from inflight_openai.fields import Body, UnknownFields
from inflight_openai.origins import AllowedOrigins
from inflight_openai.parsing import GenerationJob, parse_chat, parse_completion
from inflight_openai.places import Place, Places
from inflight_openai.private_log import get_logger
from inflight_openai.prompts import PromptReader
from inflight_openai.server_info import ServerInfo
from inflight_openai.settings import FrontSettings
from inflight_openai.upstream import Piece, Upstream, encode_job

_logger = get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NUM_THREADS = 4
_NUM_CHAT_THREADS = 2  # of their own: a slow template holds up chats only

_CALLS = (
    "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, /health, /metrics, /version, "
    "/server_info and /model_info"
)

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy in between must not collect events
}


class Front:
    """The routes over one upstream server."""

    def __init__(self, settings: FrontSettings, upstream: Upstream, reader: PromptReader) -> None:
        self._settings = settings
        self._upstream = upstream
        self._reader = reader
        self._unknown = UnknownFields(is_strict=settings.is_strict)
        self._started = int(time.time())
        self._info = ServerInfo(settings, reader)
        self._places = Places(settings.max_requests, settings.timeout)
        self._threads = Aside(_NUM_THREADS, settings.thread_timeout)
        self._chat_threads = Aside(_NUM_CHAT_THREADS, settings.thread_timeout)

    def app(self) -> web.Application:
        """The application; run it with ``handler_cancellation``."""
        app = web.Application(
            client_max_size=self._settings.max_body_bytes, middlewares=[_errors_as_json]
        )
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),  # it may have slashes
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                *self._info.routes(),
            ]
        )
        AllowedOrigins(self._settings.allowed_origins).add_to(app)
        app.on_shutdown.append(self._drain)
        return app

    async def _drain(self, app: web.Application) -> None:
        await self._places.close(self._settings.drain_seconds)

    async def _health(self, request: web.Request) -> web.Response:
        """200 while requests are taken: the server's model says so and we do not stop."""
        try:
            is_ready = not self._places.is_closed and await self._upstream.is_ready()
        except InflightError:
            is_ready = False
        return web.json_response({"ready": is_ready}, status=200 if is_ready else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != self._reader.name:
            raise model_not_found(self._reader.name)
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._reader.name,
            "object": "model",
            "created": self._started,
            "owned_by": "inflight",
            "max_model_len": self._reader.limits.max_seq_len,
        }

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._take(
            request, self._threads, lambda body: parse_completion(body, self._reader)
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        default = self._settings.default_max_tokens
        return await self._take(
            request, self._chat_threads, lambda body: parse_chat(body, self._reader, default)
        )

    async def _take(
        self, request: web.Request, threads: Aside, parse: Callable[[Body], GenerationJob]
    ) -> web.StreamResponse:
        with self._places.take(request) as place:
            raw = await self._read(request, place)

            def prepare() -> tuple[GenerationJob, Head, list[bytes]]:
                job = parse(Body(raw, self._unknown))
                kind, own_id = ("chatcmpl-" if job.is_chat else "cmpl-"), uuid.uuid4().hex
                # A client's id is for its answer alone: two of the same would meet on the server.
                answer_id = kind + (job.request_id or own_id)
                head = Head(answer_id, int(time.time()), self._reader.name, job.is_chat)
                return job, head, encode_job(job, kind + own_id)

            job, head, calls = await threads.run(place, prepare)
            async with aclosing(self._upstream.run(job, calls)) as pieces:
                if job.is_streaming:
                    return await self._stream(request, place, head, job, pieces)
                return await self._answer(request, place, head, job, pieces)

    async def _read(self, request: web.Request, place: Place) -> bytes:
        """The body; `ApiError` if it is too large or too slow."""
        seconds = self._settings.body_timeout
        late = ApiError(408, f"the body did not arrive within {seconds:g} s")
        try:
            with place.limit(seconds, late):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            limit = self._settings.max_body_bytes
            raise ApiError(413, f"the body has more than {limit} bytes") from None
        except web.RequestPayloadError:  # another encoding than it says, or a broken chunk
            raise ApiError(400, "the body cannot be read: it is not encoded as it says") from None

    async def _answer(
        self,
        request: web.Request,
        place: Place,
        head: Head,
        job: GenerationJob,
        pieces: AsyncGenerator[Piece, None],
    ) -> web.Response:
        """Written to its last byte here: a client that does not read it holds a place."""
        choices = new_choices(job)
        async for piece in pieces:
            choices[piece.index].add(piece)
        body = await self._threads.run(
            place, lambda: json.dumps(whole_answer(head, job, choices, self._reader.token)).encode()
        )
        response = web.Response(body=body, content_type="application/json", charset="utf-8")
        with place.writing():
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _stream(
        self,
        request: web.Request,
        place: Place,
        head: Head,
        job: GenerationJob,
        pieces: AsyncGenerator[Piece, None],
    ) -> web.StreamResponse:
        """Headers leave with the first piece: a request refused by the server gets its status."""
        first = await anext(pieces, None)
        writer = EventWriter(head, job, self._reader.token)
        choices = new_choices(job)
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        with place.writing():
            await response.prepare(request)
            try:
                with place.telling():
                    await response.write(b"".join(writer.opening(i) for i in range(len(choices))))
                    if first is not None:
                        await _write_piece(response, writer, choices, first)
                        async for piece in pieces:
                            await _write_piece(response, writer, choices, piece)
                    ends = [writer.end(index, choice) for index, choice in enumerate(choices)]
                    await response.write(b"".join(ends) + writer.usage(choices) + DONE)
            except ConnectionResetError:
                raise
            except Exception as error:
                await response.write(error_event(_told(error).body) + DONE)
            await response.write_eof()
        return response


async def _write_piece(
    response: web.StreamResponse, writer: EventWriter, choices: list[Choice], piece: Piece
) -> None:
    choice = choices[piece.index]
    choice.add(piece)
    event = writer.piece(piece.index, piece, choice)
    if event:
        await response.write(event)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error, also aiohttp's own, as OpenAI's error object."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        where = f"; there are {_CALLS}" if error.status in (404, 405) else ""
        return _error_response(ApiError(error.status, f"{error.reason}: {request.method}{where}"))
    except ConnectionResetError:
        raise  # the client has gone: nobody is there to be told
    except Exception as error:
        return _error_response(_told(error))


def _told(error: Exception) -> ApiError:
    """What the client hears of what ended its request; what nobody foresaw goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InflightError):
        return from_upstream(error)
    _logger.exception("a request failed", exc_info=error)
    return ApiError(500, "the request failed")


def _error_response(error: ApiError) -> web.Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return web.Response(
        text=json.dumps(error.body),
        status=error.status,
        headers=headers,
        content_type="application/json",
    )
