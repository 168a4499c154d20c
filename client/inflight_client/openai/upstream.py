"""The server's side of the front: one gRPC stream per prompt, pieces of answers in return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from inflight_client.address import default_url, parse_address
from inflight_client.aio_transport import AsyncGrpcTransport, takes_requests
from inflight_client.encoding import (
    InferCall,
    Response,
    describe_call,
    last_answer,
    read_description,
)
from inflight_client.openai.log_probs import TokenLogProbs, read_log_probs
from inflight_client.openai.parsing import GenerationJob
from inflight_client.protocol import LLM_MODEL_NAME

_HEALTH_SECONDS = 5.0
_DESCRIBE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one response adds to answer ``index``; ``num_tokens`` may be more than the text shows.

    ``log_probs``, one for each token, when the job asks for them.
    ``is_stopped``: a stop word ended the answer here.
    """

    index: int
    text: str
    num_tokens: int
    log_probs: Sequence[TokenLogProbs] = ()
    is_stopped: bool = False


class Upstream:
    """The connection to the server; belongs to one event loop, any number of jobs at once."""

    def __init__(self, url: str | None, timeout: float) -> None:
        """``timeout``: seconds for a whole answer. `InvalidArgument` for a bad ``url``."""
        self.address = parse_address(default_url("grpc") if url is None else url, "grpc")
        self._transport = AsyncGrpcTransport(self.address)
        self._timeout = timeout

    async def describe(self) -> dict[str, Any]:
        """What the server says of its model."""
        responses = self._transport.infer(describe_call(LLM_MODEL_NAME), _DESCRIBE_SECONDS)
        return last_answer([read_description(each) async for each in responses.receive()])

    async def is_ready(self) -> bool:
        """Whether the model takes requests; `InflightError` when nobody says."""
        return await takes_requests(self._transport, LLM_MODEL_NAME, _HEALTH_SECONDS)

    async def run(self, job: GenerationJob, job_id: str) -> AsyncGenerator[Piece, None]:
        """The pieces of all answers as they come; close the generator to cancel what runs."""
        calls = make_calls(job, job_id)
        first = [self._answer(call, i * job.num_answers) for i, call in enumerate(calls)]
        source = first[0] if len(first) == 1 else _merged(first)
        async with aclosing(source) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        """Give the connection back."""
        await self._transport.close()

    async def _answer(self, call: InferCall, first_index: int) -> AsyncGenerator[Piece, None]:
        num_top = int(call.values.get("num_top_log_probs", 0))  # type: ignore[call-overload]
        async with aclosing(self._transport.infer(call, self._timeout).receive()) as responses:
            async for response in responses:
                yield _read_piece(response, first_index, num_top)


def make_calls(job: GenerationJob, job_id: str) -> list[InferCall]:
    """One request per prompt; text comes back, with the count of the tokens it was made of."""
    outputs = ["text_output", "sequence_length"]
    if job.has_log_probs:
        outputs += ["output_ids", "output_log_probs"]
    if job.num_top_log_probs:
        outputs += ["top_log_prob_ids", "top_log_probs"]
    if job.num_answers > 1:
        outputs.append("sequence_index")
    if "stop_words" in job.values:
        outputs.append("finish_reason")  # else the number of tokens tells it
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
        calls.append(InferCall(values, tuple(outputs), request_id))
    return calls


def _read_piece(response: Response, first_index: int, num_top: int) -> Piece:
    tensors = response.tensors
    texts = tensors.get("text_output", ())
    num_tokens = sum(tensors.get("sequence_length", ()))
    return Piece(
        first_index + sum(tensors.get("sequence_index", ())),
        texts[0] if texts else "",
        num_tokens,
        read_log_probs(
            tensors.get("output_ids", ())[:num_tokens],
            tensors.get("output_log_probs", ())[:num_tokens],
            tensors.get("top_log_prob_ids", ()),
            tensors.get("top_log_probs", ()),
            num_top,
        ),
        tensors.get("finish_reason", ())[:1] == ["stop_words"],
    )


async def _merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Pieces of several answers in order of arrival; the first error ends all of them."""
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(maxsize=len(sources))

    async def pump(source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
            await queue.put(None)
        except Exception as error:
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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
