"""Steps that run once at load: the largest one to measure its memory, small ones to compile.

What is compiled depends on the model, on the settings and on what a step has, not on how much of
it: a tile of the context attention for short, middling and long chunks, generation and the
combination of its splits, and everything that may be done to logits. So there is one small step of
each, and no request waits for a compiler. What they compute does not matter: all write to block 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from inflight_backend.engine.config import EngineConfig
from inflight_backend.engine.interface import TokenMasks
from inflight_scheduler import (
    BlockAssignment,
    BlockCopy,
    ContextChunk,
    SamplingParams,
    ScheduledBatch,
    SlotSetup,
    VerifiedSlot,
)

if TYPE_CHECKING:
    from inflight_backend.engine import Engine


def max_memory_batch(config: EngineConfig) -> ScheduledBatch:
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


_LONGEST = 256
"""Tokens: above 64 query rows no tile is larger, and above 128 tokens a generation may split."""

_KINDS = (
    SamplingParams(top_k=2, min_p=0.1),
    SamplingParams(repetition_penalty=2.0),
    SamplingParams(bias=((0, 1.0),)),
    SamplingParams(repetition_penalty=2.0, bias=((0, 1.0),)),
    SamplingParams(no_repeat_ngram_size=2, bad_words=((0, 0),)),
)
_PLAIN = SamplingParams(top_k=2, top_p=0.9)


def warm_up(engine: Engine, largest: ScheduledBatch) -> None:
    """The small ones, then ``largest``, which also resets the slots that those have used.

    Its logits are changed, by a mask, for they are float32 then: that way needs the most room.
    """
    for batch in _batches(engine.config):
        engine.enqueue(batch)
    for batch in (_context(_PLAIN, 1), largest):
        engine.mask_next(lambda: _mask(engine.vocab_size))
        engine.enqueue(batch)


def thread_warmup_batch(config: EngineConfig) -> ScheduledBatch:
    """A prompt in block 0 and a draw, for `Engine.prepare_thread`."""
    num_tokens = min(config.tokens_per_block, config.num_tokens_limit, config.seq_len_limit)
    return replace(
        _context(_PLAIN, num_tokens),
        new_blocks=(BlockAssignment(0, 0, 0),),
    )


def compiling_batches(config: EngineConfig) -> Iterator[ScheduledBatch]:
    """A prompt and a generation, for whose kernels on a CPU no request should wait."""
    room = min(config.tokens_per_block, config.seq_len_limit)
    num_tokens = max(1, min(room - 1, config.num_tokens_limit))
    yield replace(_context(_PLAIN, num_tokens), new_blocks=(BlockAssignment(0, 0, 0),))
    if num_tokens < room:
        yield ScheduledBatch(0, generation_slots=(0,))


def _batches(config: EngineConfig) -> Iterator[ScheduledBatch]:
    """Plans for slot 0."""
    longest = min(_LONGEST, config.seq_len_limit)
    num_blocks = -(-longest // config.tokens_per_block)
    blocks = tuple(BlockAssignment(0, i, 0) for i in range(num_blocks))
    yield ScheduledBatch(0, new_blocks=blocks, block_copies=(BlockCopy(0, 0),))
    most_tokens = min(longest, config.num_tokens_limit)
    lengths = [2**power for power in range(most_tokens.bit_length())]
    for length in {*lengths, most_tokens}:
        yield _context(_PLAIN, length)
    end = VerifiedSlot(0, longest - 1, 0)
    yield ScheduledBatch(0, verified=(end,), generation_slots=(0,))
    for sampling in _KINDS:
        yield _context(sampling, 1)


def _context(sampling: SamplingParams, length: int) -> ScheduledBatch:
    """A prompt of so many tokens, and the draw after it."""
    tokens = (0,) * length
    setup = SlotSetup(0, 0, sampling, prompt_len=length, tokens=tokens)
    return ScheduledBatch(0, (setup,), context_chunks=(ContextChunk(0, 0, tokens, is_last=True),))


def _mask(vocab_size: int) -> TokenMasks:
    """The first row may draw everything."""
    return np.array([[0, *[-1] * (1 + -(-vocab_size // 32))]], dtype=np.int32)
