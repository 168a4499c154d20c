"""`inflight bench`: load for any server of OpenAI's API or of KServe's, and what it made of it.

Closed loop: so many clients, each of which sends its next request when the one before is answered.
Open loop: requests come at random times at a rate, whether those before are answered or not.

Tokens are those that the server counts. A text of KServe's is not counted there: a response with
text is one token then, though it may hold more, unless all answers have their whole length. Gaps
are between responses.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inflight_client.address import Address, default_url, parse_address
from inflight_client.errors import InvalidArgument
from inflight_client.terminal.chat import connect, first_model
from inflight_client.terminal.load import EventStream, Trace, gaps_of, quantile
from inflight_protocol import LLM_MODEL_NAME

Api = Literal["openai", "kserve"]
SHARES = (0.5, 0.9, 0.99)
OnAnswer = Callable[[], None]

_OPENAI_PORT = 9000


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is sent. ``prompts``: texts, of which requests take one after the other."""

    address: Address
    api: Api
    model: str
    prompts: Sequence[str]
    max_tokens: int
    num_requests: int
    timeout: float
    ignores_eos: bool = False
    headers: Sequence[tuple[str, str]] = ()
    seed: int = 0

    @property
    def path(self) -> str:
        """Where requests go."""
        if self.api == "openai":
            return "/v1/completions"
        return f"/v2/models/{self.model or LLM_MODEL_NAME}/generate_stream"

    def values(self, number: int) -> dict[str, Any]:
        """The body of a request."""
        prompt = self.prompts[number % len(self.prompts)]
        if self.api == "openai":
            usage = {"include_usage": True}
            body = {"model": self.model, "prompt": prompt, "max_tokens": self.max_tokens}
            extra = {"ignore_eos": True} if self.ignores_eos else {}
            return {**body, "temperature": 0, "stream": True, "stream_options": usage, **extra}
        end = {"end_id": -1} if self.ignores_eos else {}
        return {"text_input": prompt, "max_tokens": self.max_tokens, "stream": True, **end}


@dataclass
class Outcome:
    """One load, a number of clients or a rate, and how its requests fared."""

    load: str
    seconds: float = 0.0
    traces: list[Trace] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    num_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """For the table and for JSON; times in milliseconds, None without any."""
        firsts = [trace.times[0] for trace in self.traces if trace.times]
        gaps = [gap for trace in self.traces for gap in gaps_of(trace)]
        found: dict[str, Any] = {
            "load": self.load,
            "requests": len(self.ends),
            "failed": sum(self.errors.values()),
            "seconds": round(self.seconds, 3),
            "requests_per_second": round(len(self.ends) / self.seconds, 3) if self.seconds else 0.0,
            "tokens_per_second": round(self.num_tokens / self.seconds, 2) if self.seconds else 0.0,
        }
        for name, values in (("first_token", firsts), ("gap", gaps), ("request", self.ends)):
            for share in SHARES:
                value = round(quantile(values, share) * 1e3, 2) if values else None
                found[f"{name}_ms_p{share * 100:.0f}"] = value
        return {**found, "errors": self.errors}


async def closed_loop(
    settings: BenchSettings, num_clients: int, on_answer: OnAnswer = lambda: None
) -> Outcome:
    """``num_clients`` clients share the requests."""
    outcome, numbers = Outcome(_clients(num_clients)), iter(range(settings.num_requests))

    async def work() -> None:
        for number in numbers:
            await _request(settings, number, outcome)
            on_answer()

    return await _measured(outcome, [work() for _ in range(num_clients)])


async def open_loop(
    settings: BenchSettings, rate: float, on_answer: OnAnswer = lambda: None
) -> Outcome:
    """``rate`` requests a second, with exponential times between them; the same for a seed."""
    rng, outcome = random.Random(settings.seed), Outcome(f"{rate:g} a second")
    moments, moment = [], 0.0
    for _ in range(settings.num_requests):
        moments.append(moment)
        moment += rng.expovariate(rate)

    async def work(number: int, moment: float) -> None:
        await asyncio.sleep(moment)
        await _request(settings, number, outcome)
        on_answer()

    return await _measured(outcome, [work(*each) for each in enumerate(moments)])


async def _measured(outcome: Outcome, work: Sequence[Any]) -> Outcome:
    start = time.perf_counter()
    await asyncio.gather(*work)
    outcome.seconds = time.perf_counter() - start
    return outcome


async def _request(settings: BenchSettings, number: int, outcome: Outcome) -> None:
    """One request; what goes wrong is counted by what it says."""
    try:
        await asyncio.wait_for(_stream(settings, number, outcome), settings.timeout)
        return
    except asyncio.TimeoutError:
        reason = f"no answer within {settings.timeout:g} s"
    except (OSError, EOFError) as error:
        reason = f"the connection failed: {type(error).__name__}"
    except ValueError as error:
        reason = str(error)
    outcome.errors[reason] = outcome.errors.get(reason, 0) + 1


async def _stream(settings: BenchSettings, number: int, outcome: Outcome) -> None:
    start, trace, num_told = time.perf_counter(), Trace(), 0
    stream = await EventStream.send(
        settings.address, settings.path, settings.values(number), settings.headers
    )
    try:
        await stream.read_head()
        if stream.status != 200:
            raise ValueError(await stream.read_error())
        async for event in stream.events():
            if "error" in event:
                raise ValueError(str(event["error"]))
            if usage := event.get("usage"):
                num_told = usage["completion_tokens"]
            if num_tokens := _num_tokens(settings.api, event):
                trace.times.append(time.perf_counter() - start)
                trace.counts.append(num_tokens)
    finally:
        stream.reset()
    outcome.traces.append(trace)
    outcome.ends.append(time.perf_counter() - start)
    if settings.api == "kserve" and settings.ignores_eos:
        num_told = settings.max_tokens
    outcome.num_tokens += num_told or sum(trace.counts)


def _num_tokens(api: Api, event: dict[str, Any]) -> int:
    """Tokens of an event; one with text is one for an API that does not count them."""
    if api == "kserve":
        return int(event.get("sequence_length", 0) or bool(event.get("text_output")))
    return int(any(choice.get("text") for choice in event.get("choices", ())))


def make_prompts(num_words: int, number: int, seed: int) -> list[str]:
    """``number`` texts of numbers as words, none of which begins as another does."""
    rng = random.Random(seed)
    return [" ".join(str(rng.randrange(1000)) for _ in range(num_words)) for _ in range(number)]


def run_bench(
    *,
    url: str | None,
    api: str,
    api_key: str | None,
    model: str | None,
    concurrency: Sequence[int],
    rates: Sequence[float],
    num_requests: int,
    prompts: str | int,
    max_tokens: int,
    ignores_eos: bool,
    timeout: float,
    seed: int,
    shows_progress: bool,
) -> list[Outcome]:
    """An outcome for each number of clients, and each rate; ``prompts``: a text, or the length of
    random ones in words. `InvalidArgument` for an address or an API that is none."""
    if api not in get_args(Api):
        raise InvalidArgument(f'--api "{api}": give openai or kserve.')
    default = f"127.0.0.1:{_OPENAI_PORT}" if api == "openai" else default_url("http")
    address = parse_address((url or default).rstrip("/").removesuffix("/v1"), "http")
    if model is None and api == "openai":
        with connect(str(address), api_key) as client:
            model = first_model(client)
    settings = BenchSettings(
        address,
        cast(Api, api),
        model or "",
        [prompts] if isinstance(prompts, str) else make_prompts(prompts, num_requests, seed),
        max_tokens,
        num_requests,
        timeout,
        ignores_eos,
        () if api_key is None else (("Authorization", f"Bearer {api_key}"),),
        seed,
    )
    outcomes = []
    with Progress(
        console=Console(stderr=True), transient=True, disable=not shows_progress
    ) as progress:
        task = progress.add_task("", total=num_requests * (len(concurrency) + len(rates)))

        def advance() -> None:
            progress.advance(task)

        for number in concurrency:
            progress.update(task, description=_clients(number))
            outcomes.append(asyncio.run(closed_loop(settings, number, advance)))
        for rate in rates:
            progress.update(task, description=f"{rate:g} a second")
            outcomes.append(asyncio.run(open_loop(settings, rate, advance)))
    return outcomes


def _clients(number: int) -> str:
    return "1 client" if number == 1 else f"{number} clients"


def bench_table(outcomes: Sequence[Outcome]) -> Table:
    """A row of three lines for each load: times that half, 90 % and 99 % are not above."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("load", "req/s", "tokens/s", "", "TTFT ms", "gap ms", "request ms", "failed")
    for name in names:
        table.add_column(name, justify="left" if name == "load" else "right", no_wrap=True)
    for outcome in outcomes:
        figures = outcome.figures()
        times = [
            "\n".join(_number(figures[f"{name}_ms_p{share * 100:.0f}"]) for share in SHARES)
            for name in ("first_token", "gap", "request")
        ]
        table.add_row(
            outcome.load,
            f"{figures['requests_per_second']:,.2f}",
            f"{figures['tokens_per_second']:,.1f}",
            "\n".join(f"p{share * 100:.0f}" for share in SHARES),
            *times,
            str(figures["failed"]),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
