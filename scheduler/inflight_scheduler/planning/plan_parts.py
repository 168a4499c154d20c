"""Small parts of making a plan and of reading what the engine answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from inflight_scheduler.batch import BlockAssignment, ScheduledBatch
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.request import LlmRequest


def grow(
    request: LlmRequest,
    slot: int,
    num_tokens: int,
    new_blocks: list[BlockAssignment],
    manager: BlockManager,
) -> None:
    """Give ``request`` room for ``num_tokens``, which there must be."""
    first_index = manager.num_blocks_of(request.request_id)
    block_ids = manager.allocate(request.request_id, num_tokens)
    assert block_ids is not None, no_room(request, num_tokens, manager)
    new_blocks.extend(
        BlockAssignment(slot, index, block_id)
        for index, block_id in enumerate(block_ids, start=first_index)
    )


def check_num_tokens(batch: ScheduledBatch, tokens: Sequence[int]) -> None:
    """Raise `ValueError` unless there are as many as `ScheduledBatch` promises."""
    if len(tokens) != batch.num_drawn:
        raise ValueError(
            f"iteration {batch.iteration}: the engine returned {len(tokens)} tokens, "
            f"expected {batch.num_drawn}"
        )


def no_room(request: LlmRequest, num_tokens: int, block_manager: BlockManager) -> str:
    """What is wrong when somebody was scheduled without blocks."""
    return (
        f"request {request.request_id} was scheduled without room for {num_tokens} tokens: "
        f"{block_manager.num_free_blocks} blocks are free"
    )


def slots_of(requests: Sequence[LlmRequest]) -> tuple[int, ...]:
    """The rows of ``requests``, which all have as many."""
    return rows_of(requests, tuple([request.seq_slot for request in requests]))


def rows_of(requests: Sequence[LlmRequest], first_rows: tuple[int | None, ...]) -> tuple[int, ...]:
    """All rows of ``requests``, which all have as many, by the first one of each."""
    assert None not in first_rows, "somebody generates without a slot"
    slots = cast("tuple[int, ...]", first_rows)
    if requests and requests[0].beams is not None:
        num_rows = requests[0].num_rows
        return tuple([row for slot in slots for row in range(slot, slot + num_rows)])
    return slots
