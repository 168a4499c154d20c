"""A mixed step of fixed sizes: what a recording of chunks and generations reads. Chunks are all
runs of a plan: of contexts, and of drafts to verify.

The tokens are packed as generations, then context chunks, then padding, without gaps; so one size
(`MixedSizes.num_tokens`) says what the products of a recording cost, however many of its tokens
generate. What the host knows of them arrives at fixed addresses as int32 words; what only the
device knows (last tokens and positions of generations) is looked up there. Padding is the padding
slot's: it has no context, keeps nothing, and draws nothing that is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inflight_backend.engine.step_buffer import WordBuffer, count_lags
from inflight_backend.models.attention import MixedAttention
from inflight_scheduler import ScheduledBatch

_STEP = 64
_TOKENS_PER_CHUNK = 4
_FEW_CHUNKS = 8
_MANY_DRAWS = 256
_FEW_GENERATIONS = (8, 32)

_Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """What a recording has room for."""

    num_tokens: int
    num_chunks: int
    num_generations: int
    num_draws: int

    def hold(self, other: MixedSizes) -> bool:
        """Whether a step of other sizes fits."""
        return (
            other.num_tokens <= self.num_tokens
            and other.num_chunks <= self.num_chunks
            and other.num_generations <= self.num_generations
            and other.num_draws <= self.num_draws
        )


def sizes_of(batch: ScheduledBatch) -> MixedSizes:
    """What the step of ``batch`` needs."""
    num_chunks, num_generations = len(batch.runs), len(batch.generation_slots)
    return MixedSizes(batch.num_tokens, num_chunks, num_generations, batch.num_drawn)


def mixed_sizes(max_tokens: int, num_slots: int) -> list[MixedSizes]:
    """Sizes of recordings for steps of up to ``max_tokens`` tokens, small ones first.

    Tokens in steps of 64 up to 512, then of an eighth: up to some 180 tokens a step's products take
    as long as reading the weights, beyond them padding costs what it computes. Each with room for
    8, 32 and any number of generations, since that decides into how many splits their attention is
    cut; for chunks of 4 tokens on average, since a program of the context attention leaves early
    for each that is not there; and for 256 draws or one per slot, whose rows alone pass the end of
    the last layer (every draft draws, too).
    """
    sizes, num_tokens = [], min(_STEP, max_tokens)
    while max_tokens > 0:
        most = min(num_tokens, num_slots)
        num_chunks = min(max(num_tokens // _TOKENS_PER_CHUNK, _FEW_CHUNKS), most)
        num_draws = min(num_tokens, max(num_slots, _MANY_DRAWS))
        sizes += [
            MixedSizes(num_tokens, num_chunks, generations, num_draws)
            for generations in (*(few for few in _FEW_GENERATIONS if few < most), most)
        ]
        if num_tokens == max_tokens:
            break
        step = max(_STEP, (1 << (num_tokens.bit_length() - 1)) // 8)
        num_tokens = min(num_tokens + step, max_tokens)
    return sizes


@dataclass(frozen=True, slots=True)
class MixedWords:
    """Words of a mixed step on the device, int32, of fixed sizes and at fixed addresses.

    ``tokens`` are -1 for generations, whose position is not told either. ``token_slots`` say whose
    each token is; chunks that are not there are the padding slot's and have no tokens, behind all
    others. ``query_starts`` begins with the number of generations. ``sample_rows`` are the packed
    rows of all that draw, in plan order, then any.
    """

    generation_slots: Tensor  # [num_generations]
    tokens: Tensor  # [num_tokens]
    token_slots: Tensor
    positions: Tensor
    chunk_slots: Tensor  # [num_chunks]
    chunk_ends: Tensor
    query_starts: Tensor  # [num_chunks + 1]
    sample_rows: Tensor  # [num_draws]


class MixedBuffer:
    """Packs mixed steps, each section at the place where the largest sizes have it."""

    def __init__(self, largest: MixedSizes, generation_slots: Tensor, device: str) -> None:
        """``generation_slots`` [num_slots] int32: where the device finds those of every step."""
        self._generation_slots = generation_slots
        self._padding_slot = len(generation_slots)
        tokens, chunks = largest.num_tokens, largest.num_chunks
        sizes = [tokens, tokens, tokens, chunks, chunks, chunks + 1, largest.num_draws]
        ends = np.cumsum(sizes).tolist()
        self._places = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._buffer = WordBuffer(ends[-1], 0, device)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return self._buffer.pinned_bytes

    def words(self, sizes: MixedSizes) -> MixedWords:
        """Where a step of these sizes lies."""
        device = self._buffer.device
        tokens, slots, positions, chunk_slots, ends, starts, rows = (
            device[place] for place in self._places
        )
        return MixedWords(
            self._generation_slots[: sizes.num_generations],
            tokens[: sizes.num_tokens],
            slots[: sizes.num_tokens],
            positions[: sizes.num_tokens],
            chunk_slots[: sizes.num_chunks],
            ends[: sizes.num_chunks],
            starts[: sizes.num_chunks + 1],
            rows[: sizes.num_draws],
        )

    def send(self, batch: ScheduledBatch, sizes: MixedSizes) -> None:
        """Pack ``batch``, which fits ``sizes``, and start its copy; without anything to run, all is
        padding."""
        words = self._buffer.open()
        tokens, slots, positions, chunk_slots, ends, starts, rows = (
            words[place] for place in self._places
        )
        chunks = batch.runs
        num_chunks, num_generations = len(chunks), len(batch.generation_slots)
        lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
        own_starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        own_slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        starts[0] = num_generations
        starts[1 : num_chunks + 1] = num_generations + lengths.cumsum(dtype=np.int32)
        end = int(starts[num_chunks])
        starts[num_chunks + 1 : sizes.num_chunks + 1] = end
        chunk_slots[:num_chunks], ends[:num_chunks] = own_slots, own_starts + lengths
        chunk_slots[num_chunks : sizes.num_chunks] = self._padding_slot
        ends[num_chunks : sizes.num_chunks] = 0

        context, padding = slice(num_generations, end), slice(end, sizes.num_tokens)
        tokens[:num_generations], tokens[padding], positions[padding] = -1, 0, 0
        slots[:num_generations], slots[padding] = batch.generation_slots, self._padding_slot
        if chunks:
            tokens[context] = np.concatenate([chunk.tokens + chunk.drafts for chunk in chunks])
        slots[context] = np.repeat(own_slots, lengths)
        first_positions = own_starts - starts[:num_chunks]  # of the batch's first token
        positions[context] = np.arange(num_generations, end) + np.repeat(first_positions, lengths)

        num_drawn = np.array([chunk.num_drawn for chunk in chunks], dtype=np.int32)
        of_chunks = np.repeat(starts[1 : num_chunks + 1] - 1, num_drawn) - count_lags(num_drawn)
        end = len(of_chunks) + num_generations
        rows[: len(of_chunks)], rows[len(of_chunks) : end] = of_chunks, np.arange(num_generations)
        rows[end : sizes.num_draws] = 0
        self._buffer.send(self._places[-1].stop)


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """One such step as the decoder sees it: tokens [num_tokens] and the rows that draw
    [num_draws], int64."""

    tokens: Tensor
    sample_rows: Tensor
    attention: MixedAttention
