"""The client for an event loop: generate, stream, stop, statistics, health."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from inflight_client import address
from inflight_client.address import default_url, parse_address
from inflight_client.errors import ServerError
from inflight_client.grpc_transport import GrpcTransport
from inflight_client.headers import checked_headers
from inflight_client.http_transport import HttpTransport
from inflight_client.options import (
    DEFAULT_MAX_TOKENS,
    AnswerCollector,
    GenerateChunk,
    GenerateOptions,
    GenerateResult,
    Request,
    Response,
    generate_request,
    is_unknown_question,
    question,
    question_about,
    read_chunk,
    read_objects,
)
from inflight_protocol import LLM_MODEL_NAME

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

HEALTH_TIMEOUT = 5.0
"""Seconds within which a healthy server answers a question about itself."""

RELAYING_MODELS = frozenset({"ensemble", "tensorrt_llm_bls", "vllm_model"})
"""Models of ours that pass requests on to `LLM_MODEL_NAME`, which is asked in their place."""


class Responses(Protocol):
    """The responses to one request, to be iterated once."""

    def receive(self) -> AsyncGenerator[Response, None]:
        """Send the request and give its responses; closing the generator cancels the request."""

    async def cancel(self) -> None:
        """Cancel the request, from any task; the iteration ends without an error."""


class Transport(Protocol):
    """A connection to one server, for any number of requests at once.

    It belongs to the event loop in which it is first used. A request is sent when the iteration
    over its responses starts; an iteration that is left early, fails or is cancelled cancels the
    request on the server.
    """

    def infer(self, request: Request, timeout: float | None) -> Responses:
        """The responses to ``request``; ``timeout`` in seconds for all of them together."""

    async def is_loaded(self, model: str, timeout: float) -> bool:
        """Whether Triton has loaded ``model``; `ServerUnreachable` without an answer."""

    async def close(self) -> None:
        """Close the connection; requests still running are cancelled."""


async def takes_requests(transport: Transport, model: str, timeout: float) -> bool:
    """Whether ``model`` says that it will serve a request sent now, within ``timeout`` seconds.

    Triton's own word alone counts only where the model does not know the question: Triton 24.10
    says that a model is ready while it refuses every request. Raises what `Responses.receive`
    raises without an answer.
    """
    asked = LLM_MODEL_NAME if model in RELAYING_MODELS else model
    try:
        async with aclosing(
            transport.infer(question(asked, "ready"), timeout).receive()
        ) as responses:
            async for _ in responses:
                pass
    except ServerError as error:
        return is_unknown_question(error) and await transport.is_loaded(model, timeout)
    return asked == model or await transport.is_loaded(model, timeout)


async def ask(transport: Transport, request: Request, timeout: float | None) -> dict[str, Any]:
    """The answer to a question; `ServerError` if the server gave none."""
    [output] = request.outputs
    async with aclosing(transport.infer(request, timeout).receive()) as responses:
        answers = [
            answer async for response in responses for answer in read_objects(response, output)
        ]
    if not answers:
        raise ServerError("the server gave no answer: it may be too old for this question.")
    return answers[-1]


class AsyncInflightClient:
    """`InflightClient` for asyncio: belongs to one event loop, any number of calls at once.

    Options of a request: see `GenerateOptions`. Errors: see `inflight_client.errors`.
    """

    def __init__(
        self,
        url: str | None = None,
        model: str = LLM_MODEL_NAME,
        protocol: address.Protocol = "grpc",
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        server = parse_address(default_url(protocol) if url is None else url, protocol)
        transport = GrpcTransport if protocol == "grpc" else HttpTransport
        self._transport: Transport = transport(server, checked_headers(headers))
        self._model = model

    async def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_MAX_TOKENS,
        *,
        request_id: str = "",
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """The whole answer to ``prompt``, text or token ids; without the prompt unless
        ``exclude_input_in_output=False``. A cancelled task cancels the request."""
        request = generate_request(
            self._model,
            prompt,
            max_tokens,
            request_id,
            options,
            is_streaming=False,
            is_single=True,
        )
        return (await self._collect(request, 1, timeout))[0]

    async def generate_many(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_MAX_TOKENS,
        *,
        request_id: str = "",
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerateResult]:
        """``n`` answers to ``prompt``, each as `generate` gives it; with ``seed``, answer i is that
        of ``seed`` + i."""
        request = generate_request(
            self._model, prompt, max_tokens, request_id, options, is_streaming=False
        )
        return await self._collect(request, options.get("n", 1), timeout)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_MAX_TOKENS,
        *,
        request_id: str = "",
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerateStream:
        """The answer piece by piece; with ``n``, pieces of several (`GenerateChunk.index`).

        The request is sent when the iteration starts.
        """
        request = generate_request(
            self._model, prompt, max_tokens, request_id, options, is_streaming=True
        )
        return AsyncGenerateStream(self._transport.infer(request, timeout), request.request_id)

    async def stop(self, request_id: str, *, timeout: float | None = HEALTH_TIMEOUT) -> None:
        """End the running request ``request_id`` of any client: it gets its normal final response
        with what it has so far. No error if there is none such (any more)."""
        async for _ in self._receive(question_about(self._model, "stop", request_id), timeout):
            pass

    async def stats(
        self, follow: bool = True, *, timeout: float | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The statistics of the last iteration, then (``follow``) of every one as it ends.

        Leaving the iteration ends the feed.
        """
        request = question(self._model, "stats", stream=follow)
        async with aclosing(self._receive(request, timeout)) as responses:
            async for response in responses:
                for stats in read_objects(response, "stats"):
                    yield stats

    async def why(
        self, request_id: str, *, timeout: float | None = HEALTH_TIMEOUT
    ) -> dict[str, Any]:
        """Why ``request_id`` does not run now: ``state``, ``reason``, and the numbers behind it."""
        return await ask(self._transport, question_about(self._model, "why", request_id), timeout)

    async def describe(self, *, timeout: float | None = HEALTH_TIMEOUT) -> dict[str, Any]:
        """What is served: ``model``, limits in tokens, and ``files`` of the tokenizer by name."""
        return await ask(self._transport, question(self._model, "describe"), timeout)

    async def recording(self, *, timeout: float | None = None) -> str:
        """The scheduler's recent decisions, as JSON lines for ``inflight replay``."""
        responses = self._receive(question(self._model, "recording"), timeout)
        pieces = [response.tensors.get("recording", ()) async for response in responses]
        return "".join(text for piece in pieces for text in piece)

    async def live(
        self, cursor: str = "", *, blocks: bool = False, timeout: float | None = HEALTH_TIMEOUT
    ) -> dict[str, Any]:
        """What is in flight, and what has happened since ``cursor``, that of the answer before; for
        the keys see `inflight_backend.triton.live`. ``blocks``: and who holds which block."""
        call = question(self._model, "live", live_since=cursor, live_blocks=blocks)
        return await ask(self._transport, call, timeout)

    async def health(self, *, timeout: float = HEALTH_TIMEOUT) -> bool:
        """Whether the model will serve a request sent now; `ServerUnreachable` without an answer,
        `RequestTimeout` if the model does not, as one that hangs."""
        return await takes_requests(self._transport, self._model, timeout)

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _receive(self, request: Request, timeout: float | None) -> AsyncGenerator[Response, None]:
        return self._transport.infer(request, timeout).receive()

    async def _collect(
        self, request: Request, num_answers: int, timeout: float | None
    ) -> list[GenerateResult]:
        answers = AnswerCollector(request, num_answers)
        async with aclosing(self._receive(request, timeout)) as responses:
            async for response in responses:
                answers.add(response)
        return answers.results()


class AsyncGenerateStream:
    """An answer on its way: iterate it once. Leaving the iteration early cancels the request.

    After a ``break`` the event loop does so in its next turn; ``aclosing(stream)`` does it at once.
    """

    def __init__(self, responses: Responses, request_id: str) -> None:
        self.request_id = request_id
        self._responses = responses
        self._chunks = _read_chunks(responses)

    def __aiter__(self) -> AsyncGenerator[GenerateChunk, None]:
        return self._chunks

    async def __anext__(self) -> GenerateChunk:
        return await self._chunks.__anext__()

    async def cancel(self) -> None:
        """Cancel the request, from any task; the iteration ends without an error."""
        await self._responses.cancel()

    async def aclose(self) -> None:
        """Leave the iteration; call it from the task that iterates."""
        await self._chunks.aclose()


async def _read_chunks(responses: Responses) -> AsyncGenerator[GenerateChunk, None]:
    async with aclosing(responses.receive()) as received:
        async for response in received:
            chunk = read_chunk(response)
            if chunk.text or chunk.token_ids:
                yield chunk
