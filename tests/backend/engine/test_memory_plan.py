"""The plan of the memory against the engine that takes it."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import VARIANTS, oracle_tokens
from support.engine_driver import EngineDriver, Job
from support.families import write_family
from torch.utils._python_dispatch import TorchDispatchMode

from inflight_backend.engine import Engine, EngineConfig, memory_plan
from inflight_backend.engine.config import resolve
from inflight_backend.engine.cuda_graphs import Capture
from inflight_backend.engine.memory_plan import (
    GIB,
    MemoryPlan,
    choose_num_blocks,
    concurrency,
    make_plan,
    usual_shapes,
)
from inflight_backend.errors import ConfigurationError
from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.families.registry import read_family, read_model
from inflight_backend.models.layers import Parameter, parameter_tensors
from inflight_backend.models.ops import TORCH_OPS
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.weights import Checkpoint
from inflight_scheduler import BlockManager, CapacitySchedulerPolicy, LlmRequest, make_scheduler
from inflight_server.serve.settings import DEMO_MODEL

Folder = Callable[..., Path]
CONFIG = EngineConfig(device="cpu", tokens_per_block=8, max_tokens_in_paged_kv_cache=1000)


def check_sizes(folder: Path, config: EngineConfig) -> MemoryPlan:
    """Parameters, tables, slots and pool of the plan against those of an engine, byte by byte."""
    made, engine = make_plan(folder, config), Engine.load(folder, config)
    model = engine.model_config
    states = [each for index in model.deltas for each in engine._states.layer(index)]
    num_state_bytes = sum(each.nbytes for each in states)
    assert num_state_bytes == memory_plan.state_bytes(engine.config, model)
    owners = [vars(engine._slots), {"device": engine._buffer._buffer.device}]
    slots = [each for owner in owners for each in owner.values() if hasattr(each, "data_ptr")]
    assert made.slot_bytes == sum(each.nbytes for each in slots) + num_state_bytes
    assert engine.num_blocks == made.num_blocks
    assert engine.num_snapshots == made.num_snapshots
    assert sum(each.nbytes for each in engine._pool._tensors) == made.pool_bytes
    assert sum(each.nbytes for each in engine._tables.values()) == made.table_bytes
    tensors: list[torch.Tensor] = []
    for parameter in load_parameters(folder, engine.config).values():
        tensors += parameter_tensors(parameter)
    assert sum(each.nbytes for each in tensors) == made.weight_bytes
    return made


def load_parameters(folder: Path, config: EngineConfig) -> dict[str, Parameter]:
    """What an engine of the resolved ``config`` takes over."""
    specs = decoder_parameters(read_model(folder))
    with Checkpoint(folder) as opened:
        return opened.load(
            specs, config.torch_dtype, config.device, quantization=config.quantization
        )


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.case(115)
def test_the_plan_is_what_the_engine_takes(checkpoint: Folder, variant: str) -> None:
    folder = checkpoint(variant, num_shards=3)
    made = check_sizes(folder, replace(CONFIG, dtype="float16", max_seq_len=128))
    assert (made.num_blocks, made.pool_tokens) == (125 * len(made.windows), 1000)
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert made.file_bytes is not None
    assert made.file_bytes < files < made.file_bytes + 100_000  # the headers


@pytest.mark.fast(1)
@pytest.mark.parametrize("family", ["gemma4-e2b", "qwen3_next", "deepseek_v3", "gpt_oss", "olmo3"])
def test_the_plan_of_layers_that_differ(tmp_path: Path, family: str) -> None:
    """Heads of two sizes, caches of other layers, latents that are keys and values, two ropes,
    float32 beside float16."""
    write_family(tmp_path, family)
    check_sizes(tmp_path, replace(CONFIG, dtype="float16", max_seq_len=128))


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_fp8_weights_take_what_the_plan_says(checkpoint: Folder, quantization: str) -> None:
    folder = checkpoint("qwen2-tied", head_dim=16, intermediate_size=64)
    check_sizes(folder, replace(CONFIG, dtype="float16", quantization=quantization))


def test_an_fp8_pool_takes_what_the_plan_of_a_gpu_says(checkpoint: Folder) -> None:
    folder = checkpoint("qwen2-tied", head_dim=16, intermediate_size=64)
    config = replace(CONFIG, kv_cache_dtype="fp8", attention_backend="triton")
    engine, made = Engine.load(folder, config), make_plan(folder, config, gpu_memory=GIB)
    pool = [each for index in range(2) for each in engine._pool.layer(index)]
    assert sum(each.nbytes for each in pool) == made.pool_bytes


def test_what_slots_take_is_in_the_plan() -> None:
    """A GPU's has the tables of the adjustments, too."""
    config = EngineConfig(device="cpu", max_batch_size=7, max_num_tokens=300, max_seq_len=100)
    on_cpu, on_gpu = check_sizes(DEMO_MODEL, config), make_plan(DEMO_MODEL, config, gpu_memory=GIB)
    vocab_size = read_model(DEMO_MODEL).vocab_size
    assert on_gpu.slot_bytes - on_cpu.slot_bytes == 8 * (8 * vocab_size + 912)


@pytest.mark.parametrize(("hidden", "intermediate"), [(4096, 14_336), (5120, 13_824), (896, 4864)])
def test_the_largest_step_is_in_the_plan(hidden: int, intermediate: int) -> None:
    """The most that lives at once in `Decoder.forward`, on a device without memory; ops give what
    those of a GPU do, without what plain torch makes between."""
    reader = JsonReader.from_file(DEMO_MODEL / "config.json").with_values(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=hidden // 128,
        num_key_value_heads=1,
        head_dim=128,
        num_hidden_layers=2,
    )
    model = read_family(reader)
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
        decoder = Decoder(model, parameters, ops, dtype=torch.bfloat16)
        shape = (num_tokens, hidden // 128, 128)
        attention = SimpleNamespace(attend=lambda *_: torch.empty(shape))
        tokens, rows = torch.empty(num_tokens, dtype=torch.int64), torch.empty(256).long()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with _LiveBytes() as live:
                decoder.forward(tokens, tokens, attention, rows)
        finally:
            torch.set_default_dtype(torch.float32)
    planned = memory_plan._step_bytes(model, num_tokens, 0, 2)
    assert 0.97 * planned < live.peak <= planned * 1.01


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operations make, as long as it is referenced."""

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


STEP_BYTES, FREE_BYTES = 10_000, 200_000
GPU = EngineConfig(device="cpu", max_batch_size=4, max_num_tokens=50, tokens_per_block=4)


class CountedMemory:
    """A device of which so much is free, and whose steps take so much."""

    def __init__(self, step_bytes: int = STEP_BYTES) -> None:
        self.step_bytes = step_bytes
        self.calls: list[str] = []

    def free_bytes(self) -> int:
        self.calls.append("free")
        return FREE_BYTES

    def start_peak(self) -> None:
        self.calls.append("start")

    def peak_bytes(self) -> int:
        self.calls.append("peak")
        return self.step_bytes


@torch.inference_mode()
def make_engine(
    folder: Path,
    memory: CountedMemory,
    config: EngineConfig = GPU,
    capture: Capture | None = None,
) -> Engine:
    """As on a GPU with little room: what is free is what ``memory`` says."""
    model = read_model(folder)
    config = resolve(config, model)
    return Engine(config, model, load_parameters(folder, config), capture, memory)


@pytest.mark.parametrize(
    ("settings", "num_tokens"),
    [
        ({}, int((FREE_BYTES - STEP_BYTES) * 0.9) // 768),
        ({"dtype": "bfloat16"}, int((FREE_BYTES - STEP_BYTES) * 0.9) // 384),
        ({"kv_cache_free_gpu_mem_fraction": 0.5}, (FREE_BYTES - STEP_BYTES) // 2 // 768),
        ({"max_tokens_in_paged_kv_cache": 42}, 42),
    ],
)
def test_a_gpu_gets_a_share_of_what_the_largest_step_leaves(
    settings: dict[str, Any], num_tokens: int, checkpoint: Folder
) -> None:
    memory, folder = CountedMemory(), checkpoint()
    engine = make_engine(folder, memory, replace(GPU, **settings))
    assert memory.calls == ["start", "peak", "free"], "what the step needs is not free"
    assert engine.num_blocks == num_tokens // 4
    if engine.num_blocks > 30:  # nothing is left of the step that was measured
        prompt = [3, 1, 4, 1, 5]
        answer = EngineDriver(engine).generate([Job(prompt)], 6)
        assert engine.dtype_name == "bfloat16" or answer == [oracle_tokens(folder, prompt, 6)]


def test_a_scarce_gpu_serves_with_less_and_a_warning(
    checkpoint: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(
        checkpoint(), CountedMemory(), replace(GPU, max_tokens_in_paged_kv_cache=32_000)
    )
    assert engine.num_blocks < 8000
    assert f"KV pool: {engine.num_blocks} blocks of 4 tokens" in caplog.text
    assert "8000 blocks were planned for" in caplog.text


def test_no_room_beside_the_largest_step_is_refused(checkpoint: Folder) -> None:
    with pytest.raises(ConfigurationError, match="the KV pool has room for 0 tokens"):
        make_engine(checkpoint(), CountedMemory(step_bytes=2 * FREE_BYTES))


def test_a_step_that_does_not_fit_names_the_setting(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "enqueue", run_out)
    with pytest.raises(ConfigurationError, match="max_num_tokens = 50 tokens does not fit"):
        make_engine(checkpoint(), CountedMemory())


def test_blocks_of_a_cpu_pool() -> None:
    """65,536 tokens, or what is set, where the memory allows it."""
    config = EngineConfig(device="cpu")
    assert make_plan(DEMO_MODEL).num_blocks == choose_num_blocks(config, 1, None) == 2048
    assert Engine.load(DEMO_MODEL, config).num_blocks == 2048
    assert choose_num_blocks(config, 2**10, 2**20) == 2**10 // 32
    assert choose_num_blocks(replace(config, max_tokens_in_paged_kv_cache=100), 1, None) == 3
    with pytest.raises(ConfigurationError, match="room for 31 tokens and a block takes 32"):
        make_plan(DEMO_MODEL, replace(config, max_tokens_in_paged_kv_cache=31))


def test_a_planned_gpu_gets_a_share_of_what_is_left() -> None:
    config = EngineConfig(kv_cache_free_gpu_mem_fraction=0.5)
    made = make_plan(DEMO_MODEL, config, gpu_memory=8 * GIB)
    taken = made.weight_bytes + made.table_bytes + made.slot_bytes + made.step_bytes
    assert made.free_bytes == 8 * GIB - taken - GIB // 2
    assert made.pool_bytes <= made.free_bytes * 0.5 < made.pool_bytes + made.block_bytes
    config = replace(config, max_tokens_in_paged_kv_cache=100)
    assert make_plan(DEMO_MODEL, config, gpu_memory=8 * GIB).num_blocks == 3
    with pytest.raises(ConfigurationError, match=r"step do not fit: .* GiB of GPU memory are"):
        make_plan(DEMO_MODEL, gpu_memory=GIB // 2)


def test_a_plan_refuses_what_a_server_refuses() -> None:
    config = EngineConfig(max_batch_size=2048, max_beam_width=32)
    with pytest.raises(ConfigurationError, match="is 65536, more than the 65535 rows"):
        make_plan(DEMO_MODEL, config, gpu_memory=GIB)


def small_plan() -> MemoryPlan:
    config = EngineConfig(max_tokens_in_paged_kv_cache=32 * 100, max_batch_size=64)
    return make_plan(DEMO_MODEL, config)


@pytest.mark.parametrize("windows", [(None,), (None, 64, 64), (50,)])
@pytest.mark.parametrize(("prompt_len", "max_new"), [(1, 1), (40, 30), (90, 200), (31, 33)])
def test_the_guaranteed_number_is_the_schedulers(
    prompt_len: int, max_new: int, windows: tuple[int | None, ...]
) -> None:
    """That many start at once, and one more would not."""
    made = replace(small_plan(), windows=windows)
    blocks = BlockManager(
        made.num_blocks,
        made.tokens_per_block,
        windows=windows,
        max_chunk_tokens=made.max_num_tokens,
    )
    scheduler = make_scheduler(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, blocks, max_batch_size=made.max_batch_size
    )
    requests = [LlmRequest(i, [0] * prompt_len, max_new) for i in range(200)]
    context, _, _ = scheduler.schedule_request(requests, ())
    row = concurrency(made, prompt_len, max_new)
    assert len(context) == row.guaranteed
    assert row.blocks_at_completion == blocks.get_blocks_at_completion(requests[0])
    assert row.staggered >= row.guaranteed


@pytest.mark.parametrize("shape", [(1, 1), (40, 30), (31, 33), (64, 64), (63, 2), (7, 200)])
def test_staggered_requests_hold_the_mean_of_their_blocks(shape: tuple[int, int]) -> None:
    """Of a window of 50 up to three blocks of 32, of one of 2 up to two."""
    prompt_len, max_new = shape
    held = [-(-(prompt_len + k) // 32) for k in range(max_new)]
    made = replace(small_plan(), num_blocks=1000, max_batch_size=10**6)
    assert concurrency(made, *shape).staggered == int(1000 / (sum(held) / max_new))
    made = replace(made, windows=(None, 50, 2))
    held = [each + min(each, 3) + min(each, 2) for each in held]
    assert concurrency(made, *shape).staggered == int(1000 / (sum(held) / max_new))


def test_a_long_context_leaves_room_for_fewer_answers() -> None:
    """One request of 320 tokens and 32 new ones holds 11 + 3 blocks, and in its context, of
    chunks of 64, up to 5 in the group with a window, beside the 11 that are reserved."""
    made = replace(small_plan(), windows=(None, 50), max_num_tokens=64)
    assert concurrency(made, 320, 32).blocks_at_completion == 11 + 3
    assert concurrency(replace(made, num_blocks=16), 320, 32).guaranteed == 1
    assert concurrency(replace(made, num_blocks=15), 320, 32).guaranteed == 0
    assert concurrency(replace(made, num_blocks=30), 320, 32).guaranteed == 2


@pytest.mark.parametrize("shape", [(3200, 100), (4 * 10**11, 10**11)])
def test_a_request_too_long_for_the_pool_never_runs(shape: tuple[int, int]) -> None:
    row = concurrency(small_plan(), *shape)
    assert (row.guaranteed, row.staggered) == (0, 0)


def test_shapes_reach_the_longest_request() -> None:
    assert usual_shapes(4096) == [(205, 51), (820, 204), (3277, 819)]
    assert usual_shapes(2) == [(1, 1)]
    for length in (2, 3, 100, 256, 257, 131072):
        assert sum(usual_shapes(length)[-1]) == length


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from inflight_backend.engine.memory_plan import make_plan\n"
        f"print(make_plan(Path({str(DEMO_MODEL)!r})).num_blocks)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2048\n"), done.stderr


def test_pages_of_adapters(tmp_path: Path) -> None:
    """Those of a plan take what the table of an engine takes; places of tensors are rounded up."""
    write_family(tmp_path, "qwen2_moe")
    config = EngineConfig(
        device="cpu",
        attention_backend="triton",
        max_tokens_in_paged_kv_cache=64,
        enable_lora=True,
        lora_experts=True,
        lora_cache_pages=9,
    )
    engine = Engine.load(tmp_path, config)
    assert engine._adapters is not None
    table: Any = engine._adapters.table
    num_bytes = memory_plan.page_bytes(engine.config, engine.model_config) * 9
    assert num_bytes <= table._memory.nbytes + table._scales.nbytes < 1.02 * num_bytes
    made = make_plan(tmp_path, replace(config, attention_backend="auto"), gpu_memory=GIB)
    assert made.adapter_bytes == num_bytes
    without = make_plan(
        tmp_path, replace(config, attention_backend="auto", enable_lora=False), gpu_memory=GIB
    )
    assert made.free_bytes is not None
    assert without.free_bytes == made.free_bytes + num_bytes
    of_free = replace(config, attention_backend="auto", lora_cache_pages=None)
    shared = make_plan(tmp_path, of_free, gpu_memory=GIB)
    share = int((GIB - shared.weight_bytes) * of_free.lora_cache_gpu_memory_fraction)
    assert shared.adapter_bytes == share // (num_bytes // 9) * (num_bytes // 9) > 0
