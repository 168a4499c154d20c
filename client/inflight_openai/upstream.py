"""The server's side of the front: one gRPC stream per prompt, pieces of answers in return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from inflight_client.address import default_url, parse_address
from inflight_client.aio import takes_requests
from inflight_client.errors import ServerError
from inflight_client.grpc_transport import GrpcTransport, encode_bytes
from inflight_client.headers import checked_headers
from inflight_client.options import (
    Request,
    Response,
    describe_request,
    last_answer,
    read_description,
)
from inflight_openai.errors import from_upstream
from inflight_openai.log_probs import TokenLogProbs, read_log_probs
from inflight_openai.parsing import GenerationJob
from inflight_protocol import LLM_MODEL_NAME

_HEALTH_SECONDS = 5.0
_DESCRIBE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one response adds to answer ``index``; ``num_tokens`` may be more than the text shows.

    ``log_probs`` and ``token_ids``, one for each token, when the job asks for them.
    ``reason``: why the answer has ended here, in the server's words; "" while it goes on.
    """

    index: int
    text: str
    num_tokens: int
    log_probs: Sequence[TokenLogProbs] = ()
    reason: str = ""
    token_ids: Sequence[int] = ()


class Upstream:
    """The connection to the server; belongs to one event loop, any number of jobs at once."""

    def __init__(
        self, url: str | None, timeout: float, headers: Mapping[str, str] | None = None
    ) -> None:
        """``timeout``: seconds for an answer; ``headers`` go with every call. `InvalidArgument` for
        a bad ``url`` or header."""
        self.address = parse_address(default_url("grpc") if url is None else url, "grpc")
        self._transport = GrpcTransport(self.address, checked_headers(headers))
        self._timeout = timeout

    async def describe(self) -> dict[str, Any]:
        """What the server says of its model."""
        responses = self._transport.infer(describe_request(LLM_MODEL_NAME), _DESCRIBE_SECONDS)
        return last_answer([read_description(each) async for each in responses.receive()])

    async def is_ready(self) -> bool:
        """Whether the model takes requests; `InflightError` when nobody says."""
        return await takes_requests(self._transport, LLM_MODEL_NAME, _HEALTH_SECONDS)

    async def run(self, job: GenerationJob, calls: Sequence[bytes]) -> AsyncGenerator[Piece, None]:
        """The pieces of all answers as they come; close the generator to cancel what runs.

        ``calls``: of `encode_job`.
        """
        first = [self._answer(job, call, i * job.num_answers) for i, call in enumerate(calls)]
        source = first[0] if len(first) == 1 else _merged(first)
        async with aclosing(source) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        """Give the connection back."""
        await self._transport.close()

    async def _answer(
        self, job: GenerationJob, call: bytes, first_index: int
    ) -> AsyncGenerator[Piece, None]:
        responses = self._transport.infer_encoded(call, self._timeout)
        async with aclosing(responses.receive()) as received:
            try:
                async for response in received:
                    yield _read_piece(response, first_index, job)
            except ServerError as error:
                raise from_upstream(error, job.guide_field) from None


def encode_job(job: GenerationJob, job_id: str) -> list[bytes]:
    """One encoded request per prompt; takes a millisecond per prompt with ``logit_bias``."""
    return [encode_bytes(call) for call in make_calls(job, job_id)]


def make_calls(job: GenerationJob, job_id: str) -> list[Request]:
    """One request per prompt; text comes back, with the count of the tokens it was made of."""
    outputs = ["text_output", "sequence_length", "finish_reason"]
    if job.has_log_probs or job.has_token_ids:
        outputs.append("output_ids")
    if job.has_log_probs:
        outputs.append("output_log_probs")
    if job.num_top_log_probs:
        outputs += ["top_log_prob_ids", "top_log_probs"]
    if job.num_answers > 1:
        outputs.append("sequence_index")
    calls = []
    for i, prompt in enumerate(job.prompts):
        values = {
            **job.values,
            "input_ids": list(prompt),
            "input_lengths": len(prompt),
            "request_output_len": job.max_tokens,
            "streaming": job.is_streaming,
            "exclude_input_in_output": True,
        }
        request_id = job_id if len(job.prompts) == 1 else f"{job_id}-{i}"
        calls.append(Request(values, tuple(outputs), request_id))
    return calls


def _read_piece(response: Response, first_index: int, job: GenerationJob) -> Piece:
    tensors = response.tensors
    texts = tensors.get("text_output", ())
    num_tokens = sum(tensors.get("sequence_length", ()))
    token_ids = tensors.get("output_ids", ())[:num_tokens]
    return Piece(
        first_index + sum(tensors.get("sequence_index", ())),
        texts[0] if texts else "",
        num_tokens,
        read_log_probs(
            token_ids,
            tensors.get("output_log_probs", ())[:num_tokens],
            tensors.get("top_log_prob_ids", ()),
            tensors.get("top_log_probs", ()),
            job.num_top_log_probs,
        )
        if job.has_log_probs
        else (),
        _reason(tensors.get("finish_reason", ())),
        token_ids,
    )


def _reason(said: Sequence[str]) -> str:
    return said[0] if said and said[0] != "not_finished" else ""


async def _merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Pieces of several answers in order of arrival; the first error ends all of them."""
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(maxsize=len(sources))
    is_left = False

    async def pump(source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
            await queue.put(None)
        except BaseException as error:
            if not is_left:  # else nobody would make room for it
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
        is_left = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
