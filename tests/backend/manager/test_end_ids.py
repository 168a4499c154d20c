"""Checkpoints that end texts with several tokens: every one of them ends the answer, as in
transformers, and is held back by a minimum of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.beam_cases import EARLY_STOPPING, PROMPT, Case
from support.checkpoints import (
    VOCAB_SIZE,
    load_oracle,
    oracle_logits,
    oracle_tokens,
)
from support.manager_harness import Recorder, request, serve, small_engine

from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording

PROMPTS = [[7 * i % VOCAB_SIZE, 3, *PROMPT[: 2 + i]] for i in range(6)]
NUM_NEW = 16
BEAMS = Case(3, 12, 9, 1.0, 2)


@pytest.fixture(scope="module")
def ends(folder: Path) -> list[int]:
    """Tokens that some of the answers come to, each early, and one that none does."""
    answers = [oracle_tokens(folder, prompt, NUM_NEW) for prompt in PROMPTS]
    found = list(dict.fromkeys(answer[2 + i] for i, answer in enumerate(answers[:4])))
    used = {token for answer in answers for token in answer}
    return [next(token for token in range(VOCAB_SIZE) if token not in used), *found]


@torch.inference_mode()
def oracle(folder: Path, prompt: list[int], ends: list[int], **settings: Any) -> list[list[int]]:
    """What transformers answers, without the ends."""
    found = load_oracle(folder).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=ends[0],
        **settings,
    )
    answers = []
    for row in found.tolist():
        answer = row[len(prompt) :]
        places = [place for place, token in enumerate(answer) if token in ends]
        answers.append(answer[: places[0]] if places else answer)
    return answers


def run(
    folder: Path, requests: list[InferenceRequest], overlap: OverlapScheduler, record_file: Path
) -> Recorder:
    """All of ``requests`` at once; the recording must replay."""
    engine = small_engine(folder, max_beam_width=4, attention_backend="torch")
    file = str(record_file)
    recorder = serve(
        requests, engine, max_beam_width=4, overlap_scheduler=overlap, record_file=file
    )
    with open_recording(record_file) as reader:
        assert replay(reader).divergence is None
    return recorder


@pytest.mark.parametrize("overlap", [OverlapScheduler.OFF, OverlapScheduler.ON])
@pytest.mark.parametrize("min_length", [0, 5])
def test_each_of_them_ends_the_answer_as_in_transformers(
    folder: Path, ends: list[int], min_length: int, overlap: OverlapScheduler, tmp_path: Path
) -> None:
    rules = {"min_new_tokens": min_length} if min_length else {}
    expected = [oracle(folder, p, ends, max_new_tokens=NUM_NEW, **rules)[0] for p in PROMPTS]
    alone = [oracle(folder, p, ends[:1], max_new_tokens=NUM_NEW, **rules)[0] for p in PROMPTS]
    assert sum(map(len, expected)) < sum(map(len, alone)), "the others matter"
    assert min(map(len, expected)) >= min_length
    if min_length:
        free = [oracle(folder, p, ends, max_new_tokens=NUM_NEW)[0] for p in PROMPTS]
        assert free != expected, "the minimum matters"
    requests = [
        request(
            i,
            prompt,
            NUM_NEW,
            end_id=ends[0],
            stop_token_ids=[ends[1:]],
            min_length=min_length,
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    requests.append(request(99, PROMPTS[0], NUM_NEW))  # beside them, without any end
    recorder = run(folder, requests, overlap, tmp_path / "recording")
    for i, answer in enumerate(expected):
        assert recorder.tokens(i) == answer, "without the end"
        reason = b"end_id" if len(answer) < NUM_NEW else b"length"
        assert recorder.last(i, "finish_reason") == reason
    assert recorder.tokens(99) == oracle_tokens(folder, PROMPTS[0], NUM_NEW)


def test_beams_end_with_each_of_them_as_in_transformers(
    folder: Path, ends: list[int], tmp_path: Path
) -> None:
    search = {
        "num_beams": BEAMS.width,
        "num_return_sequences": BEAMS.width,
        "max_new_tokens": BEAMS.num_new,
        "length_penalty": BEAMS.length_penalty,
        "early_stopping": EARLY_STOPPING[BEAMS.early_stopping],
    }
    free = oracle(folder, BEAMS.prompt, ends[:1], **search)
    some = [free[2][6], free[1][5], free[0][3]]
    # The likeliest tokens behind the prompt all end: with 2W of them known, no beam would go on.
    many = oracle_logits(folder, BEAMS.prompt).topk(2 * BEAMS.width).indices.tolist()
    requests, expected = [], []
    for number, some_ends in enumerate((some, many)):
        expected.append(oracle(folder, BEAMS.prompt, some_ends, **search))
        one = request(
            number,
            BEAMS.prompt,
            BEAMS.num_new,
            streaming=False,
            exclude_input_in_output=True,
            beam_width=BEAMS.width,
            len_penalty=BEAMS.length_penalty,
            end_id=some_ends[0],
            stop_token_ids=[some_ends[1:]],
        )
        one.set_tensor("early_stopping", np.array([[BEAMS.early_stopping]], dtype=np.int32))
        requests.append(one)
        first_alone = oracle(folder, BEAMS.prompt, some_ends[:1], **search)
        assert expected[-1] != first_alone, "the others matter"
    assert any(map(len, expected[1])), "some go on"
    recorder = run(folder, requests, OverlapScheduler.OFF, tmp_path / "recording")
    for number, answers in enumerate(expected):
        tensors = recorder.named_tensors[number][-1]
        rows = zip(tensors["output_ids"][0], tensors["sequence_length"][0], strict=True)
        assert [ids[:length].tolist() for ids, length in rows] == answers
