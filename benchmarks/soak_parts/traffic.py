"""Clients of every kind at once: those that read to the end, and those that do not.

Each request has a gRPC stream of its own, which is read to its end, so that every final response
of it is counted. Every byte of an answer is known (`answers`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from inflight_client.address import Address
from inflight_client.terminal.load import EventStream
from load import LLM_MODEL, Answer, encode, send, with_limit
from servers import HOST
from soak_parts.answers import OUT_OF_TIME, QUESTIONS, is_cut, is_whole
from soak_parts.server import RELAY

SILENCE_SECONDS = 300.0
"""A stream on which nothing comes for so long is silent: the failure that must not be."""

SERVED_TWICE = "duplicate came late"

_QUESTION_SECONDS = 120.0
_PROBE_SECONDS = 20.0
# What OpenAI's API says meanwhile.
_UNREACHED = (
    "connection to the inference server ended",
    "inference server cannot be reached",
    "inference server cannot take requests now",
)
# What a server says that stops, hangs, or has lost its model process (the last to who came through
# a relay); and one that is full.
HARM = ("shutting down", "makes no progress", "not healthy", "has ended", *_UNREACHED)
_REFUSALS = ("Maximum queue size", *HARM)
# Weights of the kinds of requests; almost three in ten are cancelled.
_KINDS = {
    "complete": 32,
    "cancelled": 30,
    "stopped": 10,
    "reset": 6,
    "bad": 8,
    "duplicate": 2,
    "feature": 12,
    "completion": 8,
}
_RELAYED = 0.15
"""Share of those to be completed or cancelled that go through a model that relays."""

_HTTP_STATUSES = (400, 503)
_CANCELLED = "cancelled"
_THROUGH = {LLM_MODEL: "", RELAY: ", relayed"}
_PLAIN = {"text_input", "max_tokens", "stream"}  # asks for an answer of which each byte is known
_MAX_WRONG = 1000  # texts of what is wrong; the rest is only counted
LONG = 2000
"""Tokens of answers that are not to be read to their end."""
LONG_ENOUGH = 1500
"""Tokens of an answer that still runs when a second request of its id arrives."""

_BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"text_input": "", "max_tokens": 5}, "'text_input' is empty"),
    ({"max_tokens": 5}, "the prompt is missing"),
    ({"text_input": "1", "max_tokens": 0}, "'max_tokens' is 0"),
    ({"text_input": "1", "max_tokens": 2**31 - 1}, "more than max_seq_len"),
    ({"text_input": "1", "temperature": float("nan")}, "'temperature' is nan"),
    ({"input_ids": [-1], "max_tokens": 5}, "'input_ids' holds -1"),
    ({"input_ids": [10**6], "max_tokens": 5}, "'input_ids' holds 1000000"),
    ({"text_input": b"\xff\xfe", "max_tokens": 5}, "not valid UTF-8"),
    (
        {"text_input": "1", "max_tokens": 5}
        | {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "["},
        "is no regex that can be used",
    ),
)


class OpenAIAddress(NamedTuple):
    """Of OpenAI's API on this machine, and the name that the model has there."""

    port: int
    model: str


class NotAnswered(Exception):
    """A question about the server came back as an error, or without what was asked."""


class Span(NamedTuple):
    """When a request was sent and when its client heard of its end, and whether that was an error
    of the transport or one that the server told."""

    began: float
    ended: float
    is_broken: bool
    is_refused: bool = False


@dataclass
class Tally:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    finals: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_wrong: int = 0
    """All of them; ``wrong`` holds the first."""
    num_tokens: int = 0
    """Of answers that were checked."""

    def blame(self, what: str) -> None:
        """Note what is wrong."""
        self.num_wrong += 1
        if len(self.wrong) < _MAX_WRONG:
            self.wrong.append(what)

    @property
    def num_requests(self) -> int:
        """All that came to some end."""
        return sum(self.outcomes.values()) + self.num_wrong

    @property
    def num_cancelled(self) -> int:
        """gRPC calls that their clients cancelled."""
        return sum(self.outcomes[_CANCELLED + through] for through in _THROUGH.values())

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "requests": self.num_requests,
            "outcomes": dict(sorted(self.outcomes.items())),
            "finals_per_request_read_to_its_end": {
                str(number): times for number, times in sorted(self.finals.items())
            },
            "tokens_checked": self.num_tokens,
            "wrong": self.num_wrong,
        }


class Traffic:
    """Workers that send one request after the other until told to stop."""

    def __init__(
        self, grpc_url: str, http_port: int, openai: OpenAIAddress, seed: int, *, has_beams: bool
    ) -> None:
        self.tally = Tally()
        self._openai = openai
        self._questions = [each for each in QUESTIONS if has_beams or each != "beams"]
        self.names: list[str] = []
        self.spans: deque[Span] = deque(maxlen=50_000)
        """Of the last requests that came to some end: those of minutes, also on a fast machine."""
        self.harmed_at: deque[float] = deque(maxlen=50_000)
        """When requests ended as they may only while no healthy server is there."""
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
            answer = await self.read("", values, seconds=_PROBE_SECONDS)
        except (grpc.RpcError, asyncio.TimeoutError):
            return False
        if answer.errors:
            self._note_error(answer.errors[0])
            return False
        if not (is_right := is_whole("1 2 3", answer.text, 8)):
            self.tally.blame(f"a server that is back answered with {answer.text[-80:]!r}")
        return is_right

    async def why_held(self, name: str) -> str:
        """Empty if a request with the id ``name`` is served, else what is said instead."""
        values = {"text_input": "1 2 3", "max_tokens": 1, "stream": True}
        try:
            answer = await self.read(name, values, seconds=_QUESTION_SECONDS)
        except (grpc.RpcError, asyncio.TimeoutError) as error:
            return f"not answered: {error!r:.200}"
        return "; ".join(answer.errors) or ("" if answer.text == " " else repr(answer.text))

    async def ask_json(self, name: str, output: str, **values: Any) -> dict[str, Any]:
        """The JSON that answers a question about the server; the stream is read to its end.

        `NotAnswered` for whatever else comes.
        """
        answer = await self.read(name, values, seconds=_QUESTION_SECONDS)
        try:
            [told] = [each[output][0] for each in answer.responses if output in each]
            parsed: dict[str, Any] = json.loads(told)
        except (ValueError, LookupError) as error:
            raise NotAnswered(f"{answer.errors or answer.responses!r:.200}") from error
        return parsed

    async def _work(self) -> None:
        kinds, weights = list(_KINDS), list(_KINDS.values())
        while not self._is_over:
            kind = self._draw.choices(kinds, weights)[0]
            key, is_broken, is_refused = next(self._keys), False, False
            self.open_since[key] = began = time.monotonic()
            try:
                is_refused = await getattr(self, f"_{kind}")()
            except asyncio.TimeoutError:
                self.tally.outcomes["silent"] += 1
                self.tally.blame(f"a request ({kind}) heard nothing")
            except (grpc.RpcError, OSError, EOFError):
                self.tally.outcomes["transport error"] += 1
                self.harmed_at.append(time.monotonic())
                is_broken = True
            except Exception as error:  # no form of answer that is known; the others go on
                self.tally.blame(f"an answer ({kind}) could not be read: {error!r:.200}")
            del self.open_since[key]
            self.spans.append(Span(began, time.monotonic(), is_broken, is_refused))
            if is_broken:
                await asyncio.sleep(1.0)  # as clients should: the server may be starting again

    # Of each kind of request: true if the server ended it with an error.

    async def _complete(self) -> bool:
        values, model = self._values(self._draw.choice((4, 20, 60, 150))), self._draw_model()
        answer = await self.read(self._new_name(), values, model=model)
        return await self._judge(f"completed{_THROUGH[model]}", values, answer, is_whole)

    async def _stopped(self) -> bool:
        name = self._new_name()

        async def stop_soon(answer: Answer) -> None:
            if len(answer.responses) == 3:
                stop = await self.read(name, {"stop": True})
                for error in stop.errors:
                    await self._count_error(error)

        values = self._values(LONG)
        answer = await self.read(name, values, stop_soon)
        return await self._judge("stopped", values, answer, is_cut)

    async def _duplicate(self) -> bool:
        name = self._new_name()
        second: list[Answer] = []

        async def again(_: Answer) -> None:
            if not second:
                values = {"text_input": "7", "max_tokens": 4, "stream": True}
                second.append(await self.read(name, values))

        values = self._values(LONG_ENOUGH)
        answer = await self.read(name, values, again)
        is_refused = await self._judge("completed beside a duplicate", values, answer, is_whole)
        if second and not any("still being processed" in error for error in second[0].errors):
            # The first may have ended between its last message and the second request.
            self.tally.outcomes[SERVED_TWICE] += 1
        return is_refused

    async def _feature(self) -> bool:
        what = self._draw.choice(self._questions)
        prompt = self._values(0)["text_input"]
        question = self._draw.choice(QUESTIONS[what])(prompt)
        answer = await self.read(self._new_name(), question.values)
        if question.may_be_late and any(OUT_OF_TIME in error for error in answer.errors):
            self.tally.outcomes[f"{what}: not started in time"] += 1
            return True
        return await self._judge(
            what, question.values, answer, lambda *_: question.is_right(answer)
        )

    async def _cancelled(self) -> bool:
        """A stream that is cancelled at some point, or not even looked at."""
        values, model = self._values(LONG), self._draw_model()
        outcome = _CANCELLED + _THROUGH[model]
        call = self._call(self._new_name(), values, model)
        num_wanted = self._draw.randrange(6)
        if num_wanted == 0:
            await asyncio.sleep(self._draw.random() * 0.05)
            call.cancel()
            self.tally.outcomes[outcome] += 1
            return False
        answer = Answer()
        try:
            async for message in with_limit(call, SILENCE_SECONDS):
                answer.add(message)
                if len(answer.responses) == num_wanted:
                    call.cancel()
                    break
            else:
                self.tally.finals[answer.num_finals] += 1
        except grpc.RpcError:
            self._judge_cut(values, answer)
            raise
        has_ended = bool(answer.num_finals) or len(answer.responses) < num_wanted
        return await self._judge(
            outcome, values, answer, lambda *asked: not has_ended and _is_begun(*asked)
        )

    async def _reset(self) -> bool:
        """An HTTP stream whose connection is reset after its first tokens."""
        values = self._values(LONG)
        stream = await send(self._http_port, values)
        return await self._read_http("Triton", self._read_begin, stream, values)

    async def _completion(self) -> bool:
        """A stream of OpenAI's API, read to its end."""
        values = self._values(self._draw.choice((4, 20, 60, 150)))
        asked = {"model": self._openai.model, "prompt": values["text_input"], "temperature": 0}
        asked |= {"max_tokens": values["max_tokens"], "stream": True}
        address = Address("http", HOST, self._openai.port)
        stream = await EventStream.send(address, "/v1/completions", asked)
        return await self._read_http("OpenAI's API", self._read_completion, stream, values)

    async def _read_http(
        self,
        api: str,
        read_events: Callable[[EventStream, dict[str, Any]], Awaitable[bool]],
        stream: EventStream,
        values: dict[str, Any],
    ) -> bool:
        """Judge the head of an answer, and with ``read_events`` what comes behind it."""
        try:
            await asyncio.wait_for(stream.read_head(), SILENCE_SECONDS)
            if stream.status == 200:
                return await read_events(stream, values)
            error = await asyncio.wait_for(stream.read_error(), SILENCE_SECONDS)
            await self._count_error(error, f"{api}, HTTP status {stream.status}", stream.status)
            return True
        except ValueError as error:
            self.tally.blame(f"an answer of {api} over HTTP could not be read: {error!r:.200}")
            return False
        finally:
            stream.reset()

    async def _read_completion(self, stream: EventStream, values: dict[str, Any]) -> bool:
        """Judge all events of a completion."""
        text = ""
        async for event in with_limit(stream.events(), SILENCE_SECONDS):
            if error := event.get("error"):
                await self._count_error(str(error["message"]))
                return True
            text += event["choices"][0]["text"]
        is_right = is_whole(values["text_input"], text, values["max_tokens"])
        self._count("completed, OpenAI's API", values, text, is_right=is_right)
        return False

    async def _read_begin(self, stream: EventStream, values: dict[str, Any]) -> bool:
        """Judge the first events of a stream."""
        text, num_wanted, num_read = "", self._draw.randrange(1, 4), 0
        async for event in with_limit(stream.events(), SILENCE_SECONDS):
            if error := event.get("error"):
                await self._count_error(str(error))
                return True
            text += str(event.get("text_output"))
            num_read += 1
            if num_read == num_wanted:
                break
        is_right = num_read == num_wanted and _is_begun(values["text_input"], text, LONG)
        self._count("reset", values, text, is_right=is_right)
        return False

    async def _bad(self) -> bool:
        values, expected = self._draw.choice(_BAD)
        answer = await self.read(self._new_name(), values)
        if len(answer.errors) == 1 and expected in answer.errors[0]:
            self.tally.outcomes["refused by name"] += 1
        elif len(answer.errors) == 1:
            await self._count_error(answer.errors[0])  # wrong, unless it is a known refusal
        else:
            told = answer.errors or answer.text
            self.tally.blame(f"bad input was answered with {told!r:.200}")
        return bool(answer.errors)

    async def read(
        self,
        name: str,
        values: dict[str, Any],
        on_message: Callable[[Answer], Any] | None = None,
        seconds: float = SILENCE_SECONDS,
        model: str = LLM_MODEL,
    ) -> Answer:
        """Read a stream to its end and count its finals; `asyncio.TimeoutError` if nothing comes
        for ``seconds``."""
        answer = Answer()
        try:
            async for message in with_limit(self._call(name, values, model), seconds):
                answer.add(message)
                if on_message is not None and not answer.errors:
                    await on_message(answer)
        except grpc.RpcError:
            self._judge_cut(values, answer)
            raise
        self.tally.finals[answer.num_finals] += 1
        return answer

    def _judge_cut(self, values: dict[str, Any], answer: Answer) -> None:
        """Judge what had come of an answer whose connection ended before it did."""
        if answer.num_finals:
            self.tally.finals[answer.num_finals] += 1
        self._judge_begin(values, answer)

    def _judge_begin(self, values: dict[str, Any], answer: Answer) -> None:
        """Judge the text that came before an error."""
        if values.keys() != _PLAIN:
            return
        asked = (values["text_input"], answer.text, values["max_tokens"])
        if not (is_cut(*asked) or is_whole(*asked)):
            self.tally.blame(
                f"{values['text_input']!r} was continued with {answer.text[-80:]!r} before an error"
            )

    async def _judge(
        self,
        outcome: str,
        values: dict[str, Any],
        answer: Answer,
        is_right: Callable[[str, str, int], bool],
    ) -> bool:
        """Count an answer, or say what is wrong with it; true if it is an error."""
        if answer.errors:
            self._judge_begin(values, answer)
            await self._count_error(answer.errors[0])
            return True
        is_as_asked = is_right(values["text_input"], answer.text, values["max_tokens"])
        self._count(outcome, values, answer.text, is_right=is_as_asked)
        return False

    def _count(self, outcome: str, values: dict[str, Any], text: str, *, is_right: bool) -> None:
        if is_right:
            self.tally.outcomes[outcome] += 1
            self.tally.num_tokens += min(len(text), values["max_tokens"])  # tokens are bytes
            return
        asked = {key: value for key, value in values.items() if key != "text_input"}
        self.tally.blame(
            f"{outcome}: {values['text_input']!r} with {asked} was continued with "
            f"{len(text)} tokens, ending in {text[-80:]!r}"
        )

    def _values(self, max_tokens: int) -> dict[str, Any]:
        first = self._draw.randrange(1, 300)  # few: the tokenizer keeps each
        length = self._draw.choice((1, 1, 2, 3, 40))
        prompt = " ".join(str(first + i) for i in range(length))
        return {"text_input": prompt, "max_tokens": max_tokens, "stream": True}

    def _draw_model(self) -> str:
        return RELAY if self._draw.random() < _RELAYED else LLM_MODEL

    def _new_name(self) -> str:
        name = f"soak {next(self._numbers)}"
        self.names = [*self.names[-200:], name]
        return name

    async def _count_error(self, error: str, where: str = "", status: int = 0) -> None:
        """``status``: of HTTP, for a request that was refused there, ``where``."""
        if self._note_error(error, where, status):
            await asyncio.sleep(0.2)  # as a client does that is told to try again later

    def _note_error(self, error: str, where: str = "", status: int = 0) -> bool:
        """True for a refusal that is known."""
        for known in _REFUSALS:
            if known in error and status in (0, *_HTTP_STATUSES):
                how = "refused over HTTP" if status else "refused"
                self.tally.outcomes[f"{how}: {known}"] += 1
                if known in HARM:
                    self.harmed_at.append(time.monotonic())
                return True
        self.tally.blame(f"unexpected error{where and f' ({where})'}: {error}")
        return False

    def _call(self, name: str, values: dict[str, Any], model: str) -> Any:
        request = encode(name, values, model)

        async def requests() -> AsyncIterator[Any]:
            yield request

        return self._stub.ModelStreamInfer(requests())


def _is_begun(prompt: str, text: str, num_tokens: int) -> bool:
    """True if ``text`` is some of the answer to ``prompt``, but not all of it."""
    return bool(text) and is_cut(prompt, text, num_tokens)
