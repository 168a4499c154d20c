"""What a plan says of beams: their rows, their blocks, and where each goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from inflight_scheduler.batch import BeamMove, BlockAssignment, BlockCopy, SlotSetup
from inflight_scheduler.beam_search import Candidate
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.request import LlmRequest

Candidates = Mapping[int, Sequence[Candidate]]
"""What the engine tells of each row of a search, by row."""

NO_CANDIDATES: Candidates = {}


def set_up_rows(setup: SlotSetup, num_rows: int) -> list[SlotSetup]:
    """``setup`` for each row of its slot; the others take over the text of the first one when its
    context is complete."""
    others = range(setup.slot + 1, setup.slot + num_rows)
    return [setup, *(replace(setup, slot=row, tokens=()) for row in others)]


def open_beams(request: LlmRequest, slot: int, manager: BlockManager) -> list[BlockAssignment]:
    """Tables for all rows but the first, which has its whole prompt: what is new in them."""
    manager.open_beams(request)
    first_own = request.prompt_len // manager.tokens_per_block
    return [
        BlockAssignment(slot + row, index, table[index])
        for row, table in enumerate(manager.beams.rows_of(request.request_id), start=1)
        for index in range(first_own, len(table))
    ]


def append_beam_blocks(
    request: LlmRequest, slot: int, manager: BlockManager
) -> list[BlockAssignment]:
    """A block for the next token of each row; there must be room."""
    appended = manager.append_block(request.request_id)
    assert appended is not None, f"request {request.request_id} was scheduled without room"
    index, first = appended
    others = manager.beams.append_blocks(request.request_id)
    return [
        BlockAssignment(slot + row, index, block_id)
        for row, block_id in enumerate([first, *others])
    ]


def move_beams(
    requests: Sequence[LlmRequest], manager: BlockManager, copies: list[BlockCopy]
) -> list[BeamMove]:
    """Where each row goes on, before it gets another block; its own last block gets a copy."""
    moves: list[BeamMove] = []
    if not requests or requests[0].beams is None:
        return moves  # all have as many beams as the first
    for request in requests:
        assert request.beams is not None
        step, slot = request.beams.step, request.seq_slot
        assert step is not None
        assert slot is not None
        tables = [manager.table_of(request.request_id), *manager.beams.rows_of(request.request_id)]
        has_room = request.num_cached_tokens % manager.tokens_per_block > 0
        for row, (parent, token) in enumerate(zip(*step, strict=True)):
            own_block = -1
            if parent != row and has_room:
                own_block = tables[row][-1]
                copies.append(BlockCopy(tables[parent][-1], own_block))
            moves.append(BeamMove(slot + row, slot + parent, token, own_block))
    return moves


def search(request: LlmRequest, candidates: Candidates, manager: BlockManager) -> None:
    """A step has run: which beams go on, and the tables they go on with."""
    assert request.beams is not None
    assert request.seq_slot is not None
    num_rows = 1 if request.beams.step is None else request.beam_width
    slots = range(request.seq_slot, request.seq_slot + num_rows)
    has_gone_on = request.advance_beams([candidates.get(slot, ()) for slot in slots])
    if has_gone_on and not request.is_finished:
        assert request.beams.step is not None
        manager.follow_beams(request, request.beams.step.parents)
