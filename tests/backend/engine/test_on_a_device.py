"""Engines on a device: equal tokens from recorded steps, on other threads, in a pool that is what
the device has left. (Tests marked `on_both_devices` in the other files run there as well.)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_driver import EngineDriver, Job
from support.fake_cuda import RESERVED_BYTES, FakeCuda
from support.manager_harness import Recorder, request, running
from torch import Tensor

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.memory_plan import max_words
from inflight_backend.engine.outputs import TokenReader
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.models.decoder import Decoder
from inflight_scheduler import OutputParams, SamplingParams

CPU = EngineConfig(
    device="cpu",
    max_batch_size=2,
    max_num_tokens=16,
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=256,
)
CUDA = replace(CPU, device="cuda")
PROMPTS = ([1, 2, 3, 4, 5], [7])
SAMPLINGS = (
    SamplingParams(temperature=1.3, top_p=0.9, seed=3),
    SamplingParams(
        repetition_penalty=1.5, no_repeat_ngram_size=2, bias=((3, 1.5),), bad_words=((5,), (3, 9))
    ),
)

on_the_device = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.fixture
def fake(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The fake, even where there is a GPU: without a kernel it does for that as well."""
    fake_cuda.install(monkeypatch)
    return fake_cuda


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    """One layer whose heads the kernels take: they are interpreted here."""
    return checkpoint(
        head_dim=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )


def generate(engine: Engine) -> tuple[list[list[int]], list[float]]:
    """Tokens of plain, then of all kinds of requests, and log probabilities of the latter; the last
    token is masked and the one before edited."""
    driver = EngineDriver(engine)
    plain = [Job(prompt) for prompt in PROMPTS]
    driver.generate(plain, 3)
    for job in plain:
        driver.release(job)
    wants = OutputParams(log_probs=True)
    jobs = [
        Job(prompt, sampling, outputs=wants)
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    log_probs = []
    driver.step(dict.fromkeys(jobs, 0))
    for step in range(4):
        if step == 2:
            engine.edit_next(lambda: [(0, partial(keep, 9))])
        if step == 3:
            engine.mask_next(lambda: np.array([[1, 11, *[0] * 7]], dtype=np.int32))
        driver.step({}, jobs)
        outputs = engine.take_outputs()
        assert outputs is not None
        for each in outputs.log_probs.values():
            log_probs += each
    assert jobs[0].generated[3] == 9
    assert jobs[1].generated[4] == 11
    return [job.generated for job in (*plain, *jobs)], log_probs


def keep(token: int, logits: Tensor, stream: int) -> None:
    """Only this token may be drawn."""
    logits[..., :token], logits[..., token + 1 :] = -torch.inf, -torch.inf


@pytest.mark.slow
@on_the_device
@pytest.mark.parametrize("normalize", [False, True])
def test_recorded_steps_draw_what_a_cpu_draws(folder: Path, device: str, normalize: bool) -> None:
    engine = Engine.load(folder, replace(CUDA, normalize_log_probs=normalize))
    assert engine.is_asynchronous
    assert (engine.num_graphs, engine.num_mixed_graphs) == (2, 1)
    assert "graphs" not in engine.device_name
    words = max_words(2, 16, engine.max_seq_len // CUDA.tokens_per_block)
    assert engine.memory_usage().pinned == 2 * (4 * words + 8 * 16)
    assert engine.memory_usage().cpu > 2**20
    tokens, log_probs = generate(engine)
    expected_tokens, expected_log_probs = generate(
        Engine.load(folder, replace(CPU, normalize_log_probs=normalize))
    )
    assert tokens == expected_tokens
    assert log_probs == pytest.approx(expected_log_probs, abs=1e-4)


@pytest.mark.slow
@on_the_device
@pytest.mark.parametrize("width", [1, 2])
def test_the_manager_gives_equal_answers(folder: Path, device: str, width: int) -> None:
    """Its loop is overlapped there, and the engine's owner is the manager's own thread."""
    answers = []
    for name in ("cpu", device):
        params = TrtGptModelOptionalParams(
            max_batch_size=2,
            max_num_tokens=16,
            kv_cache_config=KvCacheConfig(max_tokens=128, tokens_per_block=8),
            device=name,
        )
        more = {"beam_width": 2} if width == 2 else {"random_seed": 5, "runtime_top_k": 9}
        requests = [
            request(1, PROMPTS[0], 6, streaming=False, **more),
            request(2, PROMPTS[1], 4, streaming=False, return_log_probs=width == 1),
        ]
        recorder = Recorder(requests)
        with running(recorder, folder, params=params, max_beam_width=width) as manager:
            recorder.wait_for_finals(1, 2)
            assert manager.engine.is_asynchronous == (name == "cuda")
        answers.append(recorder.responses)
    assert answers[0] == answers[1]
    assert not any(error for sent in answers[0].values() for _, _, error in sent)


@pytest.mark.slow
@on_the_device
def test_the_thread_that_runs_steps_has_run_products_before_a_request(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS makes a handle and a workspace for a thread at its first product: not one of those
    that recordings hold."""
    engine = Engine.load(folder, CUDA)
    threads: list[str] = []
    forward = Decoder.forward

    def noted(*args: Any) -> Tensor:
        threads.append(threading.current_thread().name)
        return forward(*args)

    monkeypatch.setattr(Decoder, "forward", noted)
    params = TrtGptModelOptionalParams(max_batch_size=CUDA.max_batch_size)
    with running(Recorder(), engine, params=params):
        assert threads == ["GptManager"]
        assert engine.num_graphs > 0


def test_tokens_arrive_when_they_are_waited_for(fake: FakeCuda) -> None:
    def send(_: object) -> list[int]:
        pending = TokenReader(4, "cuda").send(torch.arange(3, device="cuda"))
        assert 1 not in pending._tokens.numpy(), "it has not arrived"
        return pending.read()

    assert fake.inside(send, is_step=False)(None) == [0, 1, 2]


def test_an_engine_without_recordings_says_so(folder: Path, fake: FakeCuda) -> None:
    engine = Engine.load(folder, replace(CUDA, attention_backend="torch"))
    assert engine.device_name == "Fake GPU, without CUDA graphs"
    assert engine.memory_usage().gpu == RESERVED_BYTES
