"""The engine on the Triton kernels (interpreted here), eager and replayed, against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import VOCAB_SIZE, oracle_logits, oracle_tokens
from support.engine_driver import EngineDriver, Job
from support.graph_replay import Rerun
from torch.utils._python_dispatch import TorchDispatchMode

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.slot_table import SlotTable
from inflight_scheduler import SamplingParams

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = EngineConfig(
    device=DEVICE,
    dtype="float32",
    max_batch_size=3,
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=256,
    attention_backend="triton",
    cuda_graph_mode=False,
    cuda_graph_mixed_tokens=0,  # test_mixed_steps.py
)
# Biased multi-query llama, head norms, a window on one layer only.
VARIANTS = ("llama3-biased-gqa8", "qwen3", "qwen2-window")
Folder = Callable[..., Path]


def make_prompts() -> list[list[int]]:
    """One token, one block and a bit, several blocks."""
    numbers = random.Random(3)
    return [[numbers.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 6, 9)]


@pytest.fixture
def folder(checkpoint: Folder) -> Callable[[str], Path]:
    """Checkpoints whose heads the kernels take, and whose widths FP8 products take on a GPU."""
    return lambda variant: checkpoint(variant, head_dim=16, intermediate_size=64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_transformers(variant: str, folder: Callable[[str], Path]) -> None:
    prompts = make_prompts()
    expected = [oracle_tokens(folder(variant), prompt, 4) for prompt in prompts]
    driver = EngineDriver(Engine.load(folder(variant), CONFIG))
    # The short prompts generate while the long one is still read.
    assert driver.generate([Job(prompt) for prompt in prompts], 4, chunk_size=5) == expected


def test_drafts_change_no_token(folder: Callable[[str], Path]) -> None:
    """Runs of several tokens over a border of blocks, beside a context and a plain step; steps
    that are replayed go on where they end."""
    checkpoint = folder("qwen2-window")
    prompts = make_prompts()
    expected = [oracle_tokens(checkpoint, prompt, 6) for prompt in prompts]
    driver = EngineDriver(load_recorded(checkpoint)[0])
    first, second, third = jobs = [Job(prompt) for prompt in prompts]
    driver.step({first: 0, second: 0}, (), {second: [*expected[1][:3], 0, 0]})
    driver.step({third: 0}, [second, first], {first: expected[0][1:5], third: [0, 0]})
    assert (len(first.generated), len(second.generated)) == (6, 5)
    driver.step({}, [second, third])
    for job, answer in zip(jobs, expected, strict=True):
        assert job.generated == answer[: len(job.generated)]


def load_recorded(checkpoint: Path) -> tuple[Engine, Rerun | None]:
    """An engine that replays: CUDA graphs on a GPU, else what stands for them."""
    capture = None if DEVICE == "cuda" else Rerun()
    config = replace(CONFIG, cuda_graph_mode=True)
    engine = Engine.load(checkpoint, config, capture=capture)
    assert engine.num_graphs == 3
    return engine, capture


@contextmanager
def host_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While a recorded step runs, reading the host's mirror of the slots is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("a recorded step must not read what only the host knows")

    with monkeypatch.context() as patch:
        patch.setattr(SlotTable, "_advance", refuse)
        patch.setattr(SlotTable, "_sampling_flags", refuse)
        yield


def test_replayed_steps_equal_eager_ones(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = folder("qwen2-window")
    prompts = make_prompts()
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=1.3, top_p=0.9, seed=-5),
        SamplingParams(temperature=0.8, top_k=7, seed=11),
    ]
    eager = [Job(*both) for both in zip(prompts, kinds, strict=True)]
    EngineDriver(Engine.load(checkpoint, CONFIG)).generate(eager, 4)
    engine, capture = load_recorded(checkpoint)
    assert capture is None or capture.sizes == [3, 3, 2, 2, 1, 1]
    replayed = [Job(*both) for both in zip(prompts, kinds, strict=True)]
    driver = EngineDriver(engine, seed=9)
    driver.step(dict.fromkeys(replayed, 0))
    with host_knows_nothing(monkeypatch):
        driver.generate(replayed, 2)
        driver.generate(replayed[1:], 1)  # fewer rows than slots: the padding slot fills up
        driver.generate(replayed[:1], 1)
    assert capture is None or capture.num_replays == 8
    assert [job.generated for job in replayed] == [job.generated for job in eager]
    # Eager and replayed steps hand over to each other in both directions.
    eager_again = Job(prompts[0])
    driver.release(replayed[1])
    driver.step({eager_again: 0}, replayed[::2])
    assert eager_again.generated == eager[0].generated[:1]
    driver.generate([eager_again], 2)
    assert eager_again.generated == eager[0].generated[:3]


def test_a_replayed_step_keeps_the_end_back(folder: Callable[[str], Path]) -> None:
    engine, capture = load_recorded(folder("qwen3"))
    prompt = make_prompts()[1]
    free = Job(prompt)
    EngineDriver(engine).generate([free], 3)
    end_id = free.generated[2]
    forbidden = Job(prompt, end_id=end_id, min_end_position=len(prompt) + 3)
    allowed = Job(prompt, end_id=end_id, min_end_position=len(prompt) + 2)
    EngineDriver(engine).generate([forbidden, allowed], 4)
    # Where an end must wait the draw is not a recorded one: of the first two steps of this.
    assert capture is None or capture.num_replays == 4 + 2 + 2
    assert allowed.generated[:3] == free.generated
    assert forbidden.generated[:2] == free.generated[:2]
    assert forbidden.generated[2] != end_id


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of what a GPU would launch: every operation but views and new memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_few_small_launches_prepare_a_recorded_step(folder: Callable[[str], Path]) -> None:
    """Each takes a microsecond or two of every step, whose floor at batch 1 is two milliseconds."""
    engine = Engine.load(folder("qwen3"), CONFIG)
    slots = engine._buffer.padded_slots
    with torch.inference_mode(), Launches() as before:
        engine._slots.begin_generation(slots)
    assert len(before.names) <= 14, before.names
    with torch.inference_mode(), Launches() as behind:
        engine._slots.sampling(slots.long(), may_forbid_end=False)
    assert len(behind.names) <= 3, behind.names


def test_a_recording_that_fails_leaves_the_eager_path(
    folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> tuple[Callable[[], None], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    config = replace(CONFIG, cuda_graph_mode=True)
    engine = Engine.load(folder("qwen3"), config, capture=fail)
    assert "run eagerly" in caplog.text
    prompt = make_prompts()[1]
    assert EngineDriver(engine).generate([Job(prompt)], 2) == [
        oracle_tokens(folder("qwen3"), prompt, 2)
    ]


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"kv_cache_dtype": "fp8"}, 0.1),
        ({"quantization": "fp8", "dtype": "bfloat16"}, 0.25),
        ({"quantization": "fp8", "dtype": "bfloat16", "attention_backend": "torch"}, 0.25),
    ],
)
def test_fp8_is_close_to_transformers(
    folder: Callable[[str], Path], settings: dict[str, str], share: float
) -> None:
    """The chosen token's true logit is near the best one, measured by the spread of all."""
    checkpoint = folder("qwen3")
    engine = Engine.load(checkpoint, replace(CONFIG, **settings))  # type: ignore[arg-type]
    assert "fp8" in engine.dtype_name
    for prompt in make_prompts():
        job = Job(prompt)
        EngineDriver(engine).generate([job], 2)
        for count, token in enumerate(job.generated):
            logits = oracle_logits(checkpoint, prompt + job.generated[:count])
            assert logits.max() - logits[token] < share * (logits.max() - logits.min())


def test_a_step_with_features_replays_the_decoder_alone(folder: Callable[[str], Path]) -> None:
    """Draws of requests with penalties, bans and min-p are not recorded; the rest still is."""
    checkpoint, prompt = folder("qwen3"), make_prompts()[1]
    plain = SamplingParams(temperature=1.3, top_p=0.9, seed=4)
    special = replace(
        plain,
        min_p=0.02,
        repetition_penalty=1.5,
        no_repeat_ngram_size=2,
        bias=((3, 1.5),),
        bad_words=((5,), (prompt[-1], 9)),
        top_p_decay=0.9,
    )
    eager = [Job(prompt, special), Job(prompt, plain)]
    EngineDriver(Engine.load(checkpoint, CONFIG)).generate(eager, 3)
    engine, capture = load_recorded(checkpoint)
    replayed = [Job(prompt, special), Job(prompt, plain)]
    driver = EngineDriver(engine, seed=9)
    driver.generate(replayed, 2)
    assert capture is None or capture.num_replays == 1
    driver.generate(replayed[:1], 1)
    driver.generate(replayed[1:], 1)
    assert capture is None or capture.num_replays == 4  # one decoder, then decoder and draw
    assert [job.generated for job in replayed] == [job.generated for job in eager]
