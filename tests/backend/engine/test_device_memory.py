"""The KV pool of a GPU: what loading and the largest step leave; the step is really run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import oracle_tokens
from support.engine_driver import EngineDriver, Job
from torch import Tensor

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine import engine as engine_module
from inflight_backend.engine.config import resolve
from inflight_backend.engine.cuda_graphs import Capture
from inflight_backend.engine.warmup import max_memory_batch
from inflight_backend.errors import ConfigurationError
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.weights import Checkpoint

CONFIG = EngineConfig(
    device="cpu", max_batch_size=4, max_num_tokens=50, max_seq_len=40, tokens_per_block=4
)
STEP_BYTES, FREE_BYTES = 10_000, 200_000


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


class RecordedMemory(CountedMemory):
    """GraphCache, too, keep some of it, as long as somebody keeps them; a `Capture`."""

    num_bytes = 1000

    def __init__(self) -> None:
        super().__init__()
        self.num_made = self.num_kept = 0

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        answer = call()
        self.num_made += 1
        self.num_kept += 1

        def replay() -> None:
            raise AssertionError("nothing is replayed here")

        weakref.finalize(replay, self._forget)
        return replay, answer

    def _forget(self) -> None:
        self.num_kept -= 1

    def free_bytes(self) -> int:
        return super().free_bytes() - self.num_bytes * self.num_kept


@torch.inference_mode()
def make_engine(
    folder: Path,
    memory: CountedMemory,
    config: EngineConfig = CONFIG,
    capture: Capture | None = None,
) -> Engine:
    model_config = ModelConfig.from_folder(folder)
    config = resolve(config, model_config)
    with Checkpoint(folder) as checkpoint:
        parameters = checkpoint.load(
            decoder_parameters(model_config), config.torch_dtype, config.device, None
        )
    return Engine(config, model_config, parameters, capture, memory)


def test_the_pool_is_a_share_of_what_the_largest_step_leaves(
    checkpoint: Callable[..., Path],
) -> None:
    memory = CountedMemory()
    folder = checkpoint()
    engine = make_engine(folder, memory)
    assert memory.calls == ["start", "peak", "free"], "what the step needs is not free"
    model = engine.model_config
    block_bytes = 2 * model.num_layers * model.kv_size * 4 * CONFIG.tokens_per_block
    assert engine.num_blocks == int((FREE_BYTES - STEP_BYTES) * 0.9) // block_bytes
    prompt = [3, 1, 4, 1, 5]  # nothing is left of the step that was measured
    answer = EngineDriver(engine).generate([Job(prompt)], 6, 0)
    assert answer == [oracle_tokens(folder, prompt, 6)]


RECORDED = replace(
    CONFIG, max_batch_size=2, max_num_tokens=8, max_seq_len=8, attention_backend="triton"
)


@pytest.mark.slow
def test_what_recordings_keep_is_not_the_pools(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sizes of generations, a decoder and a draw each, and one of mixed steps; on a tiny pool
    first, where they are forgotten again."""
    monkeypatch.setattr(engine_module, "warm_up", Engine.enqueue)  # interpreted
    memory = RecordedMemory()
    folder = checkpoint(head_dim=16, num_hidden_layers=1)
    engine = make_engine(folder, memory, RECORDED, memory)
    assert (memory.num_made, memory.num_kept) == (10, 5)
    block_bytes = 2 * engine.model_config.kv_size * 4 * RECORDED.tokens_per_block
    expected = int((FREE_BYTES - STEP_BYTES - 5 * memory.num_bytes) * 0.9) // block_bytes
    assert engine.num_blocks == expected
    assert expected < int((FREE_BYTES - STEP_BYTES) * 0.9) // block_bytes


@pytest.mark.parametrize("num_good", [0, 4])
def test_what_failed_beside_the_tiny_pool_is_not_tried_again(
    checkpoint: Callable[..., Path],
    num_good: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_module, "warm_up", Engine.enqueue)
    memory, num_failed = RecordedMemory(), 0

    def capture(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        nonlocal num_failed
        if memory.num_kept < num_good:
            return memory(call)
        num_failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory")

    folder = checkpoint(head_dim=16, num_hidden_layers=1)
    engine = make_engine(folder, memory, RECORDED, capture)
    assert (engine.num_graphs, engine.num_mixed_graphs) == (num_good // 2, 0)
    assert num_failed == 1
    assert caplog.text.count("cannot be recorded") == 1


def test_the_largest_batch_fills_an_iteration() -> None:
    batch = max_memory_batch(CONFIG)
    assert [len(chunk.tokens) for chunk in batch.context_chunks] == [12] * 4
    assert batch.num_tokens <= 50
    assert all(chunk.is_last for chunk in batch.context_chunks), "all of them draw"


def test_no_room_beside_the_largest_step_is_said_so(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigurationError, match="the KV pool has room for 0 tokens"):
        make_engine(checkpoint(), CountedMemory(step_bytes=2 * FREE_BYTES))


def test_a_step_that_does_not_fit_names_the_setting(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "enqueue", run_out)
    with pytest.raises(ConfigurationError, match="max_num_tokens = 50 tokens does not fit"):
        make_engine(checkpoint(), CountedMemory())
