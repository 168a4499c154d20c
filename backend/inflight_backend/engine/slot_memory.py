"""What the engine keeps for its slots beside the KV pool, as shapes: no torch, so that a plan can
count it. The owners of these tensors take their shapes from here; a test adds up what they hold.

With 256 slots, a vocabulary of 128,256 and texts of 8,192 tokens the adjustments take 260 MiB (a
row of counts, one of biases and one text per slot): 0.2 % of an H200, kept from the start on a GPU,
because the pool takes what is left and a request that asks for a penalty hours later must not find
the memory gone. On a CPU they are made when the first request asks.
"""

from __future__ import annotations

from math import prod

from inflight_scheduler import MAX_STOP_TOKEN_IDS

Shapes = dict[str, tuple[tuple[int, ...], int]]
"""Name -> shape and bytes of one number."""

NUM_COLUMNS = 16
"""Words of a slot's parameters; see `step_buffer`."""


def adjustment_shapes(num_slots: int, vocab_size: int, max_seq_len: int) -> Shapes:
    """Tables of `Adjustments`; the padding slot has a row, too."""
    rows = num_slots + 1
    return {
        "counts": ((rows, vocab_size), 4),
        "bias": ((rows, vocab_size), 4),
        "history": ((rows, max_seq_len), 4),
        "ends": ((rows, MAX_STOP_TOKEN_IDS), 4),
    }


def slot_table_shapes(num_slots: int, max_blocks: int) -> Shapes:
    """Tables of `SlotTable`."""
    rows = num_slots + 1
    return {
        "parameters": ((rows, NUM_COLUMNS), 4),
        "block_tables": ((rows, max_blocks), 4),
        "cached_lengths": ((rows,), 8),
        "last_tokens": ((rows,), 8),
    }


def max_words(num_slots: int, max_num_tokens: int, max_blocks_per_slot: int) -> int:
    """Words of the largest plan (`StepBuffer`): every slot set up and moved, a chunk and a copied
    block, its whole block table assigned (slots may share blocks, so there can be more assignments
    than blocks), every token prompt, and the slots of generations, which always take their room."""
    words_per_slot = NUM_COLUMNS + 17 + 3 * max_blocks_per_slot
    return num_slots * words_per_slot + 4 * max_num_tokens + 1  # a draft draws, too


def num_bytes(shapes: Shapes) -> int:
    """Bytes of all of them."""
    return sum(prod(shape) * size for shape, size in shapes.values())


def reserved_bytes(
    num_slots: int,
    vocab_size: int,
    max_seq_len: int,
    max_num_tokens: int,
    tokens_per_block: int,
    *,
    has_adjustments: bool,
) -> int:
    """Everything above; without the adjustments where they are made on demand."""
    max_blocks = -(-max_seq_len // tokens_per_block)
    taken = num_bytes(slot_table_shapes(num_slots, max_blocks))
    taken += 4 * max_words(num_slots, max_num_tokens, max_blocks)
    if has_adjustments:
        taken += num_bytes(adjustment_shapes(num_slots, vocab_size, max_seq_len))
    return taken
