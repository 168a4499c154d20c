"""What building responses costs the host, in microseconds of processor time per token streamed.

A real request takes its usual way from the sampled token to the tensors of its response, as with 64
streams at once: `make_tensors` on the thread of the loop, then `MergedResponse` and `TokenStream`
on the thread that sends. Only Triton is absent: ``pb_utils.Tensor`` and the send itself cost what
`serving.py` shows.
On a shared machine other work evicts caches, which can only add time: of the
rounds the least counts; the median is in the result too.

    python benchmarks/responses.py --tokens 256 --rounds 9
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inflight_backend.engine.interface import StepOutputs
from inflight_backend.manager.output_gatherer import OutputGatherer
from inflight_backend.manager.responses import make_tensors
from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.dispatcher import MergedResponse
from inflight_backend.triton_io.answer_stream import TextWriter, TokenStream
from inflight_backend.triton_io.stop_text import StopText
from inflight_scheduler import NO_OUTPUTS, LlmRequest, OutputParams
from inflight_server.serve.settings import DEMO_MODEL
from report import describe_run, write_result

NUM_STREAMS = 64
LIMIT_MICROSECONDS = 10.0
MERGED = (1, 8)  # tokens per response: few streams, and many at once

Tensors = Sequence[NamedTensor]


@dataclass(frozen=True, slots=True)
class Form:
    """What clients ask for."""

    outputs: frozenset[str]
    asked: OutputParams = NO_OUTPUTS
    stop_words: tuple[str, ...] = ()


TOKENS = frozenset({"output_ids", "sequence_length"})
TEXT = frozenset({"text_output"})
FORMS: dict[str, Form] = {
    "token ids": Form(TOKENS),
    "text": Form(TEXT),
    "text with stop words": Form(TEXT, stop_words=("zebra", "42 42")),
    "token ids with log probabilities": Form(
        TOKENS | {"output_log_probs", "cum_log_probs"}, OutputParams(log_probs=True)
    ),
}


@dataclass(slots=True)
class Sink:
    """In the place of a `ResponseSender`: takes everything."""

    num_responses: int = 0
    is_behind: bool = False

    def send(self, tensors: dict[str, Any], *, is_final: bool) -> None:
        """Count it."""
        self.num_responses += 1


@dataclass(slots=True)
class Client:
    """One stream with its request."""

    request: LlmRequest
    stream: TokenStream


def make_clients(form: Form, codec: TextCodec, ids: list[int], num_tokens: int) -> list[Client]:
    """Streams at their first token."""
    clients = []
    for number in range(NUM_STREAMS):
        request = LlmRequest(
            number,
            list(ids),
            num_tokens,
            is_streaming=True,
            exclude_input_in_output=True,
            outputs=form.asked,
        )
        sink: Any = Sink()
        stream = TokenStream(sink, form.outputs)
        if "text_output" in form.outputs:
            stop = StopText(list(form.stop_words)) if form.stop_words else None
            stream.text = TextWriter(IncrementalDetokenizer(codec, ids), stop_text=stop)
        clients.append(Client(request, stream))
    return clients


def run_round(
    form: Form, codec: TextCodec, num_tokens: int, num_merged: int
) -> tuple[float, float]:
    """Microseconds per token of the loop's thread and of the sender's.

    The clock of a thread may itself take long to read, so it is read once around all tokens. What
    the loop does beside responses (noting the token) is measured by itself and taken off.
    """
    text = " ".join(map(str, range(1, num_tokens)))
    prompt = codec.encode("1 2 3", 64)
    ids = codec.encode(text, num_tokens * 8)[:num_tokens]
    ids = ids[: len(ids) - len(ids) % num_merged]
    noting, clients = (make_clients(form, codec, prompt, num_tokens) for _ in range(2))
    responses: list[list[Tensors]] = []
    noting_ns = _measure(lambda: _note(noting, ids))
    loop_ns = _measure(lambda: _build(clients, ids, form, responses))
    sender_ns = _measure(lambda: _send(clients, responses, num_merged))
    num_sent = NUM_STREAMS * len(ids) * 1000
    return (loop_ns - noting_ns) / num_sent, sender_ns / num_sent


def _measure(run: Callable[[], None]) -> int:
    began = time.thread_time_ns()
    run()
    return time.thread_time_ns() - began


def _note(clients: Sequence[Client], ids: Sequence[int]) -> None:
    for token in ids:
        for client in clients:
            client.request.add_new_token(token)


def _build(
    clients: Sequence[Client], ids: Sequence[int], form: Form, responses: list[list[Tensors]]
) -> None:
    """What the loop does behind every step, one token for each stream."""
    gatherer, requests = OutputGatherer(1), [client.request for client in clients]
    for request in requests:
        gatherer.add(request, 0)
    drawn = StepOutputs()
    if form.asked.log_probs:
        drawn.log_probs = {request.request_id: [-0.5] for request in requests}
    for token in ids:
        for request in requests:
            request.add_new_token(token)
        gatherer.executed(requests, drawn)
        responses.append([make_tensors(request, False, gatherer) for request in requests])


def _send(
    clients: Sequence[Client], responses: Sequence[Sequence[Tensors]], num_merged: int
) -> None:
    """What the dispatcher does, a round for every ``num_merged`` steps."""
    for first in range(0, len(responses), num_merged):
        steps = responses[first : first + num_merged]
        for number, client in enumerate(clients):
            piece = MergedResponse(number, client.stream)
            for step in steps:
                piece.add(step[number], False, "")
            client.stream.send(piece.ids, piece.extras.joined())


def measure(num_tokens: int, num_rounds: int) -> list[dict[str, Any]]:
    """One row per form and number of tokens per response; the least of interleaved rounds."""
    codec = TextCodec(DEMO_MODEL)
    cases = [(name, merged) for name in FORMS for merged in MERGED]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(num_rounds):
        for name, merged in cases:
            found[name, merged].append(run_round(FORMS[name], codec, num_tokens, merged))
    rows = []
    for (name, merged), values in found.items():
        loop, sender = min(values, key=sum)
        rows.append(
            {
                "form": name,
                "tokens_per_response": merged,
                "loop_us_per_token": round(loop, 2),
                "sender_us_per_token": round(sender, 2),
                "us_per_token": round(loop + sender, 2),
                "median_us_per_token": round(statistics.median(map(sum, values)), 2),
            }
        )
    return rows


def main() -> int:
    """Measure, print, write; 1 if a row is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    rows = measure(arguments.tokens, arguments.rounds)
    table = Table(
        "streamed", "tokens per response", "loop, us", "sender, us", "together, us", "median"
    )
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    result = {
        **describe_run("numpy", "tokenizers"),
        "load_average": os.getloadavg()[0],
        "streams": NUM_STREAMS,
        "limit_us_per_token": LIMIT_MICROSECONDS,
        "rows": rows,
    }
    print(write_result("responses", result, arguments.output))
    return int(any(row["us_per_token"] > LIMIT_MICROSECONDS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
