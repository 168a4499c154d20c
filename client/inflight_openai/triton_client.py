"""The inference server behind the front: prompts as gRPC streams, and its metrics page."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx

from inflight_client.address import Address, default_url, parse_address
from inflight_client.aio import ask, takes_requests
from inflight_client.errors import InflightError, InvalidArgument, ServerError
from inflight_client.grpc_transport import GrpcTransport, SharedStream, encode_bytes
from inflight_client.headers import checked_headers
from inflight_client.options import Request, Response, question, question_about
from inflight_openai.errors import ApiError, from_server
from inflight_openai.generation import GenerationRequest
from inflight_protocol import HISTOGRAMS, LLM_MODEL_NAME, LORA_REQUESTS, OLDER_NAMES

_logger = logging.getLogger(__name__)

_METRICS_PORT = 8002  # Triton's default
_METRICS_SECONDS = 5.0
_HEALTH_SECONDS = 5.0
_DESCRIBE_SECONDS = 60.0
_LIVE_SECONDS = 5.0
_NUM_ALONE = 2  # calls at a time for which a stream of their own takes little
_SHARED_SECONDS = 1.0  # for the shared stream to open
_SHARED_PAUSE = 10.0  # until another is tried where one was refused or broke
_NO_LIVE = (
    "the inference server, or its config.pbtxt, is too old to tell what is in flight: write it "
    "again with `inflight model-repository --force`"
)


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """A token of an answer or a prompt, and the likeliest ``(token id, log probability)`` in its
    place. The first token of a prompt has no log probability."""

    token_id: int
    log_prob: float | None
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one response adds to answer ``index``; ``num_tokens`` may be more than the text shows.

    ``log_probs`` and ``token_ids``, one for each token, when the request asks for them.
    ``prompt``: those of the prompt's tokens from the second on, if the request asks for them; with
    the first response.
    ``reason``: the server's finish reason; "" before the end. ``num_cached``: tokens of the prompt
    found in the cache, with the first response. ``cum_log_prob``: of the answer so far, for a
    request that chooses among answers.
    """

    index: int
    text: str
    num_tokens: int
    log_probs: Sequence[TokenLogProbs] = ()
    reason: str = ""
    token_ids: Sequence[int] = ()
    prompt: Sequence[TokenLogProbs] | None = None
    num_cached: int = 0
    cum_log_prob: float = 0.0


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
        self._inputs: frozenset[str] | None = None
        self._num_calls = 0  # that run
        self._shared: SharedStream | None = None

    async def describe(self) -> dict[str, Any]:
        """The server's description of its model."""
        call = question(LLM_MODEL_NAME, "describe")
        answer = await ask(self._transport, call, _DESCRIBE_SECONDS)
        self._inputs = frozenset(answer.get("inputs", ()))  # not told by older servers
        return answer

    def takes(self, name: str) -> bool:
        """Whether the server's model has the newer input ``name``: its config.pbtxt may be older,
        and Triton refuses a request with an input that is not there. True before `describe`."""
        return self._inputs is None or name in self._inputs

    async def adapters(self, **change: str) -> frozenset[str]:
        """The names of the server's adapters, after a ``change``: ``lora_name`` is loaded from
        ``lora_path``, or unloaded without one."""
        call = question(LLM_MODEL_NAME, "lora_adapters", **change)
        answer = await ask(self._transport, call, _DESCRIBE_SECONDS)
        return frozenset(answer["lora_adapters"])

    async def lora_requests(self) -> dict[str, str]:
        """The labels of `LORA_REQUESTS` now; none without adapters, or without an answer."""
        try:
            call = question(LLM_MODEL_NAME, "lora_adapters")
            answer = await ask(self._transport, call, _METRICS_SECONDS)
        except InflightError:
            return {}
        return {str(name): str(value) for name, value in answer.get("lora_requests", {}).items()}

    async def live(self, cursor: str, *, blocks: bool = False) -> dict[str, Any]:
        """What is in flight and has happened since ``cursor`` (`AsyncInflightClient.live`)."""
        if not self.takes("live"):
            raise ServerError(_NO_LIVE, "UNSUPPORTED")
        call = question(LLM_MODEL_NAME, "live", live_since=cursor, live_blocks=blocks)
        return await ask(self._transport, call, _LIVE_SECONDS)

    async def stop(self, request_id: str) -> None:
        """End a request, of whichever client; nothing happens if there is none with this id."""
        call = question_about(LLM_MODEL_NAME, "stop", request_id)
        async with aclosing(self._transport.infer(call, _LIVE_SECONDS).receive()) as responses:
            async for _ in responses:
                pass

    async def recording(self) -> str:
        """The scheduler's recent decisions, as JSON lines."""
        call = question(LLM_MODEL_NAME, "recording")
        pieces: list[str] = []
        async with aclosing(self._transport.infer(call, _DESCRIBE_SECONDS).receive()) as responses:
            async for response in responses:
                pieces += response.tensors.get("recording", ())
        return "".join(pieces)

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
        if self._shared is not None:
            self._shared.close()
        await self._transport.close()

    async def _answer(
        self, request: GenerationRequest, call: bytes, prompt_index: int
    ) -> AsyncGenerator[Piece, None]:
        first_index = prompt_index * request.num_answers
        self._num_calls += 1
        try:
            async with aclosing(await self._send(call)) as received:
                async for response in received:
                    yield _read_piece(response, first_index, request)
        except ServerError as error:
            raise from_server(error, request.guide_field) from None
        finally:
            self._num_calls -= 1

    async def _send(self, call: bytes) -> AsyncGenerator[Response, None]:
        """The responses to a call: of many that run most share a stream, if the server can."""
        if self._num_calls > _NUM_ALONE and "shared" in (self._inputs or ()):
            shared = self._shared
            if shared is None or shared.is_over(_SHARED_PAUSE):
                shared = self._shared = SharedStream(self._transport)
            if await shared.is_open(_SHARED_SECONDS):
                return shared.receive(call, self._timeout)
        return self._transport.infer_encoded(call, self._timeout).receive()


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

    async def read(self) -> tuple[str, str]:
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
        return page.text, page.headers.get("Content-Type", "text/plain")


_OF_HISTOGRAM = re.compile(
    rf"(# (?:HELP|TYPE) )?({'|'.join(each.name for each in HISTOGRAMS)})_(bucket|sum|count)\b"
)


_BOUND = re.compile(r'\ble="([^"]*)"')


def with_histograms(page: str) -> str:
    """A metrics page of Triton, whose three counters for each of `HISTOGRAMS` are one histogram,
    also under the names of `OLDER_NAMES`."""
    others: list[str] = []
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        if (series := _OF_HISTOGRAM.match(line)) is None:
            others.append(line)
            continue
        comment, name, part = series.groups()
        lines = found.setdefault(name, [])
        if comment is None:
            lines.append(line)
        elif part == "bucket":  # one name, meaning and type for the three
            text = line[series.end() :]
            lines.append(comment + name + (" histogram" if "TYPE" in comment else text))
    for lines in found.values():
        lines.sort(key=_place)
    for name, older in OLDER_NAMES.items():
        if name in found:
            found[older] = [line.replace(name, older, 1) for line in found[name]]
    return "".join(f"{line}\n" for lines in (others, *found.values()) for line in lines)


def _place(line: str) -> tuple[bool, float]:
    """Of a line among those of its histogram: what it is comes first, buckets in rising order."""
    bound = _BOUND.search(line)
    return not line.startswith("#"), math.inf if bound is None else float(bound[1])


def with_lora_requests(page: str, labels: Mapping[str, str]) -> str:
    """A metrics page with the series `LORA_REQUESTS`, if there are ``labels``."""
    if not labels:
        return page
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in labels.items()
    }
    series = ",".join(f'{name}="{value}"' for name, value in escaped.items())
    lines = [
        f"# HELP {LORA_REQUESTS} Adapters of requests, in the labels",
        f"# TYPE {LORA_REQUESTS} gauge",
        f"{LORA_REQUESTS}{{{series}}} {time.time():.3f}",
    ]
    return page.rstrip("\n") + "".join(f"\n{line}" for line in lines) + "\n"


def encode_calls(
    request: GenerationRequest, request_id: str, *, tells_cached: bool = True
) -> list[bytes]:
    """One encoded call per prompt; takes a millisecond per prompt with ``logit_bias``.

    ``tells_cached`` False: the server cannot say how much of a prompt was in the cache.
    """
    calls = make_calls(request, request_id, tells_cached=tells_cached)
    return [encode_bytes(call) for call in calls]


def call_names(request_id: str, num_calls: int) -> list[str]:
    """What the server calls the requests of one call of ours."""
    return [request_id] if num_calls == 1 else [f"{request_id}-{i}" for i in range(num_calls)]


def make_calls(
    request: GenerationRequest, request_id: str, *, tells_cached: bool = True
) -> list[Request]:
    """One call per prompt; responses have text and the number of its tokens."""
    outputs = ["text_output", "sequence_length", "finish_reason"]
    asks_cached = tells_cached and request.shows_usage
    if asks_cached:
        outputs.append("num_cached_tokens")
    if request.num_shown is not None:
        outputs.append("cum_log_probs")
    if request.has_log_probs or request.has_token_ids:
        outputs.append("output_ids")
    if request.has_log_probs:
        outputs.append("output_log_probs")
    num_top = request.num_server_top
    if request.has_log_probs and num_top:
        outputs += ["top_log_prob_ids", "top_log_probs"]
    if request.needs_prompt_log_probs:
        outputs.append("context_log_probs")
        outputs += ["top_context_log_prob_ids", "top_context_log_probs"] if num_top else []
    if request.num_answers > 1:
        outputs.append("sequence_index")
    calls = []
    names = call_names(request_id, len(request.prompts))
    for call_id, prompt in zip(names, request.prompts, strict=True):
        values = {
            **request.values,
            "input_ids": list(prompt),
            "input_lengths": len(prompt),
            "request_output_len": max(request.max_tokens, 1),  # the server has no 0
            "streaming": request.is_streaming,
            "exclude_input_in_output": True,
        }
        if asks_cached:
            values["return_num_cached_tokens"] = True
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
            request.num_server_top,
        )
        if request.has_log_probs
        else (),
        _reason(tensors.get("finish_reason", ())),
        token_ids,
        _read_prompt(tensors, first_index, request),
        sum(tensors.get("num_cached_tokens", ())),
        sum(tensors.get("cum_log_probs", ())),
    )


def _read_prompt(
    tensors: Mapping[str, Any], first_index: int, request: GenerationRequest
) -> list[TokenLogProbs] | None:
    if "context_log_probs" not in tensors:
        return None
    prompt = request.prompts[first_index // request.num_answers]
    top_ids = tensors.get("top_context_log_prob_ids", ())
    top_log_probs = tensors.get("top_context_log_probs", ())
    log_probs = tensors["context_log_probs"]
    return _read_log_probs(prompt[1:], log_probs, top_ids, top_log_probs, request.num_server_top)


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
