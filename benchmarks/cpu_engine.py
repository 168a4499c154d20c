"""Our engine on a CPU beside transformers: `generate` (padded batch) and continuous batching.

A random Llama of about 100 M parameters (float32, seeded, made in a temporary folder) generates
greedily for 1, 8 and 32 requests that arrive together. Ours runs with the real scheduler, block
manager and planner, prompts and tokens one plan at a time. The three are interleaved: every round
times each of them once, and the table shows medians of the rounds. On a machine that others use
too, threads that spin at every barrier make all figures collapse; let them sleep instead:

    OMP_WAIT_POLICY=passive python benchmarks/cpu_engine.py --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine_steps import load_engine, run_steps
from inflight_scheduler import LlmRequest
from random_llama import num_parameters, random_llama
from report import describe_run, write_result

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]
_VOCAB_SIZE = 32_000


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = _parse()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        size = _write_checkpoint(Path(folder))
        engines = _load_engines(Path(folder), options)
        rounds = list(_measure(engines, options))
    medians = {
        name: {
            str(count): statistics.median(
                row["tokens_per_second"]
                for row in rounds
                if row["engine"] == name and row["requests"] == count
            )
            for count in options.requests
        }
        for name in engines
    }
    _print(medians, options)
    result = {
        **describe_run("inflight", "torch", "transformers", "numpy"),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "model": {"architecture": "LlamaForCausalLM", "parameters": size},
        "input_tokens": options.input,
        "output_tokens": options.output,
        "median_tokens_per_second": medians,
        "rounds": rounds,
    }
    print(f"written: {write_result('cpu_engine', result, options.write_to)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens generated per request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write-to", type=Path, help="JSON file; default: the committed result")
    return parser.parse_args()


def _write_checkpoint(folder: Path) -> int:
    """A random Llama; returns its number of parameters."""
    model = random_llama(
        _VOCAB_SIZE,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model.save_pretrained(folder)
    return num_parameters(model)


def _load_engines(folder: Path, options: argparse.Namespace) -> dict[str, Generate]:
    import transformers

    most = max(options.requests)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {
        "inflight": _ours(folder, most, options),
        "transformers generate": _padded(model),
        "transformers generate_batch": _continuous(model, most, options),
    }


def _ours(folder: Path, most: int, options: argparse.Namespace) -> Generate:
    engine = load_engine(folder, most, options.input + options.output)

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        requests = [LlmRequest(i, prompt, num_tokens) for i, prompt in enumerate(prompts, 1)]
        for _ in run_steps(engine, requests):
            pass
        return [list(request.tokens[request.orig_prompt_len :]) for request in requests]

    return generate


def _padded(model: Any) -> Generate:
    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        rows: Prompts = answer[:, ids.shape[1] :].tolist()
        return rows

    return generate


def _continuous(model: Any, most: int, options: argparse.Namespace) -> Generate:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # Its cache as large as ours and all prompts in one step; what it holds is made once and kept.
    block_size = 64
    settings = ContinuousBatchingConfig(
        block_size=block_size,
        num_blocks=most * -(-(options.input + options.output) // block_size),
        max_batch_tokens=most * options.input,
        allow_block_sharing=False,
    )

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        answers = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(
                max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=settings,
            persistent_manager=True,
        )
        by_prompt = {tuple(out.prompt_ids): out.generated_tokens for out in answers.values()}
        return [list(by_prompt[tuple(prompt)]) for prompt in prompts]

    return generate


def _measure(engines: dict[str, Generate], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    shape = (max(options.requests), options.input)
    prompts: Prompts = torch.randint(_VOCAB_SIZE, shape, generator=generator).tolist()
    for generate in engines.values():  # warm up
        generate(prompts, 2)
    for number in range(options.rounds):
        for count in options.requests:
            for name, generate in engines.items():
                start = time.perf_counter()
                answers = generate(prompts[:count], options.output)
                seconds = time.perf_counter() - start
                assert [len(tokens) for tokens in answers] == [options.output] * count, name
                speed = count * options.output / seconds
                print(
                    f"round {number} requests {count:3d} {name:28s} {speed:8.1f} tok/s", flush=True
                )
                yield {
                    "round": number,
                    "requests": count,
                    "engine": name,
                    "seconds": round(seconds, 3),
                    "tokens_per_second": round(speed, 1),
                }


def _print(medians: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    title = f"tokens per second, {options.input} in, {options.output} out (median)"
    table = Table("engine", *(f"{count} requests" for count in options.requests), title=title)
    ours = medians["inflight"]
    for name, row in medians.items():
        table.add_row(name, *(f"{row[n]:.0f} ({ours[n] / row[n]:.2f}x)" for n in row))
    Console().print(table, "in brackets: ours against this row", sep="\n")


if __name__ == "__main__":
    main()
