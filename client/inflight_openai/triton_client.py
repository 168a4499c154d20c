"""The inference server behind the front: a gRPC stream per prompt, and its metrics page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx

from inflight_client.address import Address, default_url, parse_address
from inflight_client.aio import ask, takes_requests
from inflight_client.errors import InvalidArgument, ServerError
from inflight_client.grpc_transport import GrpcTransport, encode_bytes
from inflight_client.headers import checked_headers
from inflight_client.options import Request, Response, question
from inflight_openai.errors import ApiError, from_server
from inflight_openai.generation import GenerationRequest
from inflight_protocol import LLM_MODEL_NAME

_logger = logging.getLogger(__name__)

_METRICS_PORT = 8002  # Triton's default
_METRICS_SECONDS = 5.0
_HEALTH_SECONDS = 5.0
_DESCRIBE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """A token of an answer, and the likeliest ``(token id, log probability)`` in its place."""

    token_id: int
    log_prob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one response adds to answer ``index``; ``num_tokens`` may be more than the text shows.

    ``log_probs`` and ``token_ids``, one for each token, when the request asks for them.
    ``reason``: the server's finish reason; "" before the end.
    """

    index: int
    text: str
    num_tokens: int
    log_probs: Sequence[TokenLogProbs] = ()
    reason: str = ""
    token_ids: Sequence[int] = ()


class TritonClient:
    """A connection to the server; belongs to one event loop, for any number of requests."""

    def __init__(
        self, url: str | None, timeout: float, headers: Mapping[str, str] | None = None
    ) -> None:
        """``timeout``: seconds for an answer; ``headers`` go with every call. `InvalidArgument` for
        a bad ``url`` or header."""
        self.address = parse_address(default_url("grpc") if url is None else url, "grpc")
        self._transport = GrpcTransport(self.address, checked_headers(headers))
        self._timeout = timeout

    async def describe(self) -> dict[str, Any]:
        """The server's description of its model."""
        return await ask(self._transport, question(LLM_MODEL_NAME, "describe"), _DESCRIBE_SECONDS)

    async def is_ready(self) -> bool:
        """Whether the model takes requests; `InflightError` when the server does not answer."""
        return await takes_requests(self._transport, LLM_MODEL_NAME, _HEALTH_SECONDS)

    def run(
        self, request: GenerationRequest, calls: Sequence[bytes]
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of all answers in order of arrival; close the generator to cancel them.

        ``calls``: of `encode_calls`.
        """
        answers = [self._answer(request, call, i) for i, call in enumerate(calls)]
        return answers[0] if len(answers) == 1 else _merged(answers)

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.close()

    async def _answer(
        self, request: GenerationRequest, call: bytes, prompt_index: int
    ) -> AsyncGenerator[Piece, None]:
        first_index = prompt_index * request.num_answers
        responses = self._transport.infer_encoded(call, self._timeout)
        async with aclosing(responses.receive()) as received:
            try:
                async for response in received:
                    yield _read_piece(response, first_index, request)
            except ServerError as error:
                raise from_server(error, request.guide_field) from None


class MetricsPage:
    """The server's metrics page, read over one connection however many clients ask for it."""

    def __init__(self, url: str | None, server: Address) -> None:
        """``url``: "" for none, and None for where ``server`` has it by default.
        `InvalidArgument` unless it is an HTTP address."""
        if url is None:
            url = f"http://{Address('http', server.host, _METRICS_PORT).target}/metrics"
        try:
            parts = urlsplit(url)
        except ValueError:  # brackets that do not close
            parts = urlsplit("")
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise InvalidArgument(f'--metrics-url "{url}": give http://HOST:PORT/metrics, or "".')
        self.url = url
        self._lock = asyncio.Lock()

    async def read(self) -> tuple[bytes, str]:
        """The page and its content type; `ApiError` without its address if there is none."""
        if not self.url:
            raise ApiError(404, "the metrics of the inference server are not shown here")
        try:
            with anyio.fail_after(_METRICS_SECONDS):
                async with self._lock, httpx.AsyncClient(trust_env=False, timeout=None) as client:
                    page = await client.get(self.url)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            _logger.warning("the page of --metrics-url cannot be read: %s", type(error).__name__)
            raise ApiError(
                503,
                "the metrics page of the inference server cannot be reached: "
                "start inflight openai with --metrics-url",
                code="server_unreachable",
            ) from None
        if page.status_code != httpx.codes.OK:
            message = f"the metrics page of the inference server answers {page.status_code}"
            raise ApiError(502, message)
        return page.content, page.headers.get("Content-Type", "text/plain")


def encode_calls(request: GenerationRequest, request_id: str) -> list[bytes]:
    """One encoded call per prompt; takes a millisecond per prompt with ``logit_bias``."""
    return [encode_bytes(call) for call in make_calls(request, request_id)]


def make_calls(request: GenerationRequest, request_id: str) -> list[Request]:
    """One call per prompt; responses have text and the number of its tokens."""
    outputs = ["text_output", "sequence_length", "finish_reason"]
    if request.has_log_probs or request.has_token_ids:
        outputs.append("output_ids")
    if request.has_log_probs:
        outputs.append("output_log_probs")
    if request.num_top_log_probs:
        outputs += ["top_log_prob_ids", "top_log_probs"]
    if request.num_answers > 1:
        outputs.append("sequence_index")
    calls = []
    for i, prompt in enumerate(request.prompts):
        values = {
            **request.values,
            "input_ids": list(prompt),
            "input_lengths": len(prompt),
            "request_output_len": request.max_tokens,
            "streaming": request.is_streaming,
            "exclude_input_in_output": True,
        }
        call_id = request_id if len(request.prompts) == 1 else f"{request_id}-{i}"
        calls.append(Request(values, tuple(outputs), call_id))
    return calls


def _read_piece(response: Response, first_index: int, request: GenerationRequest) -> Piece:
    tensors = response.tensors
    texts = tensors.get("text_output", ())
    num_tokens = sum(tensors.get("sequence_length", ()))
    token_ids = tensors.get("output_ids", ())[:num_tokens]
    return Piece(
        first_index + sum(tensors.get("sequence_index", ())),
        texts[0] if texts else "",
        num_tokens,
        _read_log_probs(
            token_ids,
            tensors.get("output_log_probs", ())[:num_tokens],
            tensors.get("top_log_prob_ids", ()),
            tensors.get("top_log_probs", ()),
            request.num_top_log_probs,
        )
        if request.has_log_probs
        else (),
        _reason(tensors.get("finish_reason", ())),
        token_ids,
    )


def _read_log_probs(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    top_ids: Sequence[int],
    top_log_probs: Sequence[float],
    num_top: int,
) -> list[TokenLogProbs]:
    """One for each token; ``top_ids`` and ``top_log_probs`` have ``num_top`` values for each."""
    tops = list(zip(top_ids, top_log_probs, strict=True))
    return [
        TokenLogProbs(token_id, log_prob, tops[i * num_top : (i + 1) * num_top])
        for i, (token_id, log_prob) in enumerate(zip(token_ids, log_probs, strict=True))
    ]


def _reason(reasons: Sequence[str]) -> str:
    return reasons[0] if reasons and reasons[0] != "not_finished" else ""


async def _merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Pieces of several answers in order of arrival; the first error ends all of them."""
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(maxsize=len(sources))
    is_closing = False

    async def pump(source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
            await queue.put(None)
        except BaseException as error:
            if not is_closing:  # else nothing takes it from a full queue
                await queue.put(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        is_closing = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
