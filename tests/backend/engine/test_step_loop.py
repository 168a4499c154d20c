"""Both loops of the batch manager give the same answers, on the real engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import VOCAB_SIZE
from support.manager_harness import Recorder, request, running

from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_backend.requests.inference_request import InferenceRequest, NamedTensor
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_scheduler import CapacitySchedulerPolicy

Folder = Callable[..., Path]
NUM_REQUESTS = 12
# Words that a third of the requests must not say, must stop at, and how they are drawn.
MORE = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "bad_words_list": [[3, 5, 6], [1, 3, -1]],
    "stop_words_list": [[*range(20, 30)], [*range(1, 11)]],
    "return_log_probs": True,
}
BEGINNING = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5]  # of every prompt, so that blocks are reused


Responses = dict[int, list[tuple[list[int], bool, str]]]


class OutputRecorder(Recorder):
    """Keeps the log probabilities as well, [n] per response."""

    def __init__(self, requests: Sequence[InferenceRequest]) -> None:
        super().__init__(requests)
        self.log_probs: dict[int, list[Any]] = {}

    def send(
        self, request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str
    ) -> None:
        for tensor in tensors:
            if tensor.name == "output_log_probs":
                self.log_probs.setdefault(request_id, []).extend(tensor.tensor.reshape(-1))
        super().send(request_id, tensors, is_final, error)


def answers(
    folder: Path, policy: CapacitySchedulerPolicy, params: TrtGptModelOptionalParams
) -> tuple[Responses, dict[int, list[Any]]]:
    """What each request got, response by response, and the log probabilities."""
    dice = random.Random(5)
    requests = [
        request(
            number,
            BEGINNING + [dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(0, 20))],
            dice.randint(1, 24),
            end_id=dice.choice([-1, dice.randrange(VOCAB_SIZE)]),
            streaming=dice.random() < 0.7,
            exclude_input_in_output=True,
            **({"runtime_top_k": 20, "random_seed": number} if number % 2 else {}),
            **(MORE if number % 3 == 0 else {}),
        )
        for number in range(1, NUM_REQUESTS + 1)
    ]
    recorder = OutputRecorder(requests)
    with running(recorder, folder, policy, params=params) as manager:
        recorder.wait_for_finals(*range(1, NUM_REQUESTS + 1))
        assert manager.get_num_active_requests() == 0
    assert recorder.stats[-1]["Used KV cache blocks"] == 0
    num_pauses = sum(stats["Paused Requests"] for stats in recorder.stats)
    assert (num_pauses > 0) == (policy is CapacitySchedulerPolicy.MAX_UTILIZATION)
    return recorder.responses, recorder.log_probs


@pytest.mark.parametrize("enable_chunked_context", [False, True])
@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
def test_both_loops_give_the_same_answers_and_replay(
    policy: CapacitySchedulerPolicy,
    enable_chunked_context: bool,
    checkpoint: Folder,
    tmp_path: Path,
) -> None:
    params = TrtGptModelOptionalParams(
        max_batch_size=6,
        max_num_tokens=64,
        enable_chunked_context=enable_chunked_context,
        kv_cache_config=KvCacheConfig(max_tokens=128, tokens_per_block=8, enable_block_reuse=True),
        device="cpu",
    )
    given = []
    for choice in (OverlapScheduler.OFF, OverlapScheduler.ON):
        file = tmp_path / f"{choice.value}.jsonl"
        settings = replace(params, overlap_scheduler=choice, record_file=str(file))
        given.append(answers(checkpoint(), policy, settings))
        with open_recording(file) as reader:
            assert reader.settings.is_overlapped == (choice is OverlapScheduler.ON)
            assert replay(reader).divergence is None
    (plain, plain_log_probs), (overlapped, log_probs) = given
    assert plain == overlapped
    assert plain_log_probs.keys() == log_probs.keys()
    for request_id, numbers in plain_log_probs.items():
        assert np.allclose(numbers, log_probs[request_id], atol=1e-4)
    assert any(plain_log_probs.values())
