"""The client for an event loop: the twin of `inflight_client.client`, method by method."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from inflight_client.address import Protocol, default_url, parse_address
from inflight_client.aio_transport import (
    AsyncGrpcTransport,
    AsyncHttpTransport,
    AsyncResponses,
    AsyncTransport,
    takes_requests,
)
from inflight_client.client import HEALTH_TIMEOUT
from inflight_client.encoding import (
    DEFAULT_MAX_TOKENS,
    AnswerCollector,
    AnswersCollector,
    GenerateOptions,
    describe_call,
    generate_call,
    last_answer,
    read_chunk,
    read_description,
    read_stats,
    read_why,
    recording_call,
    stats_call,
    stop_call,
    why_call,
)
from inflight_client.headers import checked_headers
from inflight_client.results import GenerateChunk, GenerateResult
from inflight_protocol import LLM_MODEL_NAME

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class AsyncInflightClient:
    """`InflightClient` for asyncio: belongs to one event loop, any number of calls at once."""

    def __init__(
        self,
        url: str | None = None,
        model: str = LLM_MODEL_NAME,
        protocol: Protocol = "grpc",
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        address = parse_address(default_url(protocol) if url is None else url, protocol)
        sent = checked_headers(headers)
        self._model = model
        self._transport: AsyncTransport = (
            AsyncGrpcTransport(address, sent)
            if protocol == "grpc"
            else AsyncHttpTransport(address, sent)
        )

    async def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_MAX_TOKENS,
        *,
        request_id: str = "",
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """See `InflightClient.generate`; a cancelled task cancels the request."""
        call = generate_call(
            self._model,
            prompt,
            max_tokens,
            request_id,
            options,
            is_streaming=False,
            is_single=True,
        )
        answer = AnswerCollector(call)
        async with aclosing(self._transport.infer(call, timeout).receive()) as responses:
            async for response in responses:
                answer.add(response)
        return answer.result()

    async def generate_many(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_MAX_TOKENS,
        *,
        request_id: str = "",
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerateResult]:
        """See `InflightClient.generate_many`."""
        call = generate_call(
            self._model, prompt, max_tokens, request_id, options, is_streaming=False
        )
        answers = AnswersCollector(call, options.get("n", 1))
        async with aclosing(self._transport.infer(call, timeout).receive()) as responses:
            async for response in responses:
                answers.add(response)
        return answers.results()

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_MAX_TOKENS,
        *,
        request_id: str = "",
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerateStream:
        """See `InflightClient.stream`."""
        call = generate_call(
            self._model, prompt, max_tokens, request_id, options, is_streaming=True
        )
        return AsyncGenerateStream(self._transport.infer(call, timeout), call.request_id)

    async def stop(self, request_id: str, *, timeout: float | None = HEALTH_TIMEOUT) -> None:
        """See `InflightClient.stop`."""
        responses = self._transport.infer(stop_call(self._model, request_id), timeout)
        async for _ in responses.receive():
            pass

    async def stats(
        self, follow: bool = True, *, timeout: float | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """See `InflightClient.stats`."""
        responses = self._transport.infer(stats_call(self._model, is_feed=follow), timeout)
        async with aclosing(responses.receive()) as received:
            async for response in received:
                for stats in read_stats(response):
                    yield stats

    async def why(
        self, request_id: str, *, timeout: float | None = HEALTH_TIMEOUT
    ) -> dict[str, Any]:
        """See `InflightClient.why`."""
        responses = self._transport.infer(why_call(self._model, request_id), timeout)
        answers = [read_why(response) async for response in responses.receive()]
        return last_answer(answers)

    async def describe(self, *, timeout: float | None = HEALTH_TIMEOUT) -> dict[str, Any]:
        """See `InflightClient.describe`."""
        responses = self._transport.infer(describe_call(self._model), timeout)
        answers = [read_description(response) async for response in responses.receive()]
        return last_answer(answers)

    async def recording(self, *, timeout: float | None = None) -> str:
        """See `InflightClient.recording`."""
        responses = self._transport.infer(recording_call(self._model), timeout)
        pieces = [response.tensors.get("recording", ()) async for response in responses.receive()]
        return "".join(text for piece in pieces for text in piece)

    async def health(self, *, timeout: float = HEALTH_TIMEOUT) -> bool:
        """See `InflightClient.health`."""
        return await takes_requests(self._transport, self._model, timeout)

    async def close(self) -> None:
        """Give the connection back."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncGenerateStream:
    """An answer on its way: iterate it once. Leaving the iteration early cancels the request.

    After a ``break`` the event loop does so in its next turn; ``aclosing(stream)`` does it at once.
    """

    def __init__(self, responses: AsyncResponses, request_id: str) -> None:
        self.request_id = request_id
        self._responses = responses
        self._chunks = _read_chunks(responses)

    def __aiter__(self) -> AsyncIterator[GenerateChunk]:
        return self._chunks

    async def __anext__(self) -> GenerateChunk:
        return await self._chunks.__anext__()

    async def cancel(self) -> None:
        """Cancel the request, from any task; the iteration ends without an error."""
        await self._responses.cancel()

    async def aclose(self) -> None:
        """Leave the iteration; call it from the task that iterates."""
        await self._chunks.aclose()


async def _read_chunks(responses: AsyncResponses) -> AsyncGenerator[GenerateChunk, None]:
    async with aclosing(responses.receive()) as received:
        async for response in received:
            chunk = read_chunk(response)
            if chunk.text or chunk.token_ids:
                yield chunk
