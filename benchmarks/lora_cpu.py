"""What adapters cost on a CPU: linears of a layer, and whole steps of 64 generations.

Linears are those of a Llama of 1.1 B parameters, all of a layer with adapters over them without.
Steps are those of a random Llama with 6 such layers (float32, seeded, made in a temporary folder):
without LoRA, with LoRA that nobody uses, and with 1, 8 and 64 adapters among 64 requests
that generate; and the step in which a 65th adapter is loaded.
All settings take turns, and a figure is the median over the rounds.

    python benchmarks/lora_cpu.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_steps import load_engine, run_steps
from inflight_backend.engine import Engine
from inflight_backend.engine.memory_plan import adapted_linears
from inflight_backend.models.blocks.lora import (
    Adapter,
    AdapterPart,
    Multiply,
    StepAdapters,
)
from inflight_backend.models.compiled.linears import CompiledLinear
from inflight_backend.models.compiled.lora import CompiledAdapters
from inflight_scheduler import AdapterAssignment, LlmRequest, ScheduledBatch
from random_llama import num_parameters, random_llama
from report import describe_run, write_result

_LINEARS = {"qkv": (1, (1, 1 / 8, 1 / 8)), "output": (1, (1,)), "gate_up": (1, (2.75, 2.75)),
            "down": (2.75, (1,))}  # fmt: skip
"""Columns and rows of the parts of each, in units of hidden_size."""
_CASES = ((8, 0), (8, 1), (8, 8), (64, 0), (64, 1), (64, 8), (64, 64))
_TARGETS = {"0": 1.0, "1": 1.05, "8": 1.08, "64": 1.35}
"""Of adapters of rank 16 among 64 rows: a step over one without LoRA."""
_NUM_REQUESTS, _NUM_PROMPT_TOKENS, _RANK = 64, 8, 16
_SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
_LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6,
          "num_attention_heads": 32, "num_key_value_heads": 4}  # fmt: skip


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=16, help="steps of a round, per setting")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--write-to", type=Path, help="JSON file; default: the committed result")
    options = parser.parse_args()
    hidden_size = 64 if options.small else 2048
    with torch.inference_mode():
        linears = [
            row for rank in (16, 64) for row in _measure_linears(hidden_size, rank, options.rounds)
        ]
    with tempfile.TemporaryDirectory() as folder:
        model = random_llama(
            1000 if options.small else 32_000, **_SMALL if options.small else _LARGE
        )
        model.save_pretrained(folder)
        steps = _measure_steps(Path(folder), options.rounds, options.steps)
    result = {
        **describe_run("inflight", "torch", "numpy"),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "hidden_size_of_linears": hidden_size,
        "linears": linears,
        "parameters_of_steps": num_parameters(model),
        "targets": _TARGETS,
        **steps,
    }
    for row in linears:
        print(row)
    print(steps)
    print(f"written: {write_result('lora_cpu', result, options.write_to)}")


def _measure_linears(hidden_size: int, rank: int, rounds: int) -> list[dict[str, float]]:
    table, plain, adapted = CompiledAdapters(torch.float32), list[Multiply](), list[Multiply]()
    sizes = {
        name: (int(columns * hidden_size), [int(part * hidden_size) for part in parts])
        for name, (columns, parts) in _LINEARS.items()
    }
    for name, (columns, parts) in sizes.items():
        plain.append(CompiledLinear(torch.randn(sum(parts), columns), None))
        adapted.append(table.wrap(name, plain[-1], None, of_draws=False))
    for place in range(64):
        table.load(place, table.prepare(_adapter(sizes, rank)))
    rows = []
    for num_rows, num_adapters in _CASES:
        inputs = [torch.randn(num_rows, columns) for columns, _ in sizes.values()]
        places = np.sort(np.arange(num_rows) % max(num_adapters, 1)).astype(np.int32)
        table.begin(StepAdapters(places, places) if num_adapters else None)
        factors = [_seconds(adapted, inputs) / _seconds(plain, inputs) for _ in range(rounds)]
        factor = round(statistics.median(factors), 3)
        rows.append({"rank": rank, "rows": num_rows, "adapters": num_adapters, "over_none": factor})
    return rows


def _adapter(sizes: dict[str, tuple[int, list[int]]], rank: int, scale: float = 1.0) -> Adapter:
    parts = []
    for name, (columns, slices) in sizes.items():
        start = 0
        for rows in slices:
            a, b = torch.randn(rank, columns) * scale, torch.randn(rows, rank) * scale
            parts.append(AdapterPart(name, start, a, b))
            start += rows
    return Adapter(tuple(parts), os.urandom(16))


def _seconds(linears: Sequence[Multiply], inputs: Sequence[Tensor]) -> float:
    started = time.perf_counter()
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)
    return time.perf_counter() - started


class _Adapted:
    """An engine whose requests have the adapters of their task ids; before the step ``arrives_at``
    another one is loaded."""

    def __init__(
        self, engine: Engine, newcomer: Adapter | None = None, arrives_at: int = -1
    ) -> None:
        self._engine, self._newcomer, self._left = engine, newcomer, arrives_at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """Assigns adapters to the slots that are set up."""
        if self._left == 0 and self._newcomer is not None:
            self._engine.load_adapter(_NUM_REQUESTS, self._engine.prepare_adapter(self._newcomer))
        self._left -= 1
        places = tuple(
            AdapterAssignment(setup.slot, self.place_of(setup.request_id)) for setup in batch.setups
        )
        return self._engine.execute(replace(batch, adapters=places))

    place_of: Callable[[int], int] = staticmethod(lambda request_id: -1)


def _measure_steps(folder: Path, rounds: int, num_steps: int) -> dict[str, Any]:
    num_tokens = _NUM_PROMPT_TOKENS + num_steps + 1
    engines = {
        is_on: load_engine(folder, _NUM_REQUESTS, num_tokens, enable_lora=is_on)
        for is_on in (False, True)
    }
    adapted = engines[True]
    linears = adapted_linears(adapted.model_config, with_experts=False)
    sizes = {each.name: (each.columns, list(each.slices)) for each in linears}
    for place in range(_NUM_REQUESTS):
        adapter = _adapter(sizes, _RANK, 0.02)
        adapted.load_adapter(place, adapted.prepare_adapter(adapter))
    newcomer = _adapter(sizes, _RANK, 0.02)
    times: dict[str, list[float]] = {}
    arrivals: list[float] = []
    for _ in range(rounds):
        for setting in ("without LoRA", *_TARGETS):
            count = int(setting) if setting.isdecimal() else 0
            engine = engines[setting.isdecimal()]
            seconds = _run(engine, count, num_steps)
            times.setdefault(setting, []).append(statistics.median(seconds))
        seconds = _run(adapted, _NUM_REQUESTS, num_steps, newcomer)
        arrivals.append(seconds[num_steps // 2] / statistics.median(seconds))
    medians = {name: statistics.median(each) for name, each in times.items()}
    factors = {
        name: statistics.median(
            one / other for one, other in zip(each, times["without LoRA"], strict=True)
        )
        for name, each in times.items()
    }
    return {
        "median_step_seconds": {name: round(each, 6) for name, each in medians.items()},
        "step_over_one_without_lora": {name: round(each, 3) for name, each in factors.items()},
        "step_with_a_65th_adapter_over_the_median": round(statistics.median(arrivals), 3),
    }


def _run(
    engine: Engine, num_adapters: int, num_steps: int, newcomer: Adapter | None = None
) -> list[float]:
    """Seconds of steps in which all requests generate, behind the one of their prompts."""
    requests = [
        LlmRequest(
            number,
            [(7 * number + 3 * place) % 1000 for place in range(_NUM_PROMPT_TOKENS)],
            num_steps + 1,
        )
        for number in range(1, _NUM_REQUESTS + 1)
    ]
    wrapped: Any = _Adapted(engine, newcomer, 1 + num_steps // 2 if newcomer else -1)
    if num_adapters:
        for request in requests:
            request.lora_task_id = request.request_id % num_adapters
        wrapped.place_of = lambda request_id: request_id % num_adapters
    return list(run_steps(wrapped, requests))[-num_steps:]


if __name__ == "__main__":
    main()
