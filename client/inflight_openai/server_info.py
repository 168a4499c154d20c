"""What gateways, load balancers and monitoring ask beside answers: version, limits and metrics.

Paths and keys are those of vLLM and SGLang. Nothing tells a path or an address of the machine.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from inflight_client.address import Address
from inflight_client.errors import InvalidArgument
from inflight_openai.errors import ApiError
from inflight_openai.private_log import get_logger
from inflight_openai.prompts import PromptReader
from inflight_openai.settings import FrontSettings

_logger = get_logger(__name__)

_METRICS_PORT = 8002  # Triton's default
_METRICS_SECONDS = 5.0


def find_metrics_url(url: str | None, server: Address) -> str:
    """``url``, or where ``server`` has its metrics page unless told otherwise; "" for none.
    `InvalidArgument` unless it is an HTTP address."""
    if url is None:
        return f"http://{Address('http', server.host, _METRICS_PORT).target}/metrics"
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that do not close
        parts = urlsplit("")
    if url and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise InvalidArgument(f'--metrics-url "{url}": give http://HOST:PORT/metrics, or "".')
    return url


class ServerInfo:
    """The handlers of these calls."""

    def __init__(self, settings: FrontSettings, reader: PromptReader) -> None:
        self._settings = settings
        self._reader = reader
        self._metrics_url = settings.metrics_url
        self._reads_metrics = asyncio.Lock()  # one connection, however many ask
        self._version = version("inflight")

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [
            web.get("/metrics", self._metrics),
            web.get("/version", self._tell_version),
            *(web.get(path, self._server_info) for path in ("/server_info", "/get_server_info")),
            *(web.get(path, self._model_info) for path in ("/model_info", "/get_model_info")),
        ]

    async def _tell_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._version})

    async def _server_info(self, request: web.Request) -> web.Response:
        limits = self._reader.limits
        return web.json_response(
            self._model()
            | {
                "served_model_name": self._reader.name,
                "version": self._version,
                "context_length": limits.max_seq_len,
                "max_req_input_len": limits.max_input_len,
                "max_running_requests": self._settings.max_requests,
                "vocab_size": limits.vocab_size,
            }
        )

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(self._model() | {"is_generation": True})

    def _model(self) -> dict[str, Any]:
        """Clients that look for files find the model under its name, as at a hub."""
        return {"model_path": self._reader.name, "tokenizer_path": self._reader.name}

    async def _metrics(self, request: web.Request) -> web.Response:
        """The server's own page, as it is."""
        if not self._metrics_url:
            raise ApiError(404, "the metrics of the inference server are not shown here")
        timeout = aiohttp.ClientTimeout(total=_METRICS_SECONDS)
        try:
            async with (
                self._reads_metrics,
                aiohttp.ClientSession(timeout=timeout) as client,
                client.get(self._metrics_url, allow_redirects=False) as page,
            ):
                text = await page.read()
                kind, status = page.headers.get("Content-Type", "text/plain"), page.status
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            _logger.warning("the page of --metrics-url cannot be read: %s", type(error).__name__)
            raise ApiError(
                503,
                "the metrics page of the inference server cannot be reached: "
                "start inflight openai with --metrics-url",
                code="server_unreachable",
            ) from None
        if status != web.HTTPOk.status_code:
            raise ApiError(502, f"the metrics page of the inference server answers {status}")
        return web.Response(body=text, headers={"Content-Type": kind})
