"""The plan of the memory against the engine that takes it."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend.engine.test_device_memory import FREE_BYTES, STEP_BYTES, CountedMemory, make_engine
from safetensors.torch import load_file, save_file
from support.checkpoints import VARIANTS, write_checkpoint
from support.command_runner import run
from torch.utils._python_dispatch import TorchDispatchMode

from inflight_backend.engine import Engine, EngineConfig, memory_plan
from inflight_backend.engine.config import resolve
from inflight_backend.engine.memory_plan import (
    GIB,
    MemoryPlan,
    PlanSettings,
    adjustment_shapes,
    check_limits,
    check_pool,
    concurrency,
    make_plan,
    num_bytes,
    usual_shapes,
)
from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.manager.batcher import load_engine
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.models.checkpoint_files import read_weight_headers
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.layers import Parameter
from inflight_backend.models.ops import TORCH_OPS
from inflight_backend.models.parameters import decoder_parameters
from inflight_scheduler import BlockManager, CapacitySchedulerPolicy, LlmRequest, make_scheduler
from inflight_server.commands.plan import plan
from inflight_server.serve.settings import DEMO_MODEL


def measured_engine(**settings: Any) -> Engine:
    """As on a GPU with little room: what is free is told by `CountedMemory`."""
    config = EngineConfig(device="cpu", max_batch_size=4, max_num_tokens=50, **settings)
    return make_engine(DEMO_MODEL, CountedMemory(), config)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.case(115)
def test_the_plan_is_what_the_engine_takes(tmp_path: Path, variant: str) -> None:
    """Parameters, tables and pool, byte by byte, for every family."""
    folder = write_checkpoint(tmp_path, variant, num_shards=2)
    # Of float16, since weights that a CPU packs have no address to know them by.
    settings = {"dtype": "float16", "tokens_per_block": 8, "max_seq_len": 128}
    made = make_plan(folder, PlanSettings(max_tokens=1000, **settings))  # type: ignore[arg-type]
    engine = Engine.load(
        folder,
        EngineConfig(device="cpu", max_tokens_in_paged_kv_cache=1000, **settings),  # type: ignore[arg-type]
    )
    assert engine.num_blocks == made.num_blocks == 125
    assert check_pool(folder, engine)
    assert sum(layer.nbytes for pair in pool_layers(engine) for layer in pair) == made.pool_bytes
    assert weight_bytes(engine) == made.weight_bytes
    assert vars(engine._attention)["_cos_sin"].nbytes == made.table_bytes
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert made.file_bytes < files < made.file_bytes + 100_000  # the headers


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_fp8_takes_what_the_plan_says(
    tmp_path: Path, quantization: str, kv_cache_dtype: str
) -> None:
    folder = write_checkpoint(tmp_path, "qwen2-tied", head_dim=16, intermediate_size=64)
    fp8 = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    made = make_plan(folder, PlanSettings(dtype="float16", max_tokens=640, **fp8))  # type: ignore[arg-type]
    engine = Engine.load(
        folder,
        EngineConfig(
            device="cpu",
            dtype="float16",
            attention_backend="triton",
            max_tokens_in_paged_kv_cache=640,
            **fp8,  # type: ignore[arg-type]
        ),
    )
    assert check_pool(folder, engine)
    assert sum(layer.nbytes for pair in pool_layers(engine) for layer in pair) == made.pool_bytes
    assert weight_bytes(engine) == made.weight_bytes


def test_an_unknown_kind_of_fp8_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_cache_dtype must be auto or fp8, not 'int8'"):
        make_plan(DEMO_MODEL, PlanSettings(kv_cache_dtype="int8"))


@pytest.mark.parametrize("gpu_memory", [None, 8 * GIB])
def test_what_slots_take_is_in_the_plan(gpu_memory: int | None) -> None:
    """Added up over the tensors of an engine; a GPU's has the tables of the adjustments, too."""
    engine = Engine.load(
        DEMO_MODEL,
        EngineConfig(device="cpu", max_batch_size=7, max_num_tokens=300, max_seq_len=100),
    )
    owners = [vars(engine._slots), {"device": engine._buffer._buffer.device}]
    if gpu_memory is not None:
        for name in engine._adjustments._shapes:
            engine._adjustments._table(name)
        owners.append(engine._adjustments._tables)
    taken = sum(value.nbytes for owner in owners for value in owner.values() if is_tensor(value))
    settings = PlanSettings(
        gpu_memory=gpu_memory, max_batch_size=7, max_num_tokens=300, max_seq_len=100
    )
    made = make_plan(DEMO_MODEL, settings)
    assert made.slot_bytes == taken
    if gpu_memory is not None:
        tables = engine._adjustments._tables
        assert sum(table.nbytes for table in tables.values()) == 8 * (8 * engine.vocab_size + 912)


def is_tensor(value: object) -> bool:
    return hasattr(value, "data_ptr")


@pytest.mark.parametrize(("hidden", "intermediate"), [(4096, 14_336), (5120, 13_824), (896, 4864)])
def test_the_largest_step_is_in_the_plan(hidden: int, intermediate: int) -> None:
    """The most that lives at once in `Decoder.forward`, on a device without memory; ops give what
    those of a GPU do, without what plain torch makes between."""
    model = replace(
        ModelConfig.from_folder(DEMO_MODEL),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=hidden // 128,
        num_kv_heads=1,
        head_dim=128,
        num_layers=2,
        sliding_windows=(None, None),
    )
    ops = replace(
        TORCH_OPS,
        rms_norm=lambda x, *_: torch.empty_like(x),
        add_rms_norm=lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
        final_norm=lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
        silu_mul=lambda x: x.new_empty(len(x), x.shape[1] // 2),
    )
    num_tokens = 8192
    with torch.device("meta"), torch.inference_mode():
        parameters: dict[str, Parameter] = {
            spec.name: torch.empty(spec.shape, dtype=torch.bfloat16)
            for spec in decoder_parameters(model)
        }
        decoder = Decoder(model, parameters, ops)
        shape = (num_tokens, model.num_heads, model.head_dim)
        attention = SimpleNamespace(attend=lambda *_: torch.empty(shape))
        tokens, rows = torch.empty(num_tokens, dtype=torch.int64), torch.empty(256).long()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with _LiveBytes() as live:
                decoder.forward(tokens, attention, rows)
        finally:
            torch.set_default_dtype(torch.float32)
    planned = memory_plan._step_bytes(model, num_tokens, 0, 2)
    assert 0.97 * planned < live.peak <= planned * 1.01


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operations make, as long as somebody has it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self._add(made.nbytes)
            weakref.finalize(made, self._add, -made.nbytes)
        return made

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


def test_an_8b_of_256_slots_keeps_a_quarter_of_a_gibibyte() -> None:
    """The figure that `slot_memory` states."""
    taken = num_bytes(adjustment_shapes(256, 128_256, 8192))
    assert taken / 2**20 == pytest.approx(260, abs=0.6)


def pool_layers(engine: Engine) -> list[Any]:
    return [engine._pool.layer(k) for k in range(engine.model_config.num_layers)]


def weight_bytes(engine: Engine) -> int:
    """Bytes of the distinct tensors the decoder holds, without the rope table."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        value = getattr(value, "__self__", value)  # a linear that is called by a method
        if hasattr(value, "data_ptr"):
            found[value.data_ptr()] = value.nbytes
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif hasattr(value, "__slots__") or hasattr(value, "__dict__"):
            names = getattr(value, "__slots__", None) or vars(value)
            for name in names:
                visit(getattr(value, name))

    decoder = engine._decoder
    for name, value in vars(decoder).items():
        if name not in ("_cos_sin", "_ops"):
            visit(value)
    return sum(found.values())


def test_the_default_of_a_cpu() -> None:
    assert make_plan(DEMO_MODEL).pool_tokens == 65_536
    engine = Engine.load(DEMO_MODEL, EngineConfig(device="cpu"))
    assert engine.num_blocks == make_plan(DEMO_MODEL).num_blocks
    assert check_pool(DEMO_MODEL, engine)


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({}, 25),
        ({"dtype": "bfloat16"}, 51),
        ({"max_tokens_in_paged_kv_cache": 40}, 10),
    ],
)
def test_a_gpu_gets_the_pool_that_is_planned_for_what_is_free(
    settings: dict[str, Any], num_blocks: int
) -> None:
    """The bytes are measured, the rest is worked out by the plan alone."""
    engine = measured_engine(tokens_per_block=4, kv_cache_free_gpu_mem_fraction=0.7, **settings)
    assert engine.free_bytes == FREE_BYTES - STEP_BYTES
    assert engine.num_blocks == num_blocks
    assert check_pool(DEMO_MODEL, engine)
    engine._pool.num_blocks -= 1
    with pytest.raises(AssertionError, match=f"and the plan says {engine.num_blocks + 1}"):
        check_pool(DEMO_MODEL, engine)


def test_a_scarce_gpu_serves_with_less_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = measured_engine(max_tokens_in_paged_kv_cache=32_000)
    assert engine.num_blocks < 1000
    assert not check_pool(DEMO_MODEL, engine)
    assert f"KV pool: {engine.num_blocks} blocks of 32 tokens" in caplog.text
    assert "1000 blocks were planned for" in caplog.text
    engine._pool.num_blocks += 1
    with pytest.raises(AssertionError, match="the plan says"):
        check_pool(DEMO_MODEL, engine)


def test_a_cpu_with_little_memory_stays_below_the_plan_too() -> None:
    engine = Engine.load(DEMO_MODEL, EngineConfig(device="cpu"))
    engine._pool.num_blocks -= 1
    assert not check_pool(DEMO_MODEL, engine)


def test_a_server_whose_pool_is_not_the_plan_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real way to start, with a plan that has drifted from the engine."""
    monkeypatch.setattr(memory_plan, "_CPU_DEFAULT_TOKENS", 640)
    with pytest.raises(AssertionError, match="has 2048 blocks and the plan says 20"):
        load_engine(DEMO_MODEL, TrtGptModelOptionalParams(device="cpu"))


def test_a_gpu_gets_a_share_of_what_is_left() -> None:
    made = make_plan(DEMO_MODEL, PlanSettings(gpu_memory=8 * GIB, fraction=0.5))
    taken = made.weight_bytes + made.table_bytes + made.slot_bytes + made.step_bytes
    assert made.free_bytes == 8 * GIB - taken - GIB // 2
    assert made.pool_bytes <= made.free_bytes * 0.5 < made.pool_bytes + made.block_bytes
    both = make_plan(DEMO_MODEL, PlanSettings(gpu_memory=8 * GIB, max_tokens=100))
    assert both.num_blocks == 3
    with pytest.raises(ConfigurationError, match=r"step do not fit: .* GiB of GPU memory are"):
        make_plan(DEMO_MODEL, PlanSettings(gpu_memory=GIB // 2))
    with pytest.raises(ConfigurationError, match="not even one block fits"):
        make_plan(DEMO_MODEL, PlanSettings(max_tokens=31))


def small_plan() -> MemoryPlan:
    return make_plan(DEMO_MODEL, PlanSettings(max_tokens=32 * 100, max_batch_size=64))


@pytest.mark.parametrize(("prompt_len", "max_new"), [(1, 1), (40, 30), (90, 200), (31, 33)])
def test_the_guaranteed_number_is_the_schedulers(prompt_len: int, max_new: int) -> None:
    """That many start at once, and one more would not."""
    made = small_plan()
    blocks = BlockManager(made.num_blocks, made.tokens_per_block)
    scheduler = make_scheduler(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, blocks, max_batch_size=made.max_batch_size
    )
    requests = [LlmRequest(i, [0] * prompt_len, max_new) for i in range(200)]
    context, _, _ = scheduler.schedule_request(requests, ())
    row = concurrency(made, prompt_len, max_new)
    assert len(context) == row.guaranteed
    assert row.blocks_at_completion == blocks.get_blocks_at_completion(requests[0])
    assert row.staggered >= row.guaranteed


def test_staggered_requests_hold_the_mean_of_their_blocks() -> None:
    """64 tokens of prompt and 64 more: 2 blocks once, 3 for 32 steps, 4 for 31."""
    row = concurrency(small_plan(), 64, 64)
    assert row.staggered == min(64, int(100 / ((2 + 32 * 3 + 31 * 4) / 64)))


def test_a_request_too_long_for_the_pool_runs_not_once() -> None:
    row = concurrency(small_plan(), 3200, 100)
    assert (row.guaranteed, row.staggered) == (0, 0)


def test_shapes_reach_the_longest_request() -> None:
    assert usual_shapes(4096) == [(205, 51), (820, 204), (3277, 819)]
    assert usual_shapes(2) == [(1, 1)]
    for length in (2, 3, 100, 256, 257, 131072):
        assert sum(usual_shapes(length)[-1]) == length


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['safetensors'] = None\n"
        "from pathlib import Path; from inflight_backend.engine.memory_plan import make_plan\n"
        f"print(make_plan(Path({str(DEMO_MODEL)!r})).num_blocks)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2048\n"), done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("head_dim", [8, 16, 48, 272])
@pytest.mark.parametrize("intermediate_size", [64, 72])
def test_fp8_is_refused_where_the_server_refuses_it(
    device: str, head_dim: int, intermediate_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server needs torch to say so, and a GPU, which is claimed here."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    model = ModelConfig.from_folder(DEMO_MODEL)
    model = replace(
        model, head_dim=head_dim, intermediate_size=intermediate_size, num_heads=4, num_kv_heads=1
    )
    refused = []
    for dtype, *fp8 in product(["bfloat16", "float16"], ["none", "fp8"], ["auto", "fp8"]):
        settings = {"dtype": dtype, "quantization": fp8[0], "kv_cache_dtype": fp8[1]}
        gpu_memory = GIB if device == "cuda" else None
        ours, theirs = (
            refusal(check_limits, model, PlanSettings(gpu_memory=gpu_memory, **settings)),  # type: ignore[arg-type]
            refusal(resolve, EngineConfig(device=device, **settings), model),  # type: ignore[arg-type]
        )
        assert bool(ours) == bool(theirs), (settings, ours, theirs)
        refused.append(bool(ours))
    assert any(refused)
    assert not all(refused)


def refusal(check: Callable[..., object], *arguments: object) -> str:
    """What a `ConfigurationError` says; empty without one."""
    try:
        check(*arguments)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shape", [(1, 1), (40, 30), (31, 33), (64, 64), (63, 2), (7, 200)])
def test_the_mean_is_that_of_all_steps(shape: tuple[int, int]) -> None:
    prompt_len, max_new = shape
    held = [-(-(prompt_len + k) // 32) for k in range(max_new)]
    made = replace(small_plan(), num_blocks=1000, max_batch_size=10**6)
    assert concurrency(made, *shape).staggered == int(1000 / (sum(held) / max_new))


def test_a_model_of_very_many_positions_is_planned_at_once() -> None:
    row = concurrency(small_plan(), 4 * 10**11, 10**11)
    assert (row.guaranteed, row.staggered) == (0, 0)


def damaged(content: bytes) -> list[tuple[bytes, str]]:
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    wrong = {**header, name: {**header[name], "shape": [-1]}}
    text = json.dumps(wrong).encode()
    return [
        (b"", "not a whole safetensors file"),
        (content[:5], "not a whole safetensors file"),
        (struct.pack("<Q", 2**63) + content[8:], "not a whole safetensors file"),
        (content[:-1], "is not whole"),
        (struct.pack("<Q", 2) + b"[]", "the header is damaged"),
        (b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS"),
        (struct.pack("<Q", 4) + b"\xff\xff{]" + content, "the header is damaged"),
        (struct.pack("<Q", len(text)) + text + content, f"the header of '{name}' is damaged"),
    ]


@pytest.mark.case(102)
def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    content = (DEMO_MODEL / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    for number, (bad, message) in enumerate(damaged(content)):
        (tmp_path / "model.safetensors").write_bytes(bad)
        with pytest.raises(CheckpointError, match=message):
            read_weight_headers(tmp_path)
        assert run(plan, tmp_path).exit_code == 1, number


def test_tensors_that_are_not_the_model_s(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, num_shards=2)
    config = json.loads((folder / "config.json").read_text())
    for key, value, message in (
        ("vocab_size", 7, r"embed_tokens.weight has shape \[199, 48\]"),
        ("num_hidden_layers", 1, "9 unused tensors: model.layers.1"),
        ("num_hidden_layers", 3, "9 missing tensors: model.layers.2"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(CheckpointError, match=message):
            make_plan(folder)


def test_a_plan_reads_the_files_that_a_server_reads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, num_shards=2)
    planned = make_plan(folder)
    shutil.copy(next(folder.glob("model-*.safetensors")), folder / "consolidated.safetensors")
    assert make_plan(folder) == planned
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json, only cons"):
        make_plan(folder)


def test_a_type_that_no_server_loads_is_refused_in_its_words(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    weights = folder / "model.safetensors"
    save_file({name: each.to(torch.float64) for name, each in load_file(weights).items()}, weights)
    message = r"model.safetensors: .* is F64, supported are F32, F16, BF16"
    with pytest.raises(CheckpointError, match=message):
        Engine.load(folder, EngineConfig(device="cpu"))
    with pytest.raises(CheckpointError, match=message):
        make_plan(folder)
