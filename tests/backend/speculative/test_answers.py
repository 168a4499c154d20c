"""Speculative decoding through the batch manager: the answers are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import VOCAB_SIZE, write_checkpoint
from support.manager_harness import GUARANTEED, MAX_UTILIZATION, Recorder, request, running

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.manager.parameters import KvCacheConfig
from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.speculative.drafter import SpeculativeDecodingConfig
from inflight_recorder.replay import replay
from inflight_recorder.storage import RecordingReader
from inflight_scheduler import CapacitySchedulerPolicy

NUM_NEW = 24
NGRAM = SpeculativeDecodingConfig("ngram", max_draft_len=5, max_matching_ngram_size=3)
ON, OFF = OverlapScheduler.ON, OverlapScheduler.OFF


def prompts() -> list[list[int]]:
    """Two that repeat themselves, three that do not; with lengths around borders of blocks."""
    dice = random.Random(11)
    unit = [dice.randrange(VOCAB_SIZE) for _ in range(5)]
    free = [[dice.randrange(VOCAB_SIZE) for _ in range(length)] for length in (3, 8, 17)]
    return [unit * 3, unit[1:] * 4 + unit, *free]


DRAWS: list[dict[str, Any]] = [
    {},
    {"runtime_top_k": 4, "temperature": 0.4, "random_seed": 3},
    {"runtime_top_p": 0.8, "temperature": 0.7, "random_seed": 4, "min_length": 9},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},  # gets no drafts
    {"stop_words_list": [[*range(20, 40)], [*range(1, 21)]]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    """8 requests, and blocks of 4 tokens for about three of them."""
    return Engine.load(
        folder,
        EngineConfig(
            device="cpu", max_batch_size=8, tokens_per_block=4, max_tokens_in_paged_kv_cache=128
        ),
    )


def make_requests(**values: Any) -> list[InferenceRequest]:
    """Every prompt with every way to draw; two thirds of them streaming."""
    pairs = [(prompt, draw) for prompt in prompts() for draw in DRAWS]
    return [
        request(
            number,
            prompt,
            NUM_NEW,
            streaming=number % 3 > 0,
            exclude_input_in_output=True,
            return_log_probs=True,
            return_perf_metrics=True,
            **draw,
            **values,
        )
        for number, (prompt, draw) in enumerate(pairs)
    ]


def run(
    engine: Any,
    requests: Sequence[InferenceRequest],
    config: SpeculativeDecodingConfig,
    policy: CapacitySchedulerPolicy = GUARANTEED,
    overlap: OverlapScheduler = OFF,
    **options: Any,
) -> Recorder:
    """Answer all, then replay what was recorded."""
    recorder = Recorder(requests)
    with running(
        recorder,
        engine,
        policy,
        max_batch_size=options.pop("max_batch_size", 8),
        kv_cache_config=KvCacheConfig(enable_block_reuse=options.pop("reuse", True)),
        speculative_decoding_config=config,
        overlap_scheduler=overlap,
        **options,
    ) as manager:
        recorder.wait_for_finals(*(each.request_id for each in requests))
        lines = manager.recording().result(timeout=30)
        result = replay(RecordingReader(BytesIO("".join(lines).encode()), "ring"))
    assert result.divergence is None, str(result)
    assert recorder.stats[-1]["Used KV cache blocks"] == 0
    errors = [error for sent in recorder.responses.values() for _, _, error in sent if error]
    assert not errors
    return recorder


@pytest.fixture(scope="module")
def plain(engine: Any) -> Recorder:
    """Without a draft and without shared blocks."""
    answers = run(engine, make_requests(), SpeculativeDecodingConfig(), reuse=False)
    assert answers.total("Reused KV cache blocks") == 0
    assert answers.total("Draft Tokens") == 0
    assert len({tuple(answers.tokens(i)) for i in answers.responses}) > 15
    return answers


def check_same(answers: Recorder, plain: Recorder) -> None:
    for number in plain.responses:
        assert answers.tokens(number) == plain.tokens(number)
        found = answers.joined(number, "output_log_probs")
        np.testing.assert_allclose(found, plain.joined(number, "output_log_probs"), atol=1e-4)


@pytest.mark.fast(2)
@pytest.mark.parametrize("overlap", [OFF, ON], ids=lambda each: each.value)
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION], ids=lambda each: each.name)
def test_looked_up_drafts_change_no_answer(
    policy: CapacitySchedulerPolicy, overlap: OverlapScheduler, engine: Any, plain: Recorder
) -> None:
    """As many at once as the cache holds, or too many: then drafts come and go with the crowd."""
    num_active = 3 if policy is GUARANTEED else 8
    answers = run(engine, make_requests(), NGRAM, policy, overlap, max_batch_size=num_active)
    check_same(answers, plain)
    assert answers.total("Reused KV cache blocks") > 0
    assert 0 < answers.total("Accepted Draft Tokens") < answers.total("Draft Tokens")
    has_paused = answers.total("Paused Requests") > 0
    assert has_paused == (policy is MAX_UTILIZATION)
    for number, draw in enumerate(DRAWS * 5):
        verified = answers.last(number, "total_draft_tokens")
        accepted = answers.last(number, "total_accepted_draft_tokens")
        assert accepted <= verified
        assert "repetition_penalty" not in draw or verified == 0
        rate = answers.last(number, "acceptance_rate")
        assert rate == pytest.approx(accepted / max(verified, 1))


def test_drafts_change_no_answer_with_the_kernels_of_a_gpu(tmp_path: Path) -> None:
    """They run in Triton's interpreter where there is no GPU."""
    shape: dict[str, Any] = {"head_dim": 16, "intermediate_size": 64, "num_hidden_layers": 1}
    folder = write_checkpoint(tmp_path / "model", **shape)
    found: list[Recorder] = []
    for backend in ("torch", "triton"):
        engine: Any = Engine.load(
            folder,
            EngineConfig(
                device="cpu",
                max_batch_size=2,
                tokens_per_block=4,
                max_tokens_in_paged_kv_cache=64,
                attention_backend=backend,
            ),
        )
        values = {"exclude_input_in_output": True, "return_log_probs": True}
        values["return_perf_metrics"] = True
        requests = [request(i, prompts()[2], 5, **values) for i in range(2)]
        for number in range(2) if found else ():  # 1 or 2 of 3 are right
            right = found[0].tokens(number)
            drafts = [*right[: number + 1], (right[number + 1] + 1) % VOCAB_SIZE, 0][:3]
            requests[number].set_tensor("draft_input_ids", np.array([drafts], dtype=np.int32))
        config = SpeculativeDecodingConfig(max_draft_len=3)
        found.append(run(engine, requests, config, max_batch_size=2))
    check_same(found[1], found[0])
    accepted = [found[1].last(i, "total_accepted_draft_tokens") for i in range(2)]
    assert accepted == [1, 2]


@pytest.mark.fast(3)
@pytest.mark.contract("tensorrt_llm input", "draft_input_ids")
@pytest.mark.parametrize("overlap", [OFF, ON], ids=lambda each: each.value)
@pytest.mark.parametrize("num_right", [0, 2, 6])
def test_the_drafts_of_a_client_change_no_answer(
    num_right: int, overlap: OverlapScheduler, engine: Any, plain: Recorder
) -> None:
    """Chunks of 3 tokens; one in three brings none."""
    requests = make_requests()
    for each in requests:
        right = plain.tokens(each.request_id)
        drafts = [*right[:num_right], *((token + 1) % VOCAB_SIZE for token in right[num_right:6])]
        if each.request_id % 3:
            each.set_tensor("draft_input_ids", np.array([drafts], dtype=np.int32))
    answers = run(
        engine,
        requests,
        SpeculativeDecodingConfig(max_draft_len=6),
        MAX_UTILIZATION if num_right else GUARANTEED,
        overlap,
        enable_chunked_context=True,
        context_chunk_unit=9,
    )
    check_same(answers, plain)
    verified = {i: answers.last(i, "total_draft_tokens") for i in plain.responses}
    accepted = {i: answers.last(i, "total_accepted_draft_tokens") for i in plain.responses}
    assert all(verified[i] == 0 for i in plain.responses if i % 3 == 0)
    assert max(accepted.values()) == num_right
    assert answers.total("Draft Tokens") == sum(verified.values()) > 0
    assert answers.total("Accepted Draft Tokens") == sum(accepted.values())
