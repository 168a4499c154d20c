"""What requests and the host want done to their logits: against transformers, and however the work
is cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.checkpoints import VOCAB_SIZE, load_oracle
from support.engine_driver import EngineDriver, Job
from support.fake_cuda import on_both_devices
from support.graph_replay import Rerun
from torch import Tensor

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.interface import TokenMasks
from inflight_backend.engine.memory_plan import COLUMNS
from inflight_backend.engine.outputs import OutputRecorder
from inflight_backend.engine.step_buffer import current_top_p
from inflight_scheduler import SamplingParams, SlotSetup

SmallEngine = Callable[[str], Engine]
Folder = Callable[..., Path]
NUM_TOKENS = 12


def make_prompts(lengths: tuple[int, ...] = (3, 9, 26), seed: int = 5) -> list[list[int]]:
    """Prompts of few different tokens, so that rules about repetition have work."""
    numbers = random.Random(seed)
    return [[numbers.randrange(40) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def oracle(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    """What transformers generates greedily with its own logits processors."""
    answer = load_oracle(folder).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        **options,
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.contract(
    "tensorrt_llm input", "bad_words_list repetition_penalty no_repeat_ngram_size"
)
def test_greedy_answers_are_those_of_transformers(
    small_engine: SmallEngine, checkpoint: Folder
) -> None:
    """One batch of different rules, each row against `generate` with the same rule."""
    folder = checkpoint("llama-mha", num_shards=1)
    prompt = make_prompts()[2]
    plain = oracle(folder, prompt)
    # The plain answer's own tokens are what the rules are about.
    bias = ((plain[0], -4.0), (7, 3.0))
    words = ((plain[1],), tuple(plain[2:4]), tuple(prompt[-2:] + plain[:1]))
    cases: list[tuple[SamplingParams, dict[str, Any]]] = [
        (SamplingParams(), {}),
        (SamplingParams(repetition_penalty=1.7), {"repetition_penalty": 1.7}),
        (SamplingParams(repetition_penalty=0.6), {"repetition_penalty": 0.6}),
        (SamplingParams(no_repeat_ngram_size=1), {"no_repeat_ngram_size": 1}),
        (SamplingParams(no_repeat_ngram_size=2), {"no_repeat_ngram_size": 2}),
        (SamplingParams(bias=bias), {"sequence_bias": [[[t], b] for t, b in bias]}),
        (SamplingParams(bad_words=words), {"bad_words_ids": [list(word) for word in words]}),
        (
            SamplingParams(repetition_penalty=1.3, no_repeat_ngram_size=3, bad_words=words[:1]),
            {
                "repetition_penalty": 1.3,
                "no_repeat_ngram_size": 3,
                "bad_words_ids": [list(words[0])],
            },
        ),
    ]
    jobs = [Job(prompt, sampling) for sampling, _ in cases]
    EngineDriver(small_engine("llama-mha")).generate(jobs, NUM_TOKENS, chunk_size=7)
    for job, (sampling, options) in zip(jobs, cases, strict=True):
        assert job.generated == oracle(folder, prompt, **options), sampling
    assert len({tuple(job.generated) for job in jobs}) >= 5


@pytest.mark.contract("tensorrt_llm input", "presence_penalty frequency_penalty")
def test_penalties_count_prompt_and_answer(small_engine: SmallEngine) -> None:
    """A frequency penalty that outweighs everything makes every token new; the ignored part of
    the prompt may come again."""
    engine = small_engine("llama-mha")
    prompt = make_prompts()[1]
    strong = SamplingParams(frequency_penalty=1e4)
    whole, ignored = Job(prompt, strong), Job(prompt, replace(strong, prompt_ignore_length=5))
    liked = replace(strong, bias=tuple((token, 500.0) for token in prompt), prompt_ignore_length=5)
    tempted = Job(prompt, liked)
    EngineDriver(engine).generate([whole, ignored, tempted], NUM_TOKENS)
    assert len({*prompt, *whole.generated}) == len(set(prompt)) + NUM_TOKENS
    assert len(set(ignored.generated)) == NUM_TOKENS
    free = set(prompt[:5]) - set(prompt[5:])
    assert free
    assert set(tempted.generated[: len(free)]) == free


class CountedTuple(tuple[Any, ...]):
    """Counts how often it is iterated over."""

    num_readings = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_readings += 1
        return super().__iter__()


def test_sequences_that_share_a_bias_have_it_read_once(small_engine: SmallEngine) -> None:
    """With one for each of 128 K tokens that takes 20 ms, on the loop's thread."""
    prompt = make_prompts()[0]
    bias = CountedTuple([(7, 500.0), (9, 499.0)])
    jobs = [Job(prompt, SamplingParams(bias=bias, bad_words=((7,),) * i)) for i in range(2)]
    EngineDriver(small_engine("llama-mha")).generate([*jobs, Job(prompt)], NUM_TOKENS)
    assert bias.num_readings == 1
    assert [set(job.generated) for job in jobs] == [{7}, {9}]


def test_words_are_read_once_whichever_requests_come_and_go(small_engine: SmallEngine) -> None:
    """With 200 words each and 256 requests that took 80 ms per request that began."""
    driver = EngineDriver(small_engine("llama-mha"))
    prompt = make_prompts()[0]
    plain = Job(prompt)
    driver.generate([plain], NUM_TOKENS)
    word = CountedTuple(plain.generated[:2])
    long = (5, 6, 7, *plain.generated[2:4])
    first, second = (Job(prompt, SamplingParams(bad_words=(each,))) for each in (word, long))
    driver.generate([first], 1)
    driver.generate([first, second], 3)
    driver.release(second)
    driver.generate([first, Job(prompt, SamplingParams(bad_words=(long, long[:2])))], 4)
    assert word.num_readings == 1
    assert tuple(first.generated[:2]) != tuple(word)
    assert second.generated == plain.generated[: len(second.generated)]


def test_ends_wait_for_no_minimum_but_that_of_their_own_request(small_engine: SmallEngine) -> None:
    """A slot has ends that wait, then ends that do not, then a minimum without ends of its own."""
    driver = EngineDriver(small_engine("llama-mha"))
    prompt = make_prompts()[0]
    free = Job(prompt)
    driver.generate([free], NUM_TOKENS)
    ends, slot = tuple(set(free.generated)), free.slot

    def in_turn(sampling: SamplingParams, *beside: Job) -> Job:
        job = Job(prompt, sampling, min_end_position=len(prompt) + sampling.min_length)
        driver.generate([job, *beside], NUM_TOKENS)
        assert job.slot == slot
        return job

    held = SamplingParams(min_length=NUM_TOKENS, stop_token_ids=ends)
    driver.release(free)
    first = in_turn(held)
    assert not {*first.generated} & {*ends}
    driver.release(first)
    driver.release(in_turn(SamplingParams(stop_token_ids=ends)))
    beside = Job(prompt, held, min_end_position=len(prompt) + NUM_TOKENS)
    assert in_turn(SamplingParams(min_length=NUM_TOKENS), beside).generated == free.generated
    assert beside.generated == first.generated


@pytest.mark.contract(
    "tensorrt_llm input", "runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids"
)
def test_top_p_decays_and_resets() -> None:
    sampling = SamplingParams(top_p=0.8, top_p_decay=0.5, top_p_min=0.15, top_p_reset_id=9)

    def after(*generated: int) -> float:
        setup = SlotSetup(0, 1, sampling, prompt_len=2, tokens=(9, 9, *generated))
        return round(current_top_p(setup), 6)

    assert [after(), after(1), after(1, 2), after(1, 2, 3)] == [0.8, 0.4, 0.2, 0.15]
    assert [after(1, 2, 9), after(1, 2, 9, 4)] == [0.8, 0.4]


def test_a_decayed_top_p_is_that_of_the_setup(small_engine: SmallEngine) -> None:
    """The device multiplies as the host does, so what is drawn later is the same to the bit."""
    sampling = SamplingParams(top_p=0.99, top_p_decay=0.83, top_p_min=0.01, seed=3, temperature=2)
    whole, parts = Job(make_prompts()[0], sampling), Job(make_prompts()[0], sampling)
    driver = EngineDriver(small_engine("qwen3"))
    driver.generate([whole], NUM_TOKENS)
    free = Job(make_prompts()[0], replace(sampling, top_p_decay=1.0))
    driver.generate([free], NUM_TOKENS)
    for _ in range(NUM_TOKENS):
        driver.generate([parts], 1)
        driver.release(parts)
    assert parts.generated == whole.generated != free.generated
    table = driver.engine._slots.parameters.view(torch.float32)
    assert whole.slot is not None
    setup = SlotSetup(0, 1, sampling, prompt_len=3, tokens=tuple(whole.tokens))
    assert table[whole.slot, COLUMNS["top_p"]].item() == current_top_p(setup)


TOKENS = st.integers(0, VOCAB_SIZE - 1)
LIKELY = st.sampled_from(range(40))
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 8]),
    top_p=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
    top_p_decay=st.sampled_from([1.0, 0.9]),
    top_p_reset_id=LIKELY,
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    prompt_ignore_length=st.sampled_from([0, 4, 100]),
    no_repeat_ngram_size=st.sampled_from([0, 0, 1, 2, 3]),
    bias=st.lists(st.tuples(TOKENS, st.floats(-5, 5, width=32)), max_size=3).map(
        lambda pairs: tuple(dict(pairs).items())
    ),
    bad_words=st.lists(st.lists(LIKELY, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_length=st.sampled_from([0, NUM_TOKENS]),
    stop_token_ids=st.one_of(st.just(()), st.just(tuple(range(VOCAB_SIZE // 2)))),
)


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    phases=[Phase.generate],
)
@given(
    kinds=st.lists(SAMPLING, min_size=2, max_size=4),
    chunk_size=st.sampled_from([0, 3, 10]),
    seed=st.integers(0, 1000),
)
def test_chunks_pauses_other_requests_and_reused_slots_change_nothing(
    small_engine: SmallEngine, kinds: list[SamplingParams], chunk_size: int, seed: int
) -> None:
    engine = small_engine("llama-mha")
    numbers = random.Random(seed)
    prompts = make_prompts((numbers.randint(1, 30),) * len(kinds), seed)

    def make_jobs() -> list[Job]:
        return [
            Job(prompt, sampling, min_end_position=len(prompt) + sampling.min_length)
            for prompt, sampling in zip(prompts, kinds, strict=True)
        ]

    alone = []
    for job in make_jobs():
        EngineDriver(engine, seed).generate([job], NUM_TOKENS)
        alone.append(job.generated)
    jobs = make_jobs()
    driver = EngineDriver(engine, seed + 1)
    while waiting := [job for job in jobs if len(job.generated) < NUM_TOKENS]:
        some = numbers.sample(waiting, numbers.randint(1, len(waiting)))
        driver.generate(some, 1, chunk_size)
        running = [job for job in jobs if job.slot is not None]
        if numbers.random() < 0.6 and running:
            driver.release(numbers.choice(running))
    assert [job.generated for job in jobs] == alone


END = 7
DRAWN = SamplingParams(top_k=50, seed=3)


def mask(row: int, allowed: list[int], forced: int = -1) -> TokenMasks:
    words = np.zeros(2 + -(-VOCAB_SIZE // 32), dtype=np.int32)
    words[:2] = row, forced
    for token in allowed:
        words[2 + token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
    return words


@pytest.fixture
def engine(small_engine: SmallEngine) -> Engine:
    return small_engine("llama-mha")


@on_both_devices
@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWN], ids=["greedy", "drawn"])
def test_masks_restrict_their_rows_only(engine: Engine, sampling: SamplingParams) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    expected = EngineDriver(engine).generate([Job(p, sampling) for p in prompts], 6)
    driver = EngineDriver(engine)
    jobs = [Job(prompt, sampling) for prompt in prompts]
    for step in range(6):
        allowed = [10 + step, 40 + step, 198]
        masks = np.stack([mask(1, allowed)])
        engine.mask_next(partial(np.copy, masks))
        driver.step({} if step else dict.fromkeys(jobs, 0), jobs if step else ())
        assert jobs[1].generated[-1] in allowed
    assert [jobs[0].generated, jobs[2].generated] == [expected[0], expected[2]]
    assert driver.step({}, jobs)  # a mask is for one step only


@pytest.mark.slow
def test_replayed_steps_are_masked_too(checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(
        device="cpu",
        max_batch_size=2,
        max_tokens_in_paged_kv_cache=64,
        attention_backend="triton",  # the one that can be recorded
        cuda_graph_mixed_tokens=2,
    )
    engine = Engine.load(checkpoint(head_dim=16), config, capture=Rerun())
    driver, jobs = EngineDriver(engine), [Job([1]), Job([2])]
    driver.step(dict.fromkeys(jobs, 0))
    free = driver.step({}, jobs)
    for job in jobs:
        driver.release(job)
    jobs = [Job([1]), Job([2])]
    driver.step(dict.fromkeys(jobs, 0))
    engine.mask_next(lambda: np.stack([mask(1, [5, 6])]))
    masked = driver.step({}, jobs)
    assert masked[0] == free[0]
    assert masked[1] in (5, 6)

    def keep_nine(logits: Tensor, stream: int | None) -> None:
        assert stream is None  # on a CPU
        logits[..., :9], logits[..., 10:] = -torch.inf, -torch.inf

    engine.edit_next(lambda: [(0, keep_nine)])  # what a logits processor does
    assert driver.step({}, jobs)[0] == 9


@on_both_devices
def test_a_forced_token_wins_over_bias_and_minimum(engine: Engine) -> None:
    sampling = SamplingParams(bias=((END, -np.inf),), min_length=5)
    driver, job = EngineDriver(engine), Job([1, 2], sampling, END, min_end_position=7)
    engine.mask_next(lambda: np.stack([mask(0, [END], forced=END)]))
    assert driver.step({job: 0}) == [END]


def test_a_mask_without_any_token_fails_its_row(engine: Engine) -> None:
    driver, jobs = EngineDriver(engine), [Job([1, 2]), Job([3])]
    engine.mask_next(lambda: np.stack([mask(1, [])]))
    first, second = driver.step(dict.fromkeys(jobs, 0))
    assert first >= 0
    assert second == -1


def test_a_source_that_fails_leaves_nothing_behind(engine: Engine) -> None:
    driver, job = EngineDriver(engine), Job([1, 2])

    def fail() -> TokenMasks:
        raise RuntimeError("no masks today")

    engine.mask_next(fail)
    with pytest.raises(RuntimeError, match="no masks"):
        driver.step({job: 0})
    other = Job([3])
    assert driver.step({other: 0})[0] >= 0


def test_what_a_failed_step_has_recorded_is_forgotten() -> None:
    recorder = OutputRecorder(num_slots=2, device="cpu")
    recorder.set_up(())
    recorder.record_candidates([1], [2], torch.tensor([[5, 6]]), torch.tensor([[-0.1, -0.2]]))
    recorder.set_up(())  # the next step begins
    assert recorder.take() is None
