"""The plan that takes the most memory: run once, before the KV pool gets what is left."""

from __future__ import annotations

from inflight_backend.engine.config import EngineConfig
from inflight_scheduler import (
    BlockAssignment,
    ContextChunk,
    SamplingParams,
    ScheduledBatch,
    SlotSetup,
)


def largest_batch(config: EngineConfig) -> ScheduledBatch:
    """As many tokens as one iteration may have, in as many requests as may draw a token.

    All of them write to the same blocks, 0 and up, since what they compute does not matter.
    """
    num_requests = min(config.num_slots, config.num_tokens_limit)
    length = min(config.num_tokens_limit // num_requests, config.seq_len_limit)
    tokens = (0,) * length
    num_blocks = -(-length // config.tokens_per_block)
    sampling = SamplingParams(top_k=2, top_p=0.9)  # to search a threshold takes room
    num_candidates = 2 * config.max_beam_width if config.max_beam_width > 1 else 0
    slots = range(num_requests)
    return ScheduledBatch(
        iteration=0,
        setups=tuple(
            SlotSetup(slot, slot, sampling, num_candidates=num_candidates) for slot in slots
        ),
        new_blocks=tuple(
            BlockAssignment(slot, index, index) for slot in slots for index in range(num_blocks)
        ),
        context_chunks=tuple(ContextChunk(slot, 0, tokens, is_last=True) for slot in slots),
    )
