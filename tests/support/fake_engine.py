"""A fake engine that really reads its paged memory, and the model it runs.

The model is a function of the whole text, which the engine reads through its block tables: a block
that was assigned twice, freed too early or lost changes the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight_scheduler import BeamSearch, ContextChunk, FinishReason, ScheduledBatch, SlotSetup

VOCAB_SIZE = 11
EMPTY = -1


def _state_of(text: Sequence[int]) -> int:
    """A number that depends on every token of ``text`` and on their order."""
    state = 17
    for token in text:
        state = (state * 31 + token + 1) % 1_000_003
    return state


def draw(
    text: Sequence[int], end_id: int, min_end_position: int, window_size: int | None = None
) -> int:
    """The model: a token that depends on the last ``window_size`` tokens of ``text``; before
    ``min_end_position`` it is not the end id."""
    token = _state_of(text if window_size is None else text[-window_size:]) % VOCAB_SIZE
    if token == end_id and len(text) < min_end_position:
        return (token + 1) % VOCAB_SIZE
    return token


def tokens_alone(
    prompt: Sequence[int],
    max_new: int,
    end_id: int,
    min_length: int,
    window_size: int | None = None,
) -> list[int]:
    """What a request generates alone in the engine."""
    text = list(prompt)
    while len(text) < len(prompt) + max_new:
        text.append(draw(text, end_id, len(prompt) + min_length, window_size))
        if text[-1] == end_id:
            break
    return text


def likely(
    text: Sequence[int], number: int, end_id: int, min_end_position: int
) -> list[tuple[int, float]]:
    """The likeliest tokens behind ``text``, which depend on all of it, with log probabilities."""
    state = _state_of(text)
    return [
        ((state + 3 * place) % VOCAB_SIZE, -(1 + (state // VOCAB_SIZE + 5 * place) % 13) / 4)
        for place in range(number)
        if (state + 3 * place) % VOCAB_SIZE != end_id or len(text) >= min_end_position
    ]


def beams_alone(prompt: Sequence[int], search: BeamSearch, min_length: int) -> list[int]:
    """Prompt and best answer of a search that runs alone, up to the end of ``search``."""
    number, end_id = 2 * search.params.width, search.end_id
    texts = [list(prompt)]
    while True:
        rows = [likely(text, number, end_id, len(prompt) + min_length) for text in texts]
        assert search.advance(rows)
        if search.finish_reason is not FinishReason.NOT_FINISHED:
            text = list(prompt)
            search.write(text, len(prompt))
            return text
        assert search.step is not None
        moves = zip(*search.step, strict=True)
        texts = [[*texts[parent], token] for parent, token in moves]


@dataclass
class SlotState:
    """What the fake engine keeps for one slot."""

    setup: SlotSetup
    table: list[int] = field(default_factory=list)
    num_cached: int = 0
    last_token: int = EMPTY
    is_open: bool = False  # drafts ran; the number of accepted ones is not known yet


class FakeEngine:
    """Executes batches from their content alone.

    A cell holds a token and, as KV does, a hash of its prefix: a block that is reused behind
    another prefix is detected. With a window the blocks of a table are written in turn.
    """

    def __init__(
        self, num_blocks: int, tokens_per_block: int, window_size: int | None = None
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.window_size = window_size
        self.memory: list[tuple[int, int]] = [(EMPTY, EMPTY)] * (num_blocks * tokens_per_block)
        self.slots: dict[int, SlotState] = {}
        self.num_computed = 0
        self.candidates: dict[int, list[tuple[int, float]]] = {}

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """The tokens of last context chunks, draft runs and generation slots."""
        self._copy(batch)
        self._move(batch)
        self.candidates = {}
        for setup in batch.setups:
            self.slots[setup.slot] = SlotState(setup)
        for new in batch.new_blocks:
            table = self.slots[new.slot].table
            if self.slots[new.slot].setup.num_candidates and not table:
                table += [EMPTY] * new.index  # shared blocks of beams come with the first move
            assert new.index == len(table), "a hole in a block table"
            table.append(new.block_id)
        for each in batch.verified:
            state = self.slots[each.slot]
            assert state.is_open, "verified twice"
            state.num_cached, state.last_token, state.is_open = each.num_cached, each.token, False
        drawn = []
        for chunk in batch.context_chunks:
            state = self.slots[chunk.slot]
            if state.num_cached == 0:
                state.num_cached = chunk.start  # the rest is in blocks that are reused
            assert chunk.start == state.num_cached
            drawn += self._run(state, chunk)
        for run in batch.draft_runs:
            state = self.slots[run.slot]
            assert state.is_open or (run.start, run.tokens) == (
                state.num_cached,
                (state.last_token,),
            )
            state.num_cached = run.start
            drawn += self._run(state, run)
        for slot in batch.generation_slots:
            assert not self.slots[slot].is_open, "the number of accepted drafts was not sent"
            self._write(self.slots[slot], (self.slots[slot].last_token,))
            drawn.append(self._draw(self.slots[slot]))
        return drawn

    def _run(self, state: SlotState, run: ContextChunk) -> list[int]:
        """Write the tokens and draw behind the last one; all drafts likewise, right or wrong (the
        wrong ones are written over later). In a window the wrong ones would take the place of what
        is still seen, so nothing is done behind the first of them."""
        self._write(state, run.tokens)
        drawn = [self._draw(state)] if run.is_last else []
        for index, draft in enumerate(run.drafts):
            state.is_open = True
            if self.window_size is not None and draft != drawn[-1]:
                return drawn + [EMPTY] * (len(run.drafts) - index)
            self._write(state, (draft,))
            drawn.append(self._draw(state))
        return drawn

    def _copy(self, batch: ScheduledBatch) -> None:
        size = self.tokens_per_block
        contents = [
            self.memory[c.source * size : (c.source + 1) * size] for c in batch.block_copies
        ]
        for copy, content in zip(batch.block_copies, contents, strict=True):
            self.memory[copy.destination * size : (copy.destination + 1) * size] = content

    def _move(self, batch: ScheduledBatch) -> None:
        """Rows take over the table and length of others, but for a block of their own."""
        parents = {move.slot: self.slots[move.parent] for move in batch.beam_moves}
        known = {slot: (list(parent.table), parent.num_cached) for slot, parent in parents.items()}
        for move in batch.beam_moves:
            state = self.slots[move.slot]
            state.table, state.num_cached = known[move.slot]
            state.last_token = move.token
            if move.own_block >= 0:
                assert state.num_cached // self.tokens_per_block == len(state.table) - 1
                state.table[-1] = move.own_block

    def _cell(self, state: SlotState, position: int) -> int:
        index, offset = divmod(position, self.tokens_per_block)
        if self.window_size is not None:
            index %= -(-self.window_size // self.tokens_per_block)
        return state.table[index] * self.tokens_per_block + offset

    def _write(self, state: SlotState, tokens: Sequence[int]) -> None:
        position = state.num_cached
        before = self.memory[self._cell(state, position - 1)][1] if position else 0
        for token in tokens:
            before = hash((before, token))
            self.memory[self._cell(state, state.num_cached)] = (token, before)
            state.num_cached += 1
        self.num_computed += len(tokens)

    def _draw(self, state: SlotState) -> int:
        first = 0 if self.window_size is None else max(0, state.num_cached - self.window_size)
        text = [0] * first  # out of sight
        before = 0
        for position in range(first, state.num_cached):
            token, content = self.memory[self._cell(state, position)]
            is_known = position > first or first == 0
            before = hash((before, token)) if is_known else content
            assert content == before, f"position {position} holds KV of another text"
            text.append(token)
        setup = state.setup
        if setup.num_candidates:
            self.candidates[setup.slot] = likely(
                text, setup.num_candidates, setup.end_id, setup.min_end_position
            )
        state.last_token = draw(
            text, state.setup.end_id, state.setup.min_end_position, self.window_size
        )
        return state.last_token
