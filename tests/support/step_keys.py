"""What the steps of an engine would compile at load, and what requests would compile later.

As a script it writes both as JSON, for a checkpoint folder; it needs a process in which Triton does
not interpret. Nothing is compiled and no kernel runs: plans are the scheduler's, numbers are zeros.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from support.compile_recorder import record_keys

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.warmup import max_memory_batch, warm_up
from inflight_scheduler import (
    BatchPlanner,
    BlockCopy,
    BlockManager,
    CapacitySchedulerPolicy,
    LlmRequest,
    SamplingParams,
    make_scheduler,
)

_CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    max_batch_size=9,
    max_num_tokens=230,
    tokens_per_block=16,
    max_tokens_in_paged_kv_cache=4096,
    attention_backend="triton",
)
CONFIGS = {
    "plain": _CONFIG,
    "bfloat16": replace(_CONFIG, dtype="bfloat16"),  # draws of logits as they are, and changed
    "fp8 cache": replace(_CONFIG, kv_cache_dtype="fp8"),
    "deterministic": replace(_CONFIG, deterministic_mode=True),
}
_KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_k=3, min_p=0.2, frequency_penalty=0.5),
    SamplingParams(top_k=3, bias=((3, 1.0), (7, -1.0))),
    SamplingParams(top_k=3, bias=((3, 1.0),), presence_penalty=0.5, no_repeat_ngram_size=3),
    SamplingParams(bad_words=((5, 6, 7), tuple(range(40)))),
)


def _requests() -> Iterator[LlmRequest]:
    """Ragged prompts and answers, every third drawn in a way of its own."""
    numbers = random.Random(5)
    for number in range(1, 25):
        prompt = [numbers.randrange(190) for _ in range(numbers.choice((1, 3, 14, 33, 97, 180)))]
        sampling = numbers.choice(_KINDS) if number % 3 == 0 else _KINDS[number % 2]
        yield LlmRequest(number, prompt, numbers.randint(1, 20), sampling=sampling)


def _serve(engine: Engine) -> int:
    """Run all requests, some arriving later than others; the number of steps."""
    blocks = BlockManager(engine.num_blocks, engine.tokens_per_block)
    planner = BatchPlanner(blocks, engine.config.max_batch_size)
    scheduler = make_scheduler(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        blocks,
        max_batch_size=engine.config.max_batch_size,
        max_num_tokens=engine.max_num_tokens,
    )
    waiting, active, num_steps = deque(_requests()), list[LlmRequest](), 0
    mask = np.array([[0, -1, *[-1] * -(-engine.vocab_size // 32)]], dtype=np.int32)
    while waiting or active:
        if waiting and num_steps % 2 == 0:
            active.append(waiting.popleft())
        batch = planner.plan(*scheduler.schedule_request(active, ()))
        if num_steps % 5 == 0:
            engine.mask_next(lambda: mask)
            batch = replace(batch, block_copies=tuple(BlockCopy(i, i) for i in range(num_steps)))
        pending = engine.submit(batch)
        planner.assume_step(batch)
        for request in planner.apply_tokens(batch, pending.read()):
            if request.is_finished:
                planner.release(request)
        active = [request for request in active if not request.is_finished]
        num_steps += 1
    return num_steps


def main() -> None:
    """Write, for every configuration: kernels of the first steps, of later ones, and steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--output", required=True, type=Path)
    arguments = parser.parse_args()
    # Tokens that no kernel has drawn must be valid ones.
    torch.empty = torch.zeros  # type: ignore[assignment]
    results = {}
    for name, config in CONFIGS.items():
        with record_keys(90) as keys:
            engine = Engine.load(arguments.checkpoint, config)
            warm_up(engine, max_memory_batch(engine.config))
            first = set(keys)
            num_steps = _serve(engine)
            later = sorted(keys - first)
        names = sorted({kernel for kernel, _ in first})
        results[name] = {"first": names, "later": later, "num_steps": num_steps}
    arguments.output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
