"""Steps with drafts on the real engine: what counts of them is what plain steps would draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import VOCAB_SIZE
from support.engine_driver import EngineDriver, Job
from support.fake_cuda import on_both_devices

from inflight_backend.engine import Engine
from inflight_scheduler import OutputParams, SamplingParams

NUM_TOKENS = 12
SmallEngine = Callable[[str], Engine]
Folder = Callable[..., Path]


def make_jobs() -> list[Job]:
    """Three that draw differently, with prompts around a border of blocks (of 4 tokens)."""
    dice = random.Random(3)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.2, top_p=0.9, seed=7),
        SamplingParams(temperature=0.8, top_k=9, min_p=0.02, seed=8, bias=((3, 2.0),)),
    ]
    return [
        Job([dice.randrange(VOCAB_SIZE) for _ in range(length)], sampling)
        for length, sampling in zip((7, 8, 21), params, strict=True)
    ]


def plain(engine: Engine, jobs: Sequence[Job]) -> list[list[int]]:
    """What the same jobs get token by token."""
    copies = [replace(job, blocks=[], generated=[]) for job in jobs]
    return EngineDriver(engine).generate(copies, NUM_TOKENS)


def guess(answer: Sequence[int], num_known: int, num_right: int, num_wrong: int) -> list[int]:
    """The next ``num_right`` tokens of ``answer``, then as many others."""
    right = list(answer[num_known : num_known + num_right])
    behind = answer[num_known + num_right :]
    wrong = [(token + 1) % VOCAB_SIZE for token in behind[:num_wrong]]
    return right + wrong


@pytest.mark.parametrize("variant", ["llama-mha", "mistral-window", "qwen3"])
def test_right_and_wrong_drafts_change_no_token(variant: str, small_engine: SmallEngine) -> None:
    engine = small_engine(variant)
    jobs = make_jobs()
    answers = plain(engine, jobs)
    assert len({tuple(answer) for answer in answers}) == 3
    driver, dice = EngineDriver(engine, seed=1), random.Random(variant)
    chunks = {job: 0 for job in jobs}
    num_steps = 0
    while waiting := [job for job in jobs if len(job.generated) < NUM_TOKENS]:
        drafts = {}
        for job in waiting:
            answer, num_known = answers[jobs.index(job)], len(job.generated)
            num_left = NUM_TOKENS - num_known - 1
            num_right = dice.randint(0, min(5, num_left))
            num_wrong = dice.randint(0, min(2, num_left - num_right))
            drafts[job] = guess(answer, num_known, num_right, num_wrong)
        running = [job for job in waiting if job not in chunks]
        driver.step(chunks, running, drafts)
        chunks, num_steps = {}, num_steps + 1
    assert [job.generated for job in jobs] == answers
    assert num_steps < NUM_TOKENS, "some were right"


@on_both_devices
def test_drafts_take_turns_with_plain_steps_and_chunks(small_engine: SmallEngine) -> None:
    """A last chunk with drafts beside others; then plain steps of the same jobs, and a pause."""
    engine = small_engine("llama-mha")
    jobs = make_jobs()
    first, second, third = jobs
    answers = plain(engine, jobs)
    driver = EngineDriver(engine, seed=2)
    driver.step({first: 0, second: 3})
    driver.step({second: 0, third: 5}, [first], {second: guess(answers[1], 0, 3, 2)})
    assert len(second.generated) == 4
    driver.step({third: 9}, [second, first], {first: guess(answers[0], 2, 0, 3)})
    driver.step({third: 0}, [first, second], {third: guess(answers[2], 0, 2, 1)})
    driver.release(first)
    driver.step({first: 0}, [third], {first: guess(answers[0], 4, 4, 0)})
    for job in jobs:
        driver.generate([job], NUM_TOKENS - len(job.generated))
    assert [job.generated for job in jobs] == answers


@on_both_devices
def test_more_rows_than_requests_draw_part_by_part(small_engine: SmallEngine) -> None:
    engine = small_engine("llama-mha")
    jobs = make_jobs()
    answers = plain(engine, jobs)
    driver = EngineDriver(engine)
    assert engine.config.max_batch_size == 8
    drafts = {job: guess(answer, 0, 9, 1) for job, answer in zip(jobs, answers, strict=True)}
    driver.step({job: 0 for job in jobs}, (), drafts)
    assert [job.generated for job in jobs] == [answer[:10] for answer in answers]


def test_the_end_may_not_come_before_its_time(small_engine: SmallEngine) -> None:
    """The minimum length counts for the place of each row, not for that of the last one."""
    engine = small_engine("llama-mha")
    job = make_jobs()[0]
    (answer,) = plain(engine, [job])
    end_id, end = answer[3], len(job.prompt) + 4
    later = replace(job, end_id=end_id, min_end_position=end, blocks=[], generated=[])
    (expected,) = EngineDriver(engine).generate([replace(later, blocks=[], generated=[])], 8)
    assert expected[3] != end_id
    driver = EngineDriver(engine)
    driver.step({later: 0}, (), {later: [*answer[:4], 1, 1]})
    assert later.generated == expected[:4]


@on_both_devices
def test_every_row_brings_its_log_probability(small_engine: SmallEngine) -> None:
    engine = small_engine("llama-mha")
    job = make_jobs()[0]
    (answer,) = plain(engine, [job])
    sampling = replace(job.sampling)
    wants = OutputParams(log_probs=True, generation_logits=True)
    plainly = Job(job.prompt, sampling, outputs=wants)
    driver = EngineDriver(engine)
    expected = []
    for _ in range(4):
        driver.step({plainly: 0} if not plainly.generated else {}, [plainly][: plainly.has_drawn])
        outputs = engine.take_outputs()
        assert outputs is not None
        expected += outputs.log_probs[1]
    together = Job(job.prompt, sampling, outputs=wants)
    driver.step({together: 0}, (), {together: answer[:3]})
    outputs = engine.take_outputs()
    assert outputs is not None
    assert outputs.log_probs[1] == pytest.approx(expected, abs=1e-5)
    assert [int(row.argmax()) for row in outputs.generation_logits[1]] == answer[:4]
