"""What E1 and O1 call the time of a step, on an engine with a host and a device of known speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.graph_replay import Rerun

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.config import resolve
from inflight_backend.engine.cuda_graphs import GraphCache
from inflight_scheduler import BlockAssignment, ScheduledBatch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
STEP = 0.010  # seconds that the device takes
NUM_STEPS = 20


class Machine:
    """An engine on a clock of its own: submitting takes ``host`` seconds, the device `STEP`."""

    def __init__(self, host: float) -> None:
        self.now = self.busy_until = 0.0
        self.host = host
        self.is_dry = False
        self._graphs = SimpleNamespace(steps=SimpleNamespace(run=self.replay))
        self.config = SimpleNamespace(max_batch_size=8)
        self.model_config = None
        self.vocab_size = 64
        self.last = ScheduledBatch(iteration=0)

    def perf_counter(self) -> float:
        return self.now

    def replay(self, num_rows: int = 1) -> None:
        self.busy_until = max(self.now, self.busy_until) + STEP

    def submit(self, batch: ScheduledBatch) -> Any:
        self.now += self.host
        self.last = batch
        self.replay()
        end = self.busy_until
        return SimpleNamespace(read=lambda: self.wait_until(end))

    def execute(self, batch: ScheduledBatch) -> None:
        self.submit(batch).read()

    def synchronize(self) -> None:
        self.wait_until(self.busy_until)

    def wait_until(self, end: float) -> None:
        self.now = max(self.now, end)

    def figures(self, **values: float) -> dict[str, float]:
        return values


@pytest.fixture(autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


def step_times(machine: Machine, patch: pytest.MonkeyPatch) -> Any:
    from gpu_parts import steps

    patch.setattr("time.perf_counter", machine.perf_counter)
    batch = ScheduledBatch(iteration=2, generation_slots=(0, 1))
    setting: Any = machine
    return steps.time_steps(setting, setting, batch, 100, NUM_STEPS)


def test_a_host_that_is_hidden_lets_the_device_idle_in_the_plain_loop_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = step_times(Machine(host=0.004), monkeypatch)
    assert times.device == pytest.approx(STEP)
    assert times.host == pytest.approx(0.004)
    assert times.plain == pytest.approx(0.014)
    assert times.overlapped == pytest.approx(STEP + 0.004 / NUM_STEPS)  # the first is not hidden
    assert times.idle_percent == pytest.approx(100 * (1 - STEP / times.overlapped))
    assert times.idle_percent < 3


def test_a_host_that_is_slower_than_the_device_is_not_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = step_times(Machine(host=0.030), monkeypatch)
    assert times.device == pytest.approx(STEP)
    assert times.idle_percent == pytest.approx(100 * (1 - 0.010 / 0.0305))


def test_no_prompt_is_made_while_one_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_parts import steps

    machine = Machine(host=0.001)
    setting: Any = machine

    def make(*_: Any) -> ScheduledBatch:
        machine.now += 5
        return ScheduledBatch(iteration=1)

    monkeypatch.setattr("time.perf_counter", machine.perf_counter)
    monkeypatch.setattr(steps, "_context_batch", make)
    monkeypatch.setattr(steps, "context_floor_ms", lambda *_: 1.0)
    assert steps._prompt(setting, setting, 2048, False)["ms"] == pytest.approx(11.0)


def test_the_replays_of_a_whole_engine_leave_it_as_it_was() -> None:
    """They advance the slots on the device and not on the host; the rewind puts both back."""
    from gpu_parts import steps
    from gpu_parts.common import TINY, Setting, random_parameters

    model = replace(TINY, num_layers=1, sliding_windows=(None,))
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        attention_backend="triton",
        max_batch_size=1,
        max_num_tokens=16,
        max_seq_len=16,
        tokens_per_block=16,
        max_tokens_in_paged_kv_cache=16,
        cuda_graph_mixed_tokens=0,
    )
    config = resolve(config, model)
    setting = Setting(torch.device("cpu"), is_dry=False, is_quick=False, stop_at=float("inf"))
    with torch.inference_mode():
        parameters = random_parameters(model, torch.float32, setting.device)
        engine = Engine(config, model, parameters, Rerun())
    engine.execute(steps._context_batch(engine, [0], 8, (BlockAssignment(0, 0, 0),)))
    batch = ScheduledBatch(iteration=2, generation_slots=(0,))

    def answers() -> list[list[int]]:
        engine.execute(steps._rewind(batch, 8))
        return [engine.execute(batch) for _ in range(2)]

    before = answers()
    times = steps.time_steps(setting, engine, batch, 8, 1)
    assert times.device is not None
    assert times.device > 0
    assert answers() == before


def test_mixed_steps_are_timed_replayed_and_eagerly() -> None:
    from gpu_parts import steps

    runner: Any = SimpleNamespace(num_graphs=3)
    recordings = GraphCache(None, runner)
    engine: Any = SimpleNamespace(
        config=SimpleNamespace(cuda_graph_mixed_tokens=512),
        num_mixed_graphs=3,
        _graphs=recordings,
    )

    def rows(num_tokens: int) -> list[tuple[str, int]]:
        measured = steps._recorded_and_eager(
            engine, num_tokens, lambda: {"sizes": engine._graphs.num_mixed}
        )
        return [(row["mixed_steps"], row["sizes"]) for row in measured]

    assert rows(512) == [("recorded", 3), ("eager", 0)]
    assert engine._graphs is recordings
    assert rows(513) == [("eager", 0)]
    engine.num_mixed_graphs = 0
    assert rows(5) == [("eager", 0)]


def test_steps_of_generations_are_timed_before_a_mixed_one_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are what most depends on; a mixed recording that is wrong may break the CUDA context."""
    from gpu_parts import steps
    from gpu_parts.common import Setting

    runner: Any = SimpleNamespace(num_graphs=3)
    engine = SimpleNamespace(
        config=SimpleNamespace(cuda_graph_mixed_tokens=512),
        num_mixed_graphs=3,
        execute=lambda batch: None,
        _attention=None,
        _graphs=GraphCache(None, runner),
    )

    def told(what: str) -> Any:
        return lambda *_: {"what": what, "sizes": engine._graphs.num_mixed}

    monkeypatch.setattr(steps, "make_engine", lambda *_: engine)
    monkeypatch.setattr(steps, "start_row", told("start"))
    monkeypatch.setattr(steps, "_fill", lambda *_: 1.0)
    for name, what in (("_steps", "step"), ("_mixed", "mixed step"), ("_prompt", "prompt")):
        monkeypatch.setattr(steps, name, told(what))
    setting = Setting(torch.device("cpu"), is_dry=True, is_quick=False, stop_at=float("inf"))
    rows = [(row["what"], row.get("sizes")) for row in steps.bf16(setting)]
    assert rows == [
        ("start", 3),
        ("fill", None),
        *[("step", 0)] * 2,
        ("draw", 0),
        *[("mixed step", 3), ("mixed step", 0)],
        *[("prompt", 3), ("prompt", 0)] * 2,
    ]


def test_a_mixed_step_is_overlapped_and_its_host_is_told_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpu_parts import steps

    machine = Machine(host=0.004)
    setting: Any = machine
    monkeypatch.setattr("time.perf_counter", machine.perf_counter)
    row = steps._mixed(setting, setting, 4, 7, 100)
    assert (row["generations"], row["prompt"]) == (3, 7)
    assert row["host_us"] == pytest.approx(4000)
    assert row["overlapped_ms"] == pytest.approx(10 + 4 / NUM_STEPS)
    chunk, *others = machine.last.context_chunks
    assert (chunk.slot, len(chunk.tokens), others) == (3, 7, [])
    assert machine.last.generation_slots == (0, 1, 2)


def test_kernels_are_told_by_what_they_take_of_a_step() -> None:
    from gpu_parts import steps

    names = [f"kernel {number} {'long ' * 20}" for number in range(12)]
    ran = [(name, 2.0 + number) for number, name in enumerate(names) for _ in range(4)]
    *told, everything = steps.told_kernels(iter([*ran, ("often", 1.0), *[("often", 1.0)] * 99]), 2)
    assert told[0] == {"what": "kernel", "name": "often", "us": 50.0, "launches": 50.0}
    assert [row["us"] for row in told[1:]] == [26.0, 24.0, 22.0, 20.0, 18.0, 16.0, 14.0]
    assert all(len(row["name"]) <= 80 for row in told)
    assert everything == {
        "what": "all kernels",
        "us": 50 + 4 * sum(range(2, 14)) / 2,
        "launches": 74,
    }


def test_a_step_is_taken_apart() -> None:
    """On a CPU the profiler tells of torch's operations: the product of the head is one of them."""
    from gpu_parts import steps
    from gpu_parts.common import TINY, Setting, make_engine

    config = EngineConfig(
        max_batch_size=2, max_num_tokens=16, max_seq_len=16, tokens_per_block=16,
        max_tokens_in_paged_kv_cache=32, attention_backend="triton",
    )  # fmt: skip
    setting = Setting(torch.device("cpu"), is_dry=False, is_quick=False, stop_at=float("inf"))
    engine = make_engine(setting, replace(TINY, num_layers=1, sliding_windows=(None,)), config)
    blocks = (BlockAssignment(0, 0, 0), BlockAssignment(1, 0, 1))
    engine.execute(steps._context_batch(engine, [0, 1], 8, blocks))
    *kernels, everything = steps._parts(setting, engine, 2, 8)
    assert 1 < len(kernels) <= 8
    assert {row["batch"] for row in kernels} == {2}
    assert everything["what"] == "all kernels"
    assert everything["launches"] >= sum(row["launches"] for row in kernels) > 0
