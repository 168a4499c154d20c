"""The parts of `benchmarks/gpu.py`, where they can be wrong without a GPU being there."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


def full_size(device: str = "cpu") -> Any:
    """The setting of a run that is not dry."""
    from gpu_parts.common import Setting

    return Setting(torch.device(device), is_dry=False, is_quick=False, stop_at=float("inf"))


def test_engine_checks_stay_within_their_block_tables() -> None:
    from gpu_parts import engine_checks

    found, expected = engine_checks.adversarial(full_size())
    assert torch.equal(found, expected)


def test_an_engine_without_recordings_is_not_taken_for_one_with() -> None:
    from gpu_parts import checks
    from gpu_parts.common import TINY, make_engine, start_row
    from inflight_backend.engine import EngineConfig

    with pytest.raises(RuntimeError, match="no step could be recorded"):
        checks._graphs(full_size(), "none")
    config = EngineConfig(max_batch_size=2, max_tokens_in_paged_kv_cache=256)
    row = start_row(full_size(), "tiny", make_engine(full_size(), TINY, config), 1.0)
    assert row["recordings"] == 0
    assert "no step could be recorded" in row["error"]


def test_without_recorded_mixed_steps_none_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_parts import engine_checks

    with pytest.raises(RuntimeError, match="no mixed step could be recorded"):
        engine_checks.recorded_mixed_steps(full_size())
    config = engine_checks._config(full_size(), "float32", 12)
    turned_off = replace(config, cuda_graph_mixed_tokens=0)
    monkeypatch.setattr(engine_checks, "_config", lambda *_: turned_off)
    found, expected = engine_checks.recorded_mixed_steps(full_size())
    assert torch.equal(found, expected)
    assert len(found) == sum(5 + row % 20 for row in range(48))


def test_behind_a_broken_context_no_check_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_parts import checks

    def breaks() -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("device-side assert")

    def works() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1), torch.ones(1)

    made = [checks._Check("a", 0, works), checks._Check("b", 0, breaks)]
    made += [checks._Check(name, 0, works) for name in "cd"]
    assert [row["ok"] for row in checks.rows(full_size(), iter(made))] == [True, False, True, True]
    monkeypatch.setattr(checks, "_has_context", lambda setting: False)
    rows = list(checks.rows(full_size(), iter(made)))
    assert [row["ok"] for row in rows] == [True, False, False, False]
    assert "device-side assert" in rows[1]["error"]
    assert rows[2]["error"] == "did not run: 'b' broke the CUDA context"


def test_what_a_check_raises_is_told_with_its_frames(capsys: pytest.CaptureFixture[str]) -> None:
    """A compiler says at the end of a long message what is wrong."""
    from gpu_parts import checks

    def compiles() -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError(f"at 7:4: {'source ' * 200} and then the fault")

    [row] = checks.rows(full_size(), iter([checks._Check("a", 0, compiles)]))
    assert row["error"].startswith("ValueError: at 7:4: source")
    assert row["error"].endswith("and then the fault")
    assert len(row["error"]) < 320
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "in compiles" in said


def test_an_engine_that_does_not_start_leaves_the_kernels_behind_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu_parts import compiling

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(compiling, "make_engine", fail)
    row = compiling.start_engine(full_size(), "8B")
    assert row == {"model": "8B", "what": "start", "error": "RuntimeError: CUDA error"}
    assert "in fail" in capsys.readouterr().err


def test_one_wrong_row_is_not_lost_among_larger_ones() -> None:
    """Attention over 9,000 tokens without a sixteenth of them, beside rows of few tokens: the sum
    of all errors is within the limit."""
    from gpu_parts import checks

    torch.manual_seed(0)
    expected = torch.randn(8, 4, 64)
    expected[7] /= 60
    out = expected.clone()
    out[7] += 0.25 / 60 * torch.randn(4, 64)

    def verdicts(right: torch.Tensor, found: torch.Tensor) -> list[bool]:
        made = [
            checks._Check("all", 1e-2, lambda: (found, right)),
            checks._Check("rows", 1e-2, lambda: (found, right), has_rows=True),
        ]
        return [row["ok"] for row in checks.rows(full_size(), iter(made))]

    assert verdicts(expected, out) == [True, False]
    assert verdicts(expected, expected * 1.005) == [True, True]
    expected[0, 0] = 0  # a row that nobody wrote
    assert verdicts(expected, expected) == [True, True]
    out = expected.clone()
    out[0, 0] = 1e-3
    assert verdicts(expected, out) == [True, False]


def test_a_draw_on_a_boundary_is_no_fault_and_any_other_is() -> None:
    """Random rows on a GPU have some, and a first call that fails a check measures nothing."""
    from gpu_parts.draw_checks import where_clear
    from inflight_kernels import reference

    seeds, positions = torch.arange(8), torch.arange(8) + 5
    noise = reference.uniform(seeds, positions).double()
    is_low = seeds % 2 == 0
    first = torch.where(is_low, noise + 0.01, noise - 0.01)
    first[3] = noise[3] * (1 + 1e-7)  # the end of the first token
    shares = torch.stack((first, 1 - first), dim=1)
    # Either only the likelier one is left, or both.
    assert noise[6] < 0.3
    shares[6] = torch.tensor([0.3, 0.7])
    top_p = torch.where(seeds == 6, shares.float().log().softmax(dim=1)[:, 1], 1.0)

    def arguments(shares: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones, none = torch.ones(8), torch.zeros(8, dtype=torch.int32)
        return shares.log().float(), ones, none, top_p, seeds, positions

    expected = reference.sample(*arguments(shares))
    wrong = 1 - expected
    found, same = where_clear(wrong, expected, arguments(shares))
    assert same is expected
    is_compared = (seeds != 3) & (seeds != 6)
    assert torch.equal(found, torch.where(is_compared, wrong, expected))
    # (Row 6 keeps the likelier one then.)
    shares[is_low, 0], shares[is_low, 1] = noise[is_low], 1 - noise[is_low]
    with pytest.raises(AssertionError, match="only 4 of 8 rows"):
        where_clear(expected, expected, arguments(shares))


def test_every_kernel_is_checked_and_with_blocks_as_they_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tile of keys that fills a block is read by other code than one that does not."""
    from triton.runtime.interpreter import InterpretedFunction

    import inflight_kernels
    from gpu_parts import checks
    from kernel_ops import bench_paged_attention_context, bench_paged_attention_generation

    launched: set[str] = set()
    sizes: set[tuple[str, bool, int]] = set()
    run = InterpretedFunction.run

    def watch(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(self.fn.__name__)
        if "TOKENS_PER_BLOCK" in kwargs and "WINDOW" in kwargs:
            sizes.add((self.fn.__name__, kwargs["WINDOW"] > 0, kwargs["TOKENS_PER_BLOCK"]))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", watch)
    rows = list(checks.kernels(replace(full_size(), is_dry=True)))
    assert not [row for row in rows if not row["ok"]]
    folder = Path(inflight_kernels.__file__).parent / "ops"
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    kernels = set(re.findall(r"^def (_\w+_kernel)\(", text, re.MULTILINE))
    assert len(kernels) > 12
    assert launched >= kernels
    for module, name in (
        (bench_paged_attention_context, "_paged_attention_context_kernel"),
        (bench_paged_attention_generation, "_paged_attention_generation_kernel"),
    ):
        assert (name, False, module._BLOCK) in sizes
        assert {size for _, _, size in sizes} > {module._BLOCK}


def test_processes_share_the_work() -> None:
    shares = [replace(full_size(), share=(number, 3)) for number in range(3)]
    assert [list(setting.own(range(7))) for setting in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert list(full_size().own("ab")) == ["a", "b"]


def test_the_rows_and_the_stderr_of_all_processes_come_back(tmp_path: Path) -> None:
    from gpu_parts.isolated import run_isolated

    script = tmp_path / "part.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "from gpu_parts.isolated import keep_row\n"
        "share = sys.argv[sys.argv.index('--share') + 1] if '--share' in sys.argv else ''\n"
        "rows = Path(sys.argv[sys.argv.index('--rows') + 1])\n"
        "keep_row(rows, 'a part', int(share[:1] or 0), {'share': share})\n"
        "print('a warning', file=sys.stderr)\n"
        "sys.exit(share == '1/2')\n",
        encoding="utf-8",
    )
    kept = tmp_path / "rows.jsonl"
    alone = [{"share": ""}, {"stderr": "a warning"}]
    assert list(run_isolated(script, "a part", [], 60)) == alone
    assert list(run_isolated(script, "a part", [], 60, kept)) == alone
    assert list(run_isolated(script, "a part", [], 60, kept, num_processes=2)) == [
        {"share": "0/2"},
        {"stderr": "a warning"},
        {"share": "1/2"},
        {"error": "process 1 of 2 ended with status 1", "stderr": "a warning"},
    ]
    assert len(kept.read_text(encoding="utf-8").splitlines()) == 3, "rows of earlier parts stay"


def test_of_much_stderr_the_first_fault_and_the_last_words_come_back(tmp_path: Path) -> None:
    """A recording that fails says why in its first line, and then where, in some 4,000 characters:
    they come back whole."""
    from gpu_parts.isolated import run_isolated

    script = tmp_path / "part.py"
    for size in (4000, 20_000):
        said = f"cannot be recorded{'.' * size}RuntimeError"
        script.write_text(f"import sys\nsys.exit({said!r})\n", encoding="utf-8")
        [row] = run_isolated(script, "a part", [], 60)
        assert row["stderr"].startswith("cannot be recorded..")
        assert row["stderr"].endswith("..RuntimeError")
        assert (row["stderr"] == said) == (size == 4000)
        assert len(row["stderr"]) < 8100


def test_memory_is_collected_before_torch_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round the 8B's pool stayed in torch's hands, and the 14B had a quarter."""
    from gpu_parts.common import free_memory

    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", lambda: calls.append("collect"))
        patch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
        free_memory(torch.device("cuda"))
    assert calls == ["collect", "empty"]


def test_a_warm_up_has_steps_of_every_kind() -> None:
    """Prompts of more than one step, so that some come beside generations."""
    from gpu_parts.common import TINY, make_engine
    from gpu_parts.whole_requests import warm_up
    from inflight_backend.engine import Engine, EngineConfig
    from inflight_scheduler import ScheduledBatch

    config = EngineConfig(
        max_batch_size=16, max_num_tokens=32, max_seq_len=64, max_tokens_in_paged_kv_cache=1024
    )
    engine = make_engine(full_size(), TINY, config)
    kinds = set()
    submit = engine.submit

    def watch(batch: ScheduledBatch) -> Any:
        kinds.add((bool(batch.context_chunks), bool(batch.generation_slots)))
        return submit(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "submit", watch)
        warm_up(engine, [[1] * 10] * 16, [50] * 16)
    assert isinstance(engine, Engine)
    assert kinds == {(True, False), (True, True), (False, True)}


class Counted:
    """Patches `make_batch`: how many batches live at once, and what was asked for."""

    def __init__(self, patch: pytest.MonkeyPatch, module: Any) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0
        self.made: list[tuple[int, int]] = []
        make = module.make_batch

        def counted(heads: Any, query_lens: list[int], context_lens: list[int], **more: Any) -> Any:
            batch = make(heads, query_lens, context_lens, **more)
            self.alive.add(batch)
            self.most = max(self.most, len(self.alive))
            self.made.append((len(context_lens), max(context_lens)))
            return batch

        patch.setattr(module, "make_batch", counted)


def test_one_batch_of_the_attention_at_a_time_and_none_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows of K1 and of the tiles, on tensors without memory."""
    from gpu_parts import kernel_rows
    from kernel_ops import bench_paged_attention_context, bench_paged_attention_generation

    monkeypatch.setattr(kernel_rows, "time_seconds", lambda setting, call: (1.0, {}))
    generation = Counted(monkeypatch, bench_paged_attention_generation)
    context = Counted(monkeypatch, bench_paged_attention_context)
    rows = list(kernel_rows.tiles(full_size("meta")))
    assert not [row for row in rows if "error" in row]
    assert {row["op"] for row in rows} == {"paged_attention_generation", "paged_attention_context"}
    assert set(generation.made) == kernel_rows._TARGETS
    assert generation.most == context.most == 1
    generation.made.clear()
    assert len(list(kernel_rows.generation_attention(full_size("meta")))) == len(generation.made)
    assert {batch for batch, _ in generation.made} == {1, 8, 32, 64, 128, 256}
    assert generation.most == 1


def test_a_large_cache_is_drawn_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_ops.paged_batch import LLAMA_13B, make_batch

    drawn: list[int] = []
    randn = torch.randn

    def watch(*sizes: int, **more: Any) -> torch.Tensor:
        made = randn(*sizes, **more)
        drawn.append(made.numel())
        return made

    monkeypatch.setattr(torch, "randn", watch)
    batch = make_batch(
        LLAMA_13B, [1] * 256, [16_384] * 256, tokens_per_block=64,
        cache_dtype=torch.float8_e4m3fn, device=torch.device("meta"),
    )  # fmt: skip
    assert sum(drawn) == 2 * batch.key_cache.numel() + batch.query.numel()
    assert max(drawn) == 2**28


def test_what_fails_leaves_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_parts import kernel_rows
    from kernel_ops import bench_silu_mul, harness

    def fails() -> object:
        raise RuntimeError("out of memory")

    def two_rows(setting: object) -> Iterator[harness.Row]:
        yield harness.Row({"row": 1}, lambda: 0, 8, 0, {"peer": fails, "other": lambda: 0})
        fails()

    def timed(setting: object, call: harness.Call) -> tuple[float, dict[str, str]]:
        call()
        return 1e-6, {}

    monkeypatch.setattr(kernel_rows, "time_seconds", timed)
    monkeypatch.setattr(bench_silu_mul, "rows", two_rows)
    first, second, *others = kernel_rows._measured(full_size("meta"), ["silu_mul", "copy_blocks"])
    assert (first["us"], first["other_us"]) == (1.0, 1.0)
    assert first["peer"] == second["error"] == "RuntimeError: out of memory"
    assert others


def test_the_device_sleeps_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what the host needs for a call lies before the first event. The L2 is read full:
    written lines would go back to memory while the call is timed."""
    from kernel_ops import harness

    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 0.25

    class Scratch:
        def amax(self) -> None:
            calls.append("read")

        def zero_(self) -> None:
            calls.append("write")

    monkeypatch.setattr(torch, "zeros", lambda *sizes, **more: Scratch())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    slept: list[int] = []

    def sleep(cycles: int) -> None:
        calls.append("sleep")
        slept.append(cycles)

    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    now, steps = 0.0, iter([*[400e-6] * 4, *[700e-6] * 60, *[900e-6] * 600])

    def call() -> None:
        nonlocal now
        calls.append("call")
        now += next(steps)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    timing = harness.time_us(call, seconds=300 * 400e-6)
    assert (timing.us, timing.is_hidden, timing.note) == (250.0, False, timing.note)
    assert "host was late" in timing.note["note"]
    # 150 us at first; then twice the 400 us that the host has needed. The last ones took 900.
    assert set(slept[:4]) == {300_000}
    assert set(slept[4:]) == {1_600_000}
    steps = iter([400e-6] * 1400)
    timing = harness.time_us(call, seconds=300 * 400e-6)
    assert (timing.us, timing.note) == (250.0, {})
    assert calls == ["read", "sleep", "event", "call", "event"] * (len(calls) // 5)
    calls.clear()
    harness.time_us(call, seconds=0.001, clears_by_writing=True)
    assert calls[:5] == ["write", "sleep", "event", "call", "event"]


@pytest.mark.parametrize(
    ("device_name", "card", "share"),
    [
        ("NVIDIA H200", "H200", 0.9),
        ("NVIDIA H100 80GB HBM3", "H100", 0.9),
        ("NVIDIA H100 80GB HBM3", "H100", 0.7),
        ("NVIDIA H100 PCIe", None, 0.9),
        ("NVIDIA GB10", None, 0.1),
    ],
)
def test_a_card_is_judged_by_its_own_figures(
    monkeypatch: pytest.MonkeyPatch, device_name: str, card: str | None, share: float
) -> None:
    """A sound H100 copies less than 4 TB/s; and what is published of one card says nothing of
    another."""
    from gpu_parts import ceilings, common, offline

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device_name)
    setting = full_size("cuda")
    found = common.find_card(device_name)
    assert (found.name if found else None) == card
    nominal = found.nominal_bytes if found else 1e12

    def timed(_: object, call: Any, **__: object) -> tuple[float, dict[str, str]]:
        return 2**33 / (share * nominal), {}

    monkeypatch.setattr(ceilings, "time_seconds", timed)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.zeros(2**23))
    rows = list(ceilings._bandwidth(setting))
    assert ("of_nominal" in rows[0]) == (card is not None)
    assert any("give it back" in row.get("error", "") for row in rows) == (share == 0.7)
    assert all(row.get("of_nominal", share) <= 1.01 * share for row in rows)
    figures = {work.published.get(offline._card_name(setting)) for work in offline._INFLIGHT}
    expected = {"H200": {work.published["H200"] for work in offline._INFLIGHT}}
    expected["H100"] = {28_312, 22_714, 17_660, 15_220, 3_450, 9_305}
    assert figures == expected.get(card or "", {None})
    slowest = offline._STATIC[0].expected_seconds(offline._card_name(setting))
    assert slowest == pytest.approx(1.5 * 1024 * 128 / (11_819 / (1 if card == "H200" else 2)))


def test_a_row_says_how_many_of_its_requests_fit_at_once() -> None:
    from gpu_parts import offline
    from gpu_parts.common import TINY, Setting, make_engine
    from inflight_backend.engine import EngineConfig

    setting = Setting(torch.device("cpu"), is_dry=True, is_quick=False, stop_at=float("inf"))
    for max_tokens, fits in ((64, 2), (256, 3)):  # of 13 tokens, two blocks of 16
        config = EngineConfig(
            max_batch_size=3, tokens_per_block=16, max_tokens_in_paged_kv_cache=max_tokens
        )
        work = offline.Work(3, (9, 9), (9, 9), expected=1)
        row = offline._row(setting, make_engine(setting, TINY, config), work)
        assert row["fits_at_once"] == fits


def test_the_step_that_draws_with_filters_leaves_its_slots_greedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpu_parts import steps
    from gpu_parts.common import TINY, Setting, make_engine
    from inflight_backend.engine import Engine, EngineConfig
    from inflight_scheduler import ScheduledBatch

    setting = Setting(torch.device("cpu"), is_dry=True, is_quick=False, stop_at=float("inf"))
    config = EngineConfig(max_batch_size=2, max_tokens_in_paged_kv_cache=256)
    engine = make_engine(setting, TINY, config)
    steps._fill(setting, engine, 2, 20, 2)
    greedy: list[bool] = []
    choose = Engine._choose

    def noted(self: Engine, logits: torch.Tensor, sampling: Any, *, has_min_p: bool) -> Any:
        greedy.append(sampling.is_all_greedy)
        return choose(self, logits, sampling, has_min_p=has_min_p)

    monkeypatch.setattr(Engine, "_choose", noted)
    batch = ScheduledBatch(iteration=2, generation_slots=(0, 1))
    before = engine.execute(steps._rewind(batch, 20)) + engine.execute(batch)
    with steps._filters(engine, 2, 20):
        engine.execute(batch)
    assert greedy == [True, True, False, False, True]
    assert engine.execute(steps._rewind(batch, 20)) + engine.execute(batch) == before
