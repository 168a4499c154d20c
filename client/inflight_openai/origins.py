"""Pages of browsers that may call the front: CORS, the protocol by which a browser asks for that.

Without it a browser keeps answers from pages of other origins, and sends none of the requests that
OpenAI's clients make: they carry headers of their own, so the browser asks first (``OPTIONS``).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import hdrs, web

from inflight_client.errors import InvalidArgument

_ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+|null")  # null is a page from a file
_ASKED_AGAIN_SECONDS = "600"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AllowedOrigins:
    """The origins whose pages may call."""

    def __init__(self, origins: Iterable[str]) -> None:
        """`InvalidArgument` for what no browser calls an origin; ``*`` is any."""
        self._origins = frozenset(origins)
        self._is_any = _ANY in self._origins
        for each in self._origins - {_ANY}:
            if not _ORIGIN.fullmatch(each):
                raise InvalidArgument(
                    f"--allow-origin {each} is no origin: it is like https://chat.example:8443, "
                    "without a path or a slash at its end; * is any."
                )

    def add_to(self, app: web.Application) -> None:
        """Have ``app`` tell browsers; nothing if there are no origins."""
        if self._origins:
            app.middlewares.insert(0, self._answer_question)
            app.on_response_prepare.append(self._name_origin)

    def _has(self, request: web.Request) -> bool:
        return self._is_any or request.headers.get(hdrs.ORIGIN) in self._origins

    @web.middleware
    async def _answer_question(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method != hdrs.METH_OPTIONS or asked is None or not self._has(request):
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
            hdrs.ACCESS_CONTROL_MAX_AGE: _ASKED_AGAIN_SECONDS,
        }
        # Those of the `openai` package are many and change.
        if names := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = names
        return web.Response(status=204, headers=headers)

    async def _name_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        if not self._is_any:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if self._has(request):
            origin = _ANY if self._is_any else request.headers[hdrs.ORIGIN]
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
