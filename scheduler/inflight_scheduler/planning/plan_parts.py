"""Parts of a plan that `planner` and `pending_tokens` share: rows, new blocks, and beams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from inflight_scheduler.batch import BeamMove, BlockAssignment, BlockCopy, ScheduledBatch, SlotSetup
from inflight_scheduler.beam_search import Candidate
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
    if manager.window_groups:
        for group, first_new, new in manager.allocate_windows(request, num_tokens):
            new_blocks.extend(
                BlockAssignment(slot, index, block_id, group)
                for index, block_id in enumerate(new, start=first_new)
            )


def check_num_tokens(batch: ScheduledBatch, tokens: Sequence[int]) -> None:
    """Raise `ValueError` unless there are as many as `ScheduledBatch` promises."""
    if len(tokens) != batch.num_drawn:
        raise ValueError(
            f"iteration {batch.iteration}: the engine returned {len(tokens)} tokens, "
            f"expected {batch.num_drawn}"
        )


def no_room(request: LlmRequest, num_tokens: int, block_manager: BlockManager) -> str:
    """The error when a request was scheduled without blocks."""
    return (
        f"request {request.request_id} was scheduled without room for {num_tokens} tokens: "
        f"{block_manager.num_free_blocks} blocks are free"
    )


def slots_of(requests: Sequence[LlmRequest]) -> tuple[int, ...]:
    """The rows of ``requests``, which all have as many."""
    first_rows = tuple([request.seq_slot for request in requests])
    assert None not in first_rows, "a request generates without a slot"
    return rows_of(requests, cast("tuple[int, ...]", first_rows))


def rows_of(requests: Sequence[LlmRequest], first_rows: tuple[int, ...]) -> tuple[int, ...]:
    """All rows of ``requests``, which all have as many, by the first one of each."""
    if requests and requests[0].beams is not None:
        num_rows = requests[0].num_rows
        return tuple([row for slot in first_rows for row in range(slot, slot + num_rows)])
    return first_rows


Candidates = Mapping[int, Sequence[Candidate]]
"""What the engine tells of each row of a search, by row."""

NO_CANDIDATES: Candidates = {}


def set_up_rows(setup: SlotSetup, num_rows: int) -> list[SlotSetup]:
    """``setup`` for each row of its slot; the others take over the text of the first one when its
    context is complete."""
    others = range(setup.slot + 1, setup.slot + num_rows)
    return [setup, *(setup._replace(slot=row, tokens=()) for row in others)]


def open_beams(request: LlmRequest, slot: int, manager: BlockManager) -> list[BlockAssignment]:
    """Tables for all rows but the first, which has its whole prompt: what is new in them."""
    manager.open_beams(request)
    first_own = request.prompt_len // manager.tokens_per_block
    return [
        BlockAssignment(slot + row, index, table[index])
        for row, table in enumerate(manager.beam_tables_of(request.request_id), start=1)
        for index in range(first_own, len(table))
    ]


def append_beam_blocks(
    request: LlmRequest, slot: int, manager: BlockManager
) -> list[BlockAssignment]:
    """A block for the next token of each row; there must be room."""
    appended = manager.append_blocks([request.request_id])
    assert appended is not None, f"request {request.request_id} was scheduled without room"
    ((index, first),) = appended
    others = manager.append_beam_blocks(request.request_id)
    return [
        BlockAssignment(slot + row, index, block_id)
        for row, block_id in enumerate([first, *others])
    ]


def move_beams(
    requests: Sequence[LlmRequest], manager: BlockManager, copies: list[BlockCopy]
) -> list[BeamMove]:
    """The parent of each row, before it gets another block; its own last block gets a copy."""
    moves: list[BeamMove] = []
    if not requests or requests[0].beams is None:
        return moves  # all have as many beams as the first
    for request in requests:
        assert request.beams is not None
        step, slot = request.beams.step, request.seq_slot
        assert step is not None
        assert slot is not None
        tables = [manager.table_of(request.request_id), *manager.beam_tables_of(request.request_id)]
        has_room = request.num_cached_tokens % manager.tokens_per_block > 0
        for row, (parent, token) in enumerate(zip(*step, strict=True)):
            own_block = -1
            if parent != row and has_room:
                own_block = tables[row][-1]
                copies.append(BlockCopy(tables[parent][-1], own_block))
            moves.append(BeamMove(slot + row, slot + parent, token, own_block))
    return moves


def search(request: LlmRequest, candidates: Candidates, manager: BlockManager) -> None:
    """A step has run: the beams that continue, and their block tables."""
    assert request.beams is not None
    assert request.seq_slot is not None
    num_rows = 1 if request.beams.step is None else request.beam_width
    slots = range(request.seq_slot, request.seq_slot + num_rows)
    has_gone_on = request.advance_beams([candidates.get(slot, ()) for slot in slots])
    if has_gone_on and not request.is_finished:
        assert request.beams.step is not None
        manager.follow_beams(request, request.beams.step.parents)
