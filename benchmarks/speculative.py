"""Prompt look-up on and off, for a text that repeats itself, for wrong guesses, and for none.

A random Llama of some 40 M parameters (float32, seeded, made in a temporary folder) answers 1, 4
and 16 requests that arrive together, with the real scheduler, planner and engine. Its texts are
made to measure:

- *repeats*: the next token depends on the last one alone, and a text is a cycle of 24 tokens (all
  layers compute as always, what they add is 0);
- *misleads*: six tokens, drawn at random; each pair has been seen, and one guess in six is right;
- *new*: drawn at random from the whole vocabulary, so nothing is found.

Time is that of the processor, with one thread: other work on the machine changes it little. With
and without look-up take turns; every figure is the best of its rounds, and the answers of both must
be equal.

    OMP_NUM_THREADS=1 python benchmarks/speculative.py
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from engine_steps import Guess, load_engine, run_steps
from inflight_backend.engine import Engine
from inflight_backend.speculative.drafter import Drafter, SpeculativeDecodingConfig
from inflight_scheduler import BlockManager, LlmRequest, SamplingParams
from random_llama import num_parameters, random_llama
from report import describe_run, write_result

_VOCAB_SIZE = 16_000
_PERIOD = 24
_NUM_PROMPT = 16
_TEXTS = ("repeats", "misleads", "new")
_CONFIG = SpeculativeDecodingConfig("ngram")


class Run(NamedTuple):
    """One round: the answers, seconds of the processor, steps, drafts verified and accepted."""

    answers: list[list[int]]
    seconds: float
    num_steps: int
    num_drafts: int
    num_accepted: int


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = _parse()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        size = _write_checkpoints(Path(folder))
        for text in _TEXTS:
            checkpoint = Path(folder, "cycle" if text == "repeats" else "plain")
            engine = load_engine(checkpoint, max(options.requests), _NUM_PROMPT + options.output)
            rows += [_measure(engine, text, count, options) for count in options.requests]
    _print(rows)
    result = {
        **describe_run("inflight", "torch", "transformers", "numpy"),
        "threads": 1,
        "load_average": os.getloadavg(),
        "model": {"architecture": "LlamaForCausalLM", "parameters": size},
        "max_draft_len": _CONFIG.max_draft_len,
        "max_matching_ngram_size": _CONFIG.max_matching_ngram_size,
        "input_tokens": _NUM_PROMPT,
        "output_tokens": options.output,
        "rows": rows,
    }
    print(f"written: {write_result('speculative', result, options.write_to)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--output", type=int, default=128, help="tokens generated per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write-to", type=Path, help="JSON file; default: the committed result")
    return parser.parse_args()


def _write_checkpoints(folder: Path) -> int:
    """A random Llama, and one whose texts are cycles; returns the number of parameters."""
    model = random_llama(
        _VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    model.save_pretrained(folder / "plain")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        tokens = torch.arange(_VOCAB_SIZE)
        first = tokens - tokens % _PERIOD
        following = first + (tokens + 1 - first) % _PERIOD
        rows = model.model.embed_tokens.weight[tokens]
        model.lm_head.weight[following.clamp(max=_VOCAB_SIZE - 1)] = rows
    model.save_pretrained(folder / "cycle")
    return num_parameters(model)


def _measure(
    engine: Engine, text: str, num_requests: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one text and number of requests."""
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for _ in range(options.rounds):
        for is_on in (False, True):
            runs[is_on].append(_run(engine, text, num_requests, options.output, is_on))
    assert len({repr(run.answers) for each in runs.values() for run in each}) == 1, "not equal"
    best = {is_on: min(each, key=lambda run: run.seconds) for is_on, each in runs.items()}
    on, num_tokens = best[True], num_requests * options.output
    return {
        "text": text,
        "requests": num_requests,
        "tokens_per_cpu_second": {
            "off": num_tokens / best[False].seconds,
            "on": num_tokens / on.seconds,
        },
        "speedup": best[False].seconds / on.seconds,
        "steps": {"off": best[False].num_steps, "on": on.num_steps},
        "draft_tokens": on.num_drafts,
        "accepted_draft_tokens": on.num_accepted,
    }


def _make_requests(text: str, num_requests: int, num_new: int) -> list[LlmRequest]:
    dice = random.Random(num_requests)
    requests = []
    for number in range(num_requests):
        start = _PERIOD * dice.randrange(_VOCAB_SIZE // _PERIOD - 1)
        sampling = SamplingParams()
        if text != "repeats":
            few = tuple((start + place, 1e4) for place in range(6)) if text == "misleads" else ()
            sampling = SamplingParams(
                temperature=100.0, top_k=_VOCAB_SIZE - 1, seed=number, bias=few
            )
        prompt = list(range(start, start + _NUM_PROMPT))
        requests.append(LlmRequest(number, prompt, num_new, sampling=sampling))
    return requests


def _run(engine: Engine, text: str, num_requests: int, num_new: int, is_on: bool) -> Run:
    """All requests from their contexts to their last tokens; the clock starts after the former."""

    def make_guess(blocks: BlockManager) -> Guess:
        return Drafter(_CONFIG, blocks, engine.max_num_tokens, lambda request: False).guess

    requests = _make_requests(text, num_requests, num_new)
    steps = run_steps(engine, requests, make_guess if is_on else None)
    next(steps)
    start = time.process_time()
    num_steps = 1 + sum(1 for _ in steps)
    return Run(
        [list(request.tokens[request.orig_prompt_len :]) for request in requests],
        time.process_time() - start,
        num_steps,
        sum(request.num_verified_drafts for request in requests),
        sum(request.num_accepted_drafts for request in requests),
    )


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table("text", "requests", "off, tokens/s", "on, tokens/s", "speedup", "accepted")
    for row in rows:
        speed = row["tokens_per_cpu_second"]
        table.add_row(
            row["text"],
            str(row["requests"]),
            f"{speed['off']:.0f}",
            f"{speed['on']:.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['accepted_draft_tokens']} of {row['draft_tokens']}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
