"""Clients of every kind at once: those that read to the end, and those that do not.

Each request has a gRPC stream of its own, which is read to its end, so that every final response
of it is counted. Every byte of an answer is known (`answers`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import grpc.aio
from soak_parts.answers import OUT_OF_TIME, QUESTIONS, is_cut, is_whole
from soak_parts.server import HOST
from soak_parts.wire import LLM_MODEL, Answer, encode, with_limit
from tritonclient.grpc import service_pb2_grpc

SILENCE_SECONDS = 300.0
"""A stream on which nothing comes for so long is silent: the failure that must not be."""

SERVED_TWICE = "duplicate came late"

_QUESTION_SECONDS = 120.0
_PROBE_SECONDS = 20.0
# What a server says that is full, stops, hangs, or has lost its model process.
_REFUSALS = ("Maximum queue size", "shutting down", "makes no progress", "not healthy")
# Share of requests by kind; three in ten are cancelled.
_KINDS = {
    "complete": 32,
    "cancelled": 30,
    "stopped": 10,
    "reset": 6,
    "bad": 8,
    "duplicate": 2,
    "feature": 12,
}
_LONG = 2000  # tokens of answers that are not to be read to their end
_BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"text_input": "", "max_tokens": 5}, "'text_input' is empty"),
    ({"max_tokens": 5}, "the prompt is missing"),
    ({"text_input": "1", "max_tokens": 0}, "'max_tokens' is 0"),
    ({"text_input": "1", "max_tokens": 2**31 - 1}, "more than max_seq_len"),
    ({"text_input": "1", "temperature": float("nan")}, "'temperature' is nan"),
    ({"input_ids": [-1], "max_tokens": 5}, "'input_ids' holds -1"),
    ({"input_ids": [10**6], "max_tokens": 5}, "'input_ids' holds 1000000"),
    ({"text_input": b"\xff\xfe", "max_tokens": 5}, "not valid UTF-8"),
)


class Span(NamedTuple):
    """When a request was sent and when its client heard of its end, and whether that was an error
    of the transport."""

    began: float
    ended: float
    is_broken: bool


@dataclass
class Tally:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    finals: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0
    """Of answers that were read to their end and checked."""

    @property
    def num_requests(self) -> int:
        """All that came to some end."""
        return sum(self.outcomes.values()) + len(self.wrong)

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "requests": self.num_requests,
            "outcomes": dict(sorted(self.outcomes.items())),
            "finals_per_request_read_to_its_end": {
                str(number): times for number, times in sorted(self.finals.items())
            },
            "tokens_checked": self.num_tokens,
            "wrong": len(self.wrong),
        }


class Traffic:
    """Workers that send one request after the other until told to stop."""

    def __init__(self, grpc_url: str, http_port: int, seed: int) -> None:
        self.tally = Tally()
        self.names: list[str] = []
        self.spans: deque[Span] = deque(maxlen=20_000)
        """Of the last requests that came to some end."""
        self.open_since: dict[int, float] = {}
        """When those in flight were sent."""
        self._http_port = http_port
        self._draw = random.Random(seed)
        self._numbers = itertools.count(1)
        self._keys = itertools.count(1)
        self._is_over = False
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        options.append(("grpc.max_reconnect_backoff_ms", 1000))
        self._channel = grpc.aio.insecure_channel(grpc_url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._workers: list[asyncio.Task[None]] = []

    def start(self, num_workers: int) -> None:
        """Begin; belongs to the running event loop."""
        self._workers = [asyncio.create_task(self._work()) for _ in range(num_workers)]

    async def stop(self) -> None:
        """Let every request in flight come to its end."""
        self._is_over = True
        await asyncio.gather(*self._workers)

    async def close(self) -> None:
        """Give the connection back."""
        await self._channel.close()

    async def try_once(self) -> bool:
        """True if a short request is answered correctly now."""
        values = {"text_input": "1 2 3", "max_tokens": 8, "stream": True}
        try:
            answer = await self._answer("", values, seconds=_PROBE_SECONDS)
        except (grpc.RpcError, asyncio.TimeoutError):
            return False
        return not answer.errors and is_whole("1 2 3", answer.text, 8)

    async def why_held(self, name: str) -> str:
        """Empty if a request with the id ``name`` is served, else what is said instead."""
        answer = await self._answer(name, {"text_input": "1 2 3", "max_tokens": 1, "stream": True})
        return "; ".join(answer.errors) or ("" if answer.text == " " else repr(answer.text))

    async def ask_json(self, name: str, output: str, **values: Any) -> dict[str, Any]:
        """The JSON that answers a question about the server; the stream is read to its end."""
        answer = await self._answer(name, values, seconds=_QUESTION_SECONDS)
        [told] = [each[output][0] for each in answer.responses if output in each]
        parsed: dict[str, Any] = json.loads(told)
        return parsed

    async def _work(self) -> None:
        kinds, weights = list(_KINDS), list(_KINDS.values())
        while not self._is_over:
            kind = self._draw.choices(kinds, weights)[0]
            key, is_broken = next(self._keys), False
            self.open_since[key] = began = time.monotonic()
            try:
                await getattr(self, f"_{kind}")()
            except asyncio.TimeoutError:
                self.tally.outcomes["silent"] += 1
                self.tally.wrong.append(f"a request ({kind}) heard nothing")
            except (grpc.RpcError, OSError, EOFError):
                self.tally.outcomes["transport error"] += 1
                is_broken = True
            del self.open_since[key]
            self.spans.append(Span(began, time.monotonic(), is_broken))
            if is_broken:
                await asyncio.sleep(1.0)  # as clients should: the server may be starting again

    async def _complete(self) -> None:
        values = self._values(self._draw.choice((4, 20, 60, 150)))
        answer = await self._read(self._new_name(), values)
        await self._judge("completed", values, answer, is_whole)

    async def _stopped(self) -> None:
        name = self._new_name()

        async def stop_soon(answer: Answer) -> None:
            if len(answer.responses) == 3:
                stop = await self._answer(name, {"stop": True})
                for error in stop.errors:
                    await self._count_error(error)

        values = self._values(_LONG)
        answer = await self._read(name, values, stop_soon)
        await self._judge("stopped", values, answer, is_cut)

    async def _duplicate(self) -> None:
        name = self._new_name()
        second: list[Answer] = []

        async def again(_: Answer) -> None:
            if not second:
                values = {"text_input": "7", "max_tokens": 4, "stream": True}
                second.append(await self._answer(name, values))

        values = self._values(300)
        answer = await self._read(name, values, again)
        await self._judge("completed beside a duplicate", values, answer, is_whole)
        if second and not any("still being processed" in error for error in second[0].errors):
            # The first may have ended between its last message and the second request.
            self.tally.outcomes[SERVED_TWICE] += 1

    async def _feature(self) -> None:
        what = self._draw.choice(list(QUESTIONS))
        prompt = self._values(0)["text_input"]
        question = self._draw.choice(QUESTIONS[what])(prompt)
        answer = await self._read(self._new_name(), question.values)
        if question.may_be_late and any(OUT_OF_TIME in error for error in answer.errors):
            self.tally.outcomes[f"{what}: not started in time"] += 1
        else:
            await self._judge(what, question.values, answer, lambda *_: question.is_right(answer))

    async def _cancelled(self) -> None:
        call = self._call(self._new_name(), self._values(_LONG))
        num_wanted = self._draw.randrange(6)
        num_read = 0
        if num_wanted == 0:
            await asyncio.sleep(self._draw.random() * 0.05)
        else:
            async for message in with_limit(call, SILENCE_SECONDS):
                if message.error_message:
                    await self._count_error(message.error_message)
                    return
                num_read += 1
                if num_read == num_wanted:
                    break
        call.cancel()
        self.tally.outcomes["cancelled"] += 1

    async def _reset(self) -> None:
        """An HTTP stream whose connection is reset after its first tokens."""
        reader, writer = await asyncio.open_connection(HOST, self._http_port)
        body = json.dumps({"text_input": "1 2 3", "max_tokens": _LONG, "stream": True}).encode()
        head = (
            f"POST /v2/models/{LLM_MODEL}/generate_stream HTTP/1.1\r\nHost: {HOST}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        received = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SILENCE_SECONDS)
        is_accepted = b" 200 " in received
        if is_accepted:
            await asyncio.wait_for(reader.readuntil(b"data:"), SILENCE_SECONDS)
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        self.tally.outcomes["reset" if is_accepted else "refused over HTTP"] += 1

    async def _bad(self) -> None:
        values, expected = self._draw.choice(_BAD)
        answer = await self._read(self._new_name(), values)
        if len(answer.errors) == 1 and expected in answer.errors[0]:
            self.tally.outcomes["refused by name"] += 1
        elif len(answer.errors) == 1:
            await self._count_error(answer.errors[0])  # wrong, unless it is a known refusal
        else:
            told = answer.errors or answer.text
            self.tally.wrong.append(f"bad input was answered with {told!r:.200}")

    async def _read(
        self,
        name: str,
        values: dict[str, Any],
        on_message: Callable[[Answer], Any] | None = None,
    ) -> Answer:
        """Read a stream to its end and count its finals."""
        answer = await self._answer(name, values, on_message)
        self.tally.finals[answer.num_finals] += 1
        return answer

    async def _answer(
        self,
        name: str,
        values: dict[str, Any],
        on_message: Callable[[Answer], Any] | None = None,
        seconds: float = SILENCE_SECONDS,
    ) -> Answer:
        answer = Answer()
        async for message in with_limit(self._call(name, values), seconds):
            answer.add(message)
            if on_message is not None and not answer.errors:
                await on_message(answer)
        return answer

    async def _judge(
        self,
        outcome: str,
        values: dict[str, Any],
        answer: Answer,
        is_right: Callable[[str, str, int], bool],
    ) -> None:
        """Count an answer that was read to its end, or say what is wrong with it."""
        if answer.errors:
            await self._count_error(answer.errors[0])
        elif is_right(values["text_input"], answer.text, values["max_tokens"]):
            self.tally.outcomes[outcome] += 1
            self.tally.num_tokens += min(len(answer.text), values["max_tokens"])  # tokens are bytes
        else:
            asked = {key: value for key, value in values.items() if key != "text_input"}
            self.tally.wrong.append(
                f"{outcome}: {values['text_input']!r} with {asked} was continued with "
                f"{len(answer.text)} tokens, ending in {answer.text[-80:]!r}"
            )

    def _values(self, max_tokens: int) -> dict[str, Any]:
        first = self._draw.randrange(1, 5000)
        length = self._draw.choice((1, 1, 2, 3, 40))
        prompt = " ".join(str(first + i) for i in range(length))
        return {"text_input": prompt, "max_tokens": max_tokens, "stream": True}

    def _new_name(self) -> str:
        name = f"soak {next(self._numbers)}"
        self.names = [*self.names[-200:], name]
        return name

    async def _count_error(self, error: str) -> None:
        for known in _REFUSALS:
            if known in error:
                self.tally.outcomes[f"refused: {known}"] += 1
                await asyncio.sleep(0.2)  # as a client does that is told to try again later
                return
        self.tally.wrong.append(f"unexpected error: {error}")

    def _call(self, name: str, values: dict[str, Any]) -> Any:
        request = encode(name, values)

        async def requests() -> AsyncIterator[Any]:
            yield request

        return self._stub.ModelStreamInfer(requests())
