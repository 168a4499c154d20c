"""The routes of the page: its files, and what they ask the server.

The files hold nothing that is secret and need no key; all calls do. The page may load nothing from
another host and run no script that is not a file of its own. No page of another origin gets at the
calls: what a browser sends for one is refused, and those that change something must be JSON, for
which a browser asks first. The front leaves them out of what it allows other origins, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any

import anyio
import anyio.to_process
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from inflight_client.errors import InflightError
from inflight_openai.errors import ApiError, bad_field, from_server
from inflight_openai.page import whatif
from inflight_openai.page.feed import LiveFeed
from inflight_openai.page.texts import TextLog
from inflight_openai.triton_client import TritonClient

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_MAX_BODY_BYTES = 2**14
_BODY_SECONDS = 10.0
_PREDICT_SECONDS = 60.0
_SEND_SECONDS = 30.0  # for a viewer to read an event
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Path -> content and type of each file of the page."""
    found: dict[str, tuple[bytes, str]] = {}
    for entry in (files("inflight_openai.page") / "static").iterdir():
        kind = _TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            found[path] = entry.read_bytes(), kind
    return found


FILES: Mapping[str, tuple[bytes, str]] = _read_files()
"""Path -> content and type; needs no key."""


class Page:
    """The page of one front."""

    def __init__(
        self,
        triton: TritonClient,
        describe: Callable[[], dict[str, Any]],
        is_over: Callable[[], bool],
        texts: TextLog | None,
    ) -> None:
        """``describe``: what the page shows of the model; ``is_over``: the front stops; ``texts``
        None: it shows none."""
        self._triton = triton
        self._describe = describe
        self._is_over = is_over
        self._texts = texts
        self.feed = LiveFeed(triton.live)
        self._predicting = asyncio.Lock()

    def routes(self) -> list[Route]:
        """All routes; errors are `ApiError`."""
        return [
            *(Route(path, _file, methods=["GET"]) for path in FILES),
            _call("/page/info", self._info, "GET"),
            _call("/page/events", self._events, "GET"),
            _call("/page/blocks", self._blocks, "GET"),
            _call("/page/text", self._text, "GET"),
            _call("/page/stop", self._stop, "POST"),
            _call("/page/whatif", self._predict, "POST"),
        ]

    async def _info(self, request: Request) -> Response:
        policies = {"policies": whatif.policy_names()}
        return JSONResponse({**self._describe(), **policies}, headers=_HEADERS)

    async def _events(self, request: Request) -> Response:
        return _EventStream(self.feed, self._is_over)

    async def _blocks(self, request: Request) -> Response:
        try:
            blocks = await self.feed.blocks()
        except InflightError as error:
            raise from_server(error) from None
        return JSONResponse({"blocks": blocks}, headers=_HEADERS)

    async def _text(self, request: Request) -> Response:
        if self._texts is None:
            raise ApiError(404, "texts are not shown here: start with --show-text")
        found = self._texts.find(request.query_params.get("id", ""))
        if found is None:
            raise ApiError(404, "no request of this front has this id, or it was long ago")
        return JSONResponse(found, headers=_HEADERS)

    async def _predict(self, request: Request) -> Response:
        """One at a time, in a process of its own, which is ended when it takes too long or its
        client leaves."""
        changes = whatif.read_changes(await read_object(request))
        if self._predicting.locked():
            raise ApiError(429, "another prediction is being made; try again later", code="busy")
        async with self._predicting:
            with anyio.CancelScope() as scope:
                watch = asyncio.create_task(_cancel_without_client(request, scope))
                try:
                    result = await self._run_prediction(changes)
                finally:
                    watch.cancel()
        if scope.cancelled_caught:
            return Response(status_code=499)  # which nobody reads
        if "error" in result:
            raise ApiError(400, result["error"])
        return JSONResponse(result, headers=_HEADERS)

    async def _run_prediction(self, changes: dict[str, Any]) -> dict[str, Any]:
        try:
            recording = await self._triton.recording()
        except InflightError as error:
            raise from_server(error) from None
        try:
            with anyio.fail_after(_PREDICT_SECONDS):
                return await anyio.to_process.run_sync(
                    whatif.run, recording, changes, cancellable=True
                )
        except TimeoutError:
            message = f"the prediction took more than {_PREDICT_SECONDS:g} s"
            raise ApiError(504, message, code="timeout") from None
        except anyio.BrokenWorkerProcess:
            message = "the process of the prediction was ended before it had a result"
            raise ApiError(503, message, code="prediction_ended") from None

    async def _stop(self, request: Request) -> Response:
        request_id = (await read_object(request)).get("request_id")
        if not isinstance(request_id, str) or not request_id:
            raise bad_field("request_id", "expected the id of a request")
        try:
            await self._triton.stop(request_id)
        except InflightError as error:
            raise from_server(error) from None
        return JSONResponse({"stopped": request_id})


class _EventStream(StreamingResponse):
    """The events of one viewer, which holds its place until it leaves or does not read."""

    def __init__(self, feed: LiveFeed, is_over: Callable[[], bool]) -> None:
        super().__init__(feed.events(is_over), media_type="text/event-stream", headers=_HEADERS)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response`."""

        async def send_soon(message: Message) -> None:
            with anyio.fail_after(_SEND_SECONDS):
                await send(message)

        with self._feed.place():
            try:
                await super().__call__(scope, receive, send_soon)
            except TimeoutError:
                scope["state"]["transport"].abort()  # set by `server.Connection`
                await asyncio.sleep(0)  # until uvicorn knows


def _call(path: str, answer: Callable[[Request], Awaitable[Response]], method: str) -> Route:
    """A route that refuses what a browser sends for a page of another origin."""

    async def checked(request: Request) -> Response:
        # Browsers tell it to addresses of https and of this machine; programs do not.
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise ApiError(403, "Sec-Fetch-Site: no page of another origin may call this")
        return await answer(request)

    return Route(path, checked, methods=[method])


async def _cancel_without_client(request: Request, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _file(request: Request) -> Response:
    content, kind = FILES[request.url.path]
    return Response(content, headers={**_HEADERS, "Content-Type": kind})


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object of a call that changes something; `ApiError` for anything else."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "Content-Type: only application/json is supported here")
    raw = bytearray()
    try:
        with anyio.fail_after(_BODY_SECONDS):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > _MAX_BODY_BYTES:
                    raise ApiError(413, f"the body has more than {_MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:g} s") from None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    return body
