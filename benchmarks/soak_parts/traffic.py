"""Clients of every kind at once: those that read to the end, and those that do not.

Each request has a gRPC stream of its own, which is read to its end, so that every final response
of it is counted. The demo model counts up: a lost, doubled or foreign token shows in the answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
from soak_parts.server import HOST
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

SILENCE_SECONDS = 300.0
"""A stream on which nothing comes for so long is silent: the failure that must not be."""

_QUESTION_SECONDS = 120.0
_PROBE_SECONDS = 20.0
_MODEL = "tensorrt_llm"
# What a server says that is full, stops, hangs, or has lost its model process.
_REFUSALS = ("Maximum queue size", "shutting down", "makes no progress", "not healthy")
# Share of requests by kind; three in ten are cancelled.
_KINDS = {
    "complete": 44,
    "cancelled": 30,
    "stopped": 10,
    "reset": 6,
    "bad": 8,
    "duplicate": 2,
}
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
        self._http_port = http_port
        self._draw = random.Random(seed)
        self._numbers = itertools.count(1)
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
        text = ""
        try:
            call = self._call("", text_input="1 2 3", max_tokens=8, stream=True)
            async for message in _with_limit(call, _PROBE_SECONDS):
                if message.error_message:
                    return False
                text += _text_of(message)
        except (grpc.RpcError, asyncio.TimeoutError):
            return False
        return text == " 4 5 6 7"

    async def ask_json(self, name: str, output: str, **values: Any) -> dict[str, Any]:
        """The JSON that answers a question about the server; the stream is read to its end."""
        answers: list[dict[str, Any]] = []
        async for message in _with_limit(self._call(name, **values), _QUESTION_SECONDS):
            for tensor, raw in zip(
                message.infer_response.outputs,
                message.infer_response.raw_output_contents,
                strict=True,
            ):
                if tensor.name == output:
                    answers.append(json.loads(raw[4:]))
        [answer] = answers
        return answer

    async def _work(self) -> None:
        kinds, weights = list(_KINDS), list(_KINDS.values())
        while not self._is_over:
            kind = self._draw.choices(kinds, weights)[0]
            try:
                await getattr(self, f"_{kind}")()
            except asyncio.TimeoutError:
                self.tally.outcomes["silent"] += 1
                self.tally.wrong.append(f"a request ({kind}) heard nothing")
            except (grpc.RpcError, OSError, EOFError):
                self.tally.outcomes["transport error"] += 1
                await asyncio.sleep(1.0)  # as clients should: the server may be starting again

    async def _complete(self) -> None:
        await self._read("completed")

    async def _stopped(self) -> None:
        name = self._new_name()
        num_read = 0

        async def stop_soon() -> None:
            nonlocal num_read
            num_read += 1
            if num_read == 3:
                async for _ in _with_limit(self._call(name, stop=True), SILENCE_SECONDS):
                    pass

        await self._read("stopped", name, on_message=stop_soon, max_tokens=2000)

    async def _duplicate(self) -> None:
        name = self._new_name()
        errors: list[str] = []

        async def again() -> None:
            if not errors:
                call = self._call(name, text_input="7", max_tokens=4, stream=True)
                errors.extend([m.error_message async for m in _with_limit(call, SILENCE_SECONDS)])

        await self._read("completed beside a duplicate", name, on_message=again, max_tokens=300)
        if errors and not any("still being processed" in error for error in errors):
            # The first may have ended between its last message and the second request.
            self.tally.outcomes["duplicate came late"] += 1

    async def _cancelled(self) -> None:
        call = self._call(self._new_name(), **self._values(2000))
        num_wanted = self._draw.randrange(6)
        num_read = 0
        if num_wanted == 0:
            await asyncio.sleep(self._draw.random() * 0.05)
        else:
            async for message in _with_limit(call, SILENCE_SECONDS):
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
        body = json.dumps({"text_input": "1 2 3", "max_tokens": 2000, "stream": True}).encode()
        head = (
            f"POST /v2/models/{_MODEL}/generate_stream HTTP/1.1\r\nHost: {HOST}\r\n"
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
        errors = [
            message.error_message
            async for message in _with_limit(
                self._call(self._new_name(), **values), SILENCE_SECONDS
            )
        ]
        told = [error for error in errors if expected in error]
        if len(told) == 1:
            self.tally.outcomes["refused by name"] += 1
        elif len(said := [error for error in errors if error]) == 1:
            await self._count_error(said[0])  # wrong, unless it is a known refusal
        else:
            self.tally.wrong.append(f"bad input was answered with {errors}")

    async def _read(
        self,
        outcome: str,
        name: str | None = None,
        on_message: Callable[[], Any] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Read a stream to its end, counting its finals and checking its count."""
        values = self._values(max_tokens or self._draw.choice((4, 20, 60, 150)))
        call = self._call(self._new_name() if name is None else name, **values)
        text, num_finals, error = "", 0, ""
        async for message in _with_limit(call, SILENCE_SECONDS):
            if message.error_message:
                error = message.error_message
                num_finals += 1
                continue
            text += _text_of(message)
            num_finals += _is_final(message)
            if on_message is not None:
                await on_message()
        self.tally.finals[num_finals] += 1
        if error:
            await self._count_error(error)
        elif not _counts(values["text_input"], text):
            self.tally.wrong.append(f"{values['text_input']!r} was continued with {text[:80]!r}")
        else:
            self.tally.outcomes[outcome] += 1
            self.tally.num_tokens += len(text)  # the demo model's tokens are bytes

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

    def _call(self, name: str, **values: Any) -> Any:
        request = _message(name, values)

        async def requests() -> AsyncIterator[Any]:
            yield request

        return self._stub.ModelStreamInfer(requests())


def _message(name: str, values: dict[str, Any]) -> Any:
    request = service_pb2.ModelInferRequest(model_name=_MODEL, id=name)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for key, value in values.items():
        if isinstance(value, str | bytes):
            datatype, array = "BYTES", np.asarray([[value]], dtype=np.object_)
            raw = serialize_byte_tensor(array).item()
        else:
            kind = {bool: ("BOOL", np.bool_), float: ("FP32", np.float32)}.get(type(value))
            datatype, dtype = kind or ("INT32", np.int32)
            array = np.asarray([np.ravel(value)], dtype=dtype)
            raw = array.tobytes()
        request.inputs.add(name=key, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(raw)
    return request


async def _with_limit(call: Any, seconds: float) -> AsyncIterator[Any]:
    """The messages of a call; ``asyncio.TimeoutError`` if one takes longer than ``seconds``."""
    messages = call.__aiter__()
    while True:
        try:
            yield await asyncio.wait_for(messages.__anext__(), seconds)
        except StopAsyncIteration:
            return


def _is_final(message: Any) -> bool:
    parameters = message.infer_response.parameters
    return "triton_final_response" in parameters and parameters["triton_final_response"].bool_param


def _text_of(message: Any) -> str:
    infer = message.infer_response
    for tensor, raw in zip(infer.outputs, infer.raw_output_contents, strict=True):
        if tensor.name == "text_output":
            return str(raw[4:].decode())
    return ""


def _counts(prompt: str, text: str) -> bool:
    """True if ``prompt + text`` counts up by one; the last number may be cut off."""
    numbers = [int(word) for word in re.findall(r"\d+", prompt + text)]
    expected = [numbers[0] + i for i in range(len(numbers))]
    is_cut = str(expected[-1]).startswith(str(numbers[-1]))
    return numbers[:-1] == expected[:-1] and is_cut
