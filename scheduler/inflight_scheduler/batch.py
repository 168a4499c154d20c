"""The plan of one iteration: all that crosses from the scheduler to the engine.

Frozen, made of integers, and complete: an engine that sees every `ScheduledBatch` in order needs
nothing else to know what to compute and where its KV lives. What there are many of is a tuple: it
takes less than half the time of a dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from inflight_scheduler.sampling import NO_OUTPUTS, OutputParams, SamplingParams


class SlotSetup(NamedTuple):
    """A slot given to a request from this iteration on (first time, or again after a pause).

    ``end_id`` is -1 for none. Before ``min_end_position`` (an absolute position in the token list,
    so that a pause does not move it) ``end_id`` may not be drawn.

    ``outputs`` is what the engine shall tell beside tokens. ``prompt_len`` is where the answer
    begins. ``tokens`` is all text so far, prompt and answer, for ``sampling`` that looks back on
    it, else empty: what is cached need not be in any chunk. With ``num_candidates`` no token is
    drawn: the engine returns so many of the most likely ones; `BeamMove` is the choice.
    """

    slot: int
    request_id: int
    sampling: SamplingParams
    end_id: int = -1
    min_end_position: int = 0
    prompt_len: int = 0
    tokens: tuple[int, ...] = ()
    outputs: OutputParams = NO_OUTPUTS
    num_candidates: int = 0


class ContextChunk(NamedTuple):
    """Tokens ``start .. start + len(tokens)`` of the request in ``slot`` run now.

    Behind those of a last chunk run its ``drafts``, guesses at what comes next. ``snapshots``: the
    state behind the first tokens of the text, after how many and into which snapshot.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    is_last: bool
    drafts: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed, drafts included."""
        return len(self.tokens) + len(self.drafts)

    @property
    def num_drawn(self) -> int:
        """Tokens drawn: after the last token, and after every draft."""
        return len(self.drafts) + 1 if self.is_last else 0

    def split(self, num_tokens: int) -> tuple[ContextChunk, ContextChunk]:
        """The first ``num_tokens``, which draw nothing, and the rest; both have prompt tokens."""
        first = self._replace(
            tokens=self.tokens[:num_tokens], is_last=False, drafts=(), snapshots=()
        )
        rest = self._replace(start=self.start + num_tokens, tokens=self.tokens[num_tokens:])
        return first, rest


@dataclass(frozen=True, slots=True)
class VerifiedSlot:
    """How far ``slot`` has come, where a step with drafts has left that open.

    ``num_cached`` tokens of it count, and ``token`` comes after them.
    """

    slot: int
    num_cached: int
    token: int


class BlockAssignment(NamedTuple):
    """Entry ``index`` of the block table of ``slot`` is ``block_id`` from now on.

    ``group``: of layers, each of which has a table for every slot (`BlockManager`). Entries of
    blocks that are given back are not told: nobody reads them any more.
    """

    slot: int
    index: int  # type: ignore[assignment]  # hides `tuple.index`
    block_id: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class AdapterAssignment:
    """The rows of ``slot`` have the adapter at ``place`` from now on, -1 for none."""

    slot: int
    place: int


class SlotSnapshot(NamedTuple):
    """A slot, and the snapshot of the state of its recurrences."""

    slot: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block ``destination`` gets the content of block ``source``."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BeamMove:
    """The text of ``slot`` is that of ``parent`` before this iteration, and then ``token``.

    So are its block table and whatever else follows from the text. ``own_block``, unless it is -1,
    is the entry of its table that holds the token's position.
    """

    slot: int
    parent: int
    token: int
    own_block: int = -1


@dataclass(frozen=True, slots=True)
class EncoderRun:
    """The encoder reads ``tokens`` now; what it says is kept for ``request_id``."""

    request_id: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnswerAssignment:
    """From now on ``slots`` attend to what the encoder said for ``request_id``, ``num_tokens`` of
    it: its keys and values go to ``block_ids`` of the cross pool, and it is kept no longer."""

    slots: tuple[int, ...]
    request_id: int
    num_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What runs in one iteration.

    ``block_copies`` come before everything else, and all sources are read before any destination
    is written: a source may be the destination of another copy. ``beam_moves`` come next, all
    parents read before any slot is written.

    The engine answers with one token id for each last context chunk, in order, then one for each
    entry of ``generation_slots``, in order. A generation step feeds the last token drawn for the
    slot, at the position after everything the slot has cached. Of a slot with ``num_candidates``
    the token says only that some could follow (-1: none); the candidates come beside it.

    ``draft_runs`` are generation steps with drafts: chunks of the last token drawn, which are
    always last ones. Their answers come between those of the contexts and of generation. For each
    last chunk the engine answers `ContextChunk.num_drawn` tokens: what it draws after the last
    token, then what it would draw after each draft, were it (and all before it) right. Where a
    slot stands then is for the planner to find out: unless the request runs with drafts again, its
    next step says so in ``verified``.

    ``dropped_answers`` (ids of requests) are those of the encoder that nobody will read; they come
    before ``answers`` and ``encoder_runs``. None of these brings a token.
    Where the engine has recurrences, the slots of ``restored`` begin with the state in their
    snapshot, then those of ``saved`` put theirs, as it is before this iteration, into one.
    """

    iteration: int
    setups: tuple[SlotSetup, ...] = ()
    new_blocks: tuple[BlockAssignment, ...] = ()
    context_chunks: tuple[ContextChunk, ...] = ()
    generation_slots: tuple[int, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    beam_moves: tuple[BeamMove, ...] = ()
    num_beams: int = 1
    draft_runs: tuple[ContextChunk, ...] = ()
    verified: tuple[VerifiedSlot, ...] = ()
    adapters: tuple[AdapterAssignment, ...] = ()
    encoder_runs: tuple[EncoderRun, ...] = ()
    answers: tuple[AnswerAssignment, ...] = ()
    dropped_answers: tuple[int, ...] = ()
    restored: tuple[SlotSnapshot, ...] = ()
    saved: tuple[SlotSnapshot, ...] = ()

    @property
    def runs(self) -> tuple[ContextChunk, ...]:
        """Everything that runs with its tokens: context chunks, then draft runs."""
        return self.context_chunks + self.draft_runs if self.draft_runs else self.context_chunks

    @property
    def num_generation_requests(self) -> int:
        """Requests that generate in this iteration, with drafts or without; all without have the
        same number of beams."""
        return len(self.draft_runs) + len(self.generation_slots) // self.num_beams

    @property
    def num_drafts(self) -> int:
        """Draft tokens verified in this iteration."""
        return sum(len(run.drafts) for run in self.runs)

    @property
    def num_drawn(self) -> int:
        """Tokens the engine answers with."""
        return sum(run.num_drawn for run in self.runs) + len(self.generation_slots)

    @property
    def num_context_tokens(self) -> int:
        """Prompt tokens computed in this iteration."""
        return sum(len(chunk.tokens) for chunk in self.context_chunks)

    @property
    def num_encoder_tokens(self) -> int:
        """Tokens that the encoder reads in this iteration."""
        return sum(len(run.tokens) for run in self.encoder_runs)

    @property
    def num_tokens(self) -> int:
        """All tokens that the decoder computes in this iteration."""
        return sum(run.num_tokens for run in self.runs) + len(self.generation_slots)

    def in_parts(self, num_tokens: int) -> list[ScheduledBatch]:
        """The same as several plans, to be run in order: those before the last have ``num_tokens``
        of prompts each, the last one has what is left, and everything that generates.

        Together they draw what this one draws, in its order. Without snapshots in its chunks.
        """
        parts: list[list[ContextChunk]] = [[]]
        room, left = num_tokens, self.num_tokens
        for whole in self.context_chunks:
            chunk = whole
            while left > num_tokens and len(chunk.tokens) > room:
                if room:
                    first, chunk = chunk.split(room)
                    parts[-1].append(first)
                parts.append([])
                left, room = left - num_tokens, num_tokens
            parts[-1].append(chunk)
            room -= len(chunk.tokens)
        first_chunks, *others = map(tuple, parts)
        if not others:
            return [self]
        start = replace(self, context_chunks=first_chunks, generation_slots=(), draft_runs=())
        *middle, last = (ScheduledBatch(self.iteration, context_chunks=each) for each in others)
        end = replace(
            last,
            generation_slots=self.generation_slots,
            num_beams=self.num_beams,
            draft_runs=self.draft_runs,
        )
        return [start, *middle, end]

    @property
    def is_steady(self) -> bool:
        """True when slots generate as they did before, and nothing else is to be done."""
        return not (
            self.setups
            or self.new_blocks
            or self.context_chunks
            or self.draft_runs
            or self.verified
            or self.block_copies
            or self.beam_moves
        )

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to run."""
        return not (
            self.context_chunks or self.generation_slots or self.draft_runs or self.encoder_runs
        )
