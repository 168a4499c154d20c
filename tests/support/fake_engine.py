"""A fake engine that really reads its paged memory, and the model it runs.

The model is a function of the whole text, which the engine reads through its block tables: a block
that was assigned twice, freed too early or lost changes the tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight_scheduler import BeamSearch, ContextChunk, FinishReason, ScheduledBatch, SlotSetup

VOCAB_SIZE = 11
EMPTY = -1


def sight_of(windows: Sequence[int | None]) -> int | None:
    """How many of the last tokens the model of layers with ``windows`` draws from; None: all."""
    sizes = [window for window in windows if window is not None]
    return None if len(sizes) < len(windows) else max(sizes)


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
    seen = text if window_size is None else text[max(len(text) - window_size, 0) :]
    token = _state_of(seen) % VOCAB_SIZE
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
    tables: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_cached: int = 0
    last_token: int = EMPTY
    is_open: bool = False  # drafts ran; the number of accepted ones is not known yet
    recurrent: int = 0  # the hash of the text, as a recurrence knows it


class FakeEngine:
    """Executes batches from their content alone.

    A cell holds a token and, as KV does, a hash of its prefix: a block that is reused behind
    another prefix is detected. All groups of layers write what they see, and it is read in each.
    With snapshots a state for each slot must say the same, as that of a recurrence does.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        windows: Sequence[int | None] = (None,),
        num_snapshots: int | None = None,
    ) -> None:
        self.has_states = num_snapshots is not None
        self.snapshots = [EMPTY] * (num_snapshots or 0)
        self.tokens_per_block = tokens_per_block
        self.windows = windows
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
        self._copy_states(batch)
        for new in batch.new_blocks:
            table = self.slots[new.slot].tables[new.group]
            has_beams = self.slots[new.slot].setup.num_candidates > 0
            if not table and (has_beams or self.windows[new.group] is not None):
                table += [EMPTY] * new.index  # shared by beams (they come with the first move), or
                # behind the window of what is reused
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
        wrong ones are written over later)."""
        done = 0
        for num_tokens, snapshot in run.snapshots:
            end = num_tokens - run.start
            self._write(state, run.tokens[done:end])
            assert done <= end <= len(run.tokens)
            self.snapshots[snapshot], done = state.recurrent, end
        self._write(state, run.tokens[done:])
        drawn = [self._draw(state)] if run.is_last else []
        for draft in run.drafts:
            state.is_open = True
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

    def _copy_states(self, batch: ScheduledBatch) -> None:
        for slot, snapshot in batch.restored:
            self.slots[slot].recurrent = self.snapshots[snapshot]
        for slot, snapshot in batch.saved:
            self.snapshots[snapshot] = self.slots[slot].recurrent

    def _move(self, batch: ScheduledBatch) -> None:
        """Rows take over the table and length of others, but for a block of their own."""
        parents = {move.slot: self.slots[move.parent] for move in batch.beam_moves}
        known = {
            slot: (list(parent.tables[0]), parent.num_cached, parent.recurrent)
            for slot, parent in parents.items()
        }
        for move in batch.beam_moves:
            state = self.slots[move.slot]
            state.tables[0], state.num_cached, state.recurrent = known[move.slot]
            state.last_token = move.token
            if move.own_block >= 0:
                assert state.num_cached // self.tokens_per_block == len(state.tables[0]) - 1
                state.tables[0][-1] = move.own_block

    def _cell(self, state: SlotState, group: int, position: int) -> int:
        index, offset = divmod(position, self.tokens_per_block)
        block_id = state.tables[group][index]
        assert block_id != EMPTY, f"position {position} is in no block"
        return block_id * self.tokens_per_block + offset

    def _write(self, state: SlotState, tokens: Sequence[int]) -> None:
        """In all groups: a token after the other, each of which sees all within the window."""
        for token in tokens:
            before = self._read(state, num_own=1)[1]
            for group in range(len(self.windows)):
                cell = self._cell(state, group, state.num_cached)
                self.memory[cell] = (token, hash((before, token)))
            state.recurrent = hash((state.recurrent, token))
            state.num_cached += 1
        self.num_computed += len(tokens)

    def _read(self, state: SlotState, num_own: int) -> tuple[list[int], int]:
        """The text, 0 where no group sees it, and the hash of all of it. Of a window are seen all
        but ``num_own``: for the next token sees itself, too."""
        text, last = [0] * state.num_cached, 0
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, state.num_cached - window + num_own)
            before = 0
            for position in range(first, state.num_cached):
                token, content = self.memory[self._cell(state, group, position)]
                is_known = position > first or first == 0
                before = hash((before, token)) if is_known else content
                assert content == before, f"position {position} holds KV of another text"
                text[position], last = token, content
        if self.has_states:
            assert state.recurrent == last, "a state is that of another text"
        return text, last

    def _draw(self, state: SlotState) -> int:
        text, _ = self._read(state, num_own=0)
        setup = state.setup
        if setup.num_candidates:
            self.candidates[setup.slot] = likely(
                text, setup.num_candidates, setup.end_id, setup.min_end_position
            )
        state.last_token = draw(
            text, state.setup.end_id, state.setup.min_end_position, sight_of(self.windows)
        )
        return state.last_token
