"""The client for threads: generate, stream, stop, statistics, health."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from inflight_client.address import Protocol, default_url, parse_address
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
from inflight_client.transport import (
    GrpcTransport,
    HttpTransport,
    Responses,
    Transport,
    takes_requests,
)
from inflight_protocol import LLM_MODEL_NAME

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

HEALTH_TIMEOUT = 5.0
"""Seconds within which a server that is well says so."""


class InflightClient:
    """Talks to one model of one server. Thread-safe; use it in a ``with`` block or `close` it.

    ``url`` is ``host:port``; without it, the address at which ``inflight serve`` listens.
    ``headers`` go with every call; Triton's restricted gRPC wants ``triton-grpc-protocol-NAME``.
    Options of a request: see `GenerateOptions`. Errors: see `inflight_client.errors`.
    """

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
        self._transport: Transport = (
            GrpcTransport(address, sent) if protocol == "grpc" else HttpTransport(address, sent)
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_MAX_TOKENS,
        *,
        request_id: str = "",
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """The whole answer to ``prompt``, text or token ids; without the prompt unless
        ``exclude_input_in_output=False``."""
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
        with closing(self._transport.infer(call, timeout).receive()) as responses:
            for response in responses:
                answer.add(response)
        return answer.result()

    def generate_many(
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
        call = generate_call(
            self._model, prompt, max_tokens, request_id, options, is_streaming=False
        )
        answers = AnswersCollector(call, options.get("n", 1))
        with closing(self._transport.infer(call, timeout).receive()) as responses:
            for response in responses:
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
    ) -> GenerateStream:
        """The answer piece by piece; with ``n``, pieces of several (`GenerateChunk.index`).

        The request is sent when the iteration starts.
        """
        call = generate_call(
            self._model, prompt, max_tokens, request_id, options, is_streaming=True
        )
        return GenerateStream(self._transport.infer(call, timeout), call.request_id)

    def stop(self, request_id: str, *, timeout: float | None = HEALTH_TIMEOUT) -> None:
        """End the running request ``request_id``, whoever started it: it gets its normal final
        response with what it has so far. No error if there is none such (any more)."""
        responses = self._transport.infer(stop_call(self._model, request_id), timeout)
        for _ in responses.receive():
            pass

    def stats(
        self, follow: bool = True, *, timeout: float | None = None
    ) -> Generator[dict[str, Any], None, None]:
        """The statistics of the last iteration, then (``follow``) of every one as it ends.

        Leaving the iteration ends the feed.
        """
        responses = self._transport.infer(stats_call(self._model, is_feed=follow), timeout)
        with closing(responses.receive()) as received:
            for response in received:
                yield from read_stats(response)

    def why(self, request_id: str, *, timeout: float | None = HEALTH_TIMEOUT) -> dict[str, Any]:
        """Why ``request_id`` does not run now: ``state``, ``reason``, and the numbers behind it."""
        responses = self._transport.infer(why_call(self._model, request_id), timeout)
        answers = [read_why(response) for response in responses.receive()]
        return last_answer(answers)

    def describe(self, *, timeout: float | None = HEALTH_TIMEOUT) -> dict[str, Any]:
        """What is served: ``model``, limits in tokens, and ``files`` of the tokenizer by name."""
        responses = self._transport.infer(describe_call(self._model), timeout)
        answers = [read_description(response) for response in responses.receive()]
        return last_answer(answers)

    def recording(self, *, timeout: float | None = None) -> str:
        """What the scheduler decided lately, as JSON lines for ``inflight replay``."""
        responses = self._transport.infer(recording_call(self._model), timeout)
        pieces = [response.tensors.get("recording", ()) for response in responses.receive()]
        return "".join(text for piece in pieces for text in piece)

    def health(self, *, timeout: float = HEALTH_TIMEOUT) -> bool:
        """Whether the model will serve a request sent now; `ServerUnreachable` if nobody answers,
        `RequestTimeout` if the model does not, as one that hangs."""
        return takes_requests(self._transport, self._model, timeout)

    def close(self) -> None:
        """Give the connection back."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GenerateStream:
    """An answer on its way: iterate it once. Leaving the iteration early cancels the request."""

    def __init__(self, responses: Responses, request_id: str) -> None:
        self.request_id = request_id
        self._responses = responses
        self._chunks = _read_chunks(responses)

    def __iter__(self) -> Iterator[GenerateChunk]:
        return self._chunks

    def __next__(self) -> GenerateChunk:
        return next(self._chunks)

    def cancel(self) -> None:
        """Cancel the request, from any thread; the iteration ends without an error."""
        self._responses.cancel()


def _read_chunks(responses: Responses) -> Iterator[GenerateChunk]:
    with closing(responses.receive()) as received:
        for response in received:
            chunk = read_chunk(response)
            if chunk.text or chunk.token_ids:
                yield chunk
