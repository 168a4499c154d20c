"""The engine against transformers, token for token, however a scheduler may cut the work."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints import VARIANTS, VOCAB_SIZE, oracle_logits, oracle_tokens
from support.engine_driver import EngineDriver, Job
from support.fake_cuda import on_both_devices

from inflight_backend.engine import Engine, EngineConfig
from inflight_scheduler import (
    BlockAssignment,
    BlockCopy,
    ContextChunk,
    SamplingParams,
    ScheduledBatch,
    SlotSetup,
)

LENGTHS = (1, 4, 5, 17, 33, 80)
NUM_TOKENS = 10
SmallEngine = Callable[[str], Engine]
Folder = Callable[..., Path]


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths."""
    numbers = random.Random(seed)
    return [[numbers.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.fixture
def expected(checkpoint: Folder) -> Callable[[str], list[list[int]]]:
    """What transformers answers to `make_prompts`."""

    def answer(variant: str) -> list[list[int]]:
        num_shards = 3 if variant.startswith("qwen") else 1
        folder = checkpoint(variant, num_shards=num_shards)
        return [oracle_tokens(folder, prompt, NUM_TOKENS) for prompt in make_prompts()]

    return answer


@pytest.mark.fast(6)
@pytest.mark.parametrize("chunk_size", [0, 3, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_transformers(
    variant: str,
    chunk_size: int,
    small_engine: SmallEngine,
    expected: Callable[[str], list[list[int]]],
) -> None:
    # Mixed lengths; with chunks, short prompts generate while long ones are still read.
    jobs = [Job(prompt) for prompt in make_prompts()]
    driver = EngineDriver(small_engine(variant), seed=chunk_size)
    assert driver.generate(jobs, NUM_TOKENS, chunk_size) == expected(variant)


@on_both_devices
@pytest.mark.parametrize("variant", ["llama3-biased-gqa8", "mistral-window", "qwen3"])
def test_requests_join_pause_and_resume(
    variant: str, small_engine: SmallEngine, expected: Callable[[str], list[list[int]]]
) -> None:
    first, second, third, *others = [Job(prompt) for prompt in make_prompts()]
    driver = EngineDriver(small_engine(variant))
    driver.generate([first, second], 4)
    driver.step({third: 2, others[0]: 0}, [second, first])
    driver.release(second)  # paused: what it generated is prompt when it comes back
    driver.step({third: 0, others[1]: 9}, [first, others[0]])
    driver.release(others[1])  # paused in the middle of its prompt
    jobs = [first, second, third, *others]
    for job in reversed(jobs):
        driver.generate([job, first], min(2, NUM_TOKENS - len(job.generated)))
    while waiting := [job for job in jobs if len(job.generated) < NUM_TOKENS]:
        driver.generate(waiting, 1)
    assert [job.generated[:NUM_TOKENS] for job in jobs] == expected(variant)


@on_both_devices
def test_seeded_answers_do_not_depend_on_the_batch(small_engine: SmallEngine) -> None:
    engine = small_engine("qwen2-tied")
    prompts = make_prompts()
    params = [
        SamplingParams(temperature=0.7 + row / 4, top_k=20 * (row % 2), top_p=0.9, seed=row - 3)
        for row in range(len(prompts))
    ]
    together = [Job(prompt, sampling) for prompt, sampling in zip(prompts, params, strict=True)]
    EngineDriver(engine).generate(together, NUM_TOKENS, chunk_size=7)
    for prompt, sampling, job in zip(prompts, params, together, strict=True):
        alone = Job(prompt, sampling)
        driver = EngineDriver(engine, seed=5)
        driver.generate([alone], 4)
        driver.release(alone)
        driver.generate([alone, Job(prompts[3])], NUM_TOKENS - 4)
        assert alone.generated == job.generated
    greedy = Job(prompts[0])
    EngineDriver(engine).generate([greedy], NUM_TOKENS)
    assert greedy.generated != together[0].generated


@pytest.mark.contract("tensorrt_llm input", "temperature runtime_top_k runtime_top_p")
def test_draws_follow_the_logits_of_transformers(
    small_engine: SmallEngine, checkpoint: Folder
) -> None:
    prompt = make_prompts()[2]
    logits = oracle_logits(checkpoint("llama-mha", num_shards=1), prompt)
    probabilities = (logits / 1.5).softmax(-1).double()
    counts = torch.zeros(VOCAB_SIZE)
    driver = EngineDriver(small_engine("llama-mha"))
    num_rounds = 150
    for number in range(num_rounds):
        jobs = [
            Job(prompt, SamplingParams(temperature=1.5, top_p=1.0, seed=8 * number + row))
            for row in range(8)
        ]
        counts[driver.step(dict.fromkeys(jobs, 0))] += 1
        for job in jobs:
            driver.release(job)
    wanted = probabilities * counts.sum()
    common = wanted >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None])).double()
    wanted = torch.cat((wanted[common], wanted[~common].sum()[None]))
    chi_square = ((observed - wanted).square() / wanted).sum()
    degrees = len(wanted) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


@on_both_devices
@pytest.mark.parametrize("is_greedy", [True, False])
def test_end_id_waits_for_the_minimum(small_engine: SmallEngine, is_greedy: bool) -> None:
    prompt = make_prompts()[3]
    engine = small_engine("llama-mha")
    sampling = SamplingParams() if is_greedy else SamplingParams(temperature=1.2, top_k=3, seed=4)
    free = Job(prompt, sampling)
    EngineDriver(engine).generate([free], NUM_TOKENS)
    # The token drawn third, forbidden up to and including that place, then allowed at once.
    end_id = free.generated[2]
    forbidden = Job(prompt, sampling, end_id, len(prompt) + 3)
    allowed = Job(prompt, sampling, end_id, len(prompt) + 2)
    other = Job(prompt, sampling)
    EngineDriver(engine).generate([forbidden, other, allowed], 3)
    assert end_id not in free.generated[:2]
    assert end_id not in forbidden.generated
    assert forbidden.generated[:2] == free.generated[:2]
    assert other.generated == allowed.generated == free.generated[:3]


@pytest.mark.case(87)
def test_a_row_that_fails_does_not_affect_others(tmp_path: Path, checkpoint: Folder) -> None:
    from safetensors.torch import load_file, save_file

    source = checkpoint("llama-mha", num_shards=1)
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    config = EngineConfig(max_batch_size=4, tokens_per_block=8, max_tokens_in_paged_kv_cache=32)
    engine = Engine.load(tmp_path, config)
    prompt = [1, 2, 3]
    healthy = oracle_tokens(source, prompt, 8)
    assert 7 not in healthy
    driver = EngineDriver(engine)
    broken, good = Job([9] * 20 + [7, 4]), Job(prompt)
    assert driver.step({broken: 0, good: 0}) == [-1, healthy[0]]
    assert driver.step({}, [good, broken]) == [healthy[1], -1]
    driver.release(broken)
    # Its three blocks, NaN and all, go to others: filled by a prompt, half filled by it, and to a
    # neighbour that comes to the end of its block as it generates.
    heir = Job(list(range(10, 21)))
    driver.generate([good, heir], 6)
    assert good.generated == healthy
    assert heir.generated == oracle_tokens(source, heir.prompt, 6)


def test_bfloat16_is_close_to_transformers(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3", num_shards=3)
    engine = Engine.load(
        folder, EngineConfig(dtype="bfloat16", max_batch_size=8, max_tokens_in_paged_kv_cache=1024)
    )
    assert engine.dtype_name == "bfloat16"
    logits = oracle_logits(folder, make_prompts()[4])
    token = EngineDriver(engine).step({Job(make_prompts()[4]): 0})[0]
    # 8 bits of mantissa through two layers: the choice may differ, but only among near ties.
    assert logits.max() - logits[token] < 0.05 * (logits.max() - logits.min())


def test_the_longest_chunk_has_room_where_layers_have_a_window(checkpoint: Folder) -> None:
    """A plan assigns a block for each of its tokens, though few of them stay."""
    folder, prompt = checkpoint("mistral-window"), [7 * index % 90 for index in range(40)]
    config = EngineConfig(
        device="cpu",
        max_batch_size=1,
        max_num_tokens=40,
        max_seq_len=48,
        tokens_per_block=1,
        max_tokens_in_paged_kv_cache=96,
    )
    driver = EngineDriver(Engine.load(folder, config))
    assert driver.generate([Job(prompt)], 3) == [oracle_tokens(folder, prompt, 3)]


@on_both_devices
def test_nothing_to_run(small_engine: SmallEngine) -> None:
    engine = small_engine("llama-mha")
    assert engine.execute(ScheduledBatch(iteration=1)) == []
    assert EngineDriver(engine).step({Job([1, 2, 3, 4, 5]): 3}) == []  # not the last chunk


@on_both_devices
def test_a_plan_may_set_up_and_run_nothing(small_engine: SmallEngine) -> None:
    engine = small_engine("llama-mha")
    prompt = make_prompts()[2]
    free = Job(prompt)
    EngineDriver(engine).generate([free], 2)
    blocks = tuple(BlockAssignment(5, index, 9 - index) for index in range(2))
    engine.execute(ScheduledBatch(1, (SlotSetup(5, 1, SamplingParams()),), blocks))
    chunk = ContextChunk(5, 0, tuple(prompt), is_last=True)
    assert engine.execute(ScheduledBatch(2, context_chunks=(chunk,))) == free.generated[:1]
    assert engine.execute(ScheduledBatch(3, generation_slots=(5,))) == free.generated[1:]


@on_both_devices
def test_a_plan_may_copy_blocks(small_engine: SmallEngine) -> None:
    engine = small_engine("llama-mha")
    prompt = make_prompts()[3][:8]
    free = Job(prompt)
    EngineDriver(engine).generate([free], 2)
    blocks = (BlockAssignment(5, 0, 40), BlockAssignment(5, 1, 41))
    chunk = ContextChunk(5, 0, tuple(prompt), is_last=True)
    setup = SlotSetup(5, 1, SamplingParams())
    engine.execute(ScheduledBatch(1, (setup,), blocks, (chunk,)))
    # Slot 6 shares block 40 and starts from a copy of 41, whose last token it computes again.
    # What the same plan copies into 41 must not matter.
    plan = ScheduledBatch(
        2,
        (SlotSetup(6, 2, SamplingParams()),),
        (BlockAssignment(6, 0, 40), BlockAssignment(6, 1, 42), BlockAssignment(6, 2, 43)),
        (ContextChunk(6, 7, (prompt[7],), is_last=True),),
        block_copies=(BlockCopy(41, 42), BlockCopy(90, 41)),
    )
    assert engine.execute(plan) == free.generated[:1]
    assert engine.execute(ScheduledBatch(3, generation_slots=(6,))) == free.generated[1:]


@on_both_devices
def test_steps_may_be_submitted_before_the_last_is_read(small_engine: SmallEngine) -> None:
    """Tokens feed the next step on the device; reading them is one step late."""
    engine = small_engine("qwen3")
    prompts = make_prompts()[:3]
    expected = EngineDriver(engine).generate([Job(prompt) for prompt in prompts], NUM_TOKENS)
    jobs = [Job(prompt) for prompt in prompts]
    driver = EngineDriver(engine, seed=4)
    driver.step(dict.fromkeys(jobs, 0))
    slots = tuple(job.slot for job in jobs if job.slot is not None)
    blocks = tuple(
        BlockAssignment(job.slot, len(job.blocks[0]) + index, driver.free_blocks.pop())
        for job in jobs
        for index in range(3)
        if job.slot is not None
    )
    late = engine.submit(ScheduledBatch(2, new_blocks=blocks, generation_slots=slots))
    found = []
    for number in range(3, NUM_TOKENS + 1):
        pending = engine.submit(ScheduledBatch(number, generation_slots=slots))
        found.append(late.read())
        late = pending
    found.append(late.read())
    tokens = [list(row) for row in zip(*found, strict=True)]
    assert tokens == [row[1:NUM_TOKENS] for row in expected]
