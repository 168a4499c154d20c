"""What an attention backend is: who writes keys and values into the pool and attends over it.

A backend is made once for a pool; `AttentionBackend.begin` is called once per step with what the
step looks like, and answers with an object that runs one layer after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

HeadNorms: TypeAlias = tuple[Tensor, Tensor] | None
"""Weights [head_dim] of the norms of query and key heads, where a model has them."""


@dataclass(frozen=True, slots=True)
class HostLengths:
    """Tokens of this step and tokens in all, of each sequence."""

    query: npt.NDArray[np.int64]
    context: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The sequences of a step: context chunks first, then one token of each generation.

    On the device: ``block_tables`` [num_sequences, max_blocks] int32, ``context_lengths``
    [num_sequences] int32 (cached plus the tokens of this step), ``query_starts``
    [num_context_sequences + 1] int32, ``positions`` and ``slot_mapping`` [num_tokens] int64. A
    padding row has context length 0 and slot -1. The two lengths also lie on the host, so that no
    backend has to wait for the device to learn them; a step that is being captured has none
    (``host`` is None), since its lengths differ from replay to replay.
    """

    num_context_sequences: int
    num_context_tokens: int
    block_tables: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    positions: Tensor
    slot_mapping: Tensor
    host: HostLengths | None


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """The sequences of a mixed step of fixed sizes (`mixed_step`), all on the device.

    Generations are the first tokens, one each: ``generation_tables`` [num_generations, max_blocks]
    int32 and ``generation_lengths`` [num_generations] int32, cached plus the token of this step, 0
    where there is none. Chunk ``c`` has the tokens ``query_starts[c] .. query_starts[c + 1]``
    (int32), ``chunk_tables`` [num_chunks, max_blocks] and ``chunk_lengths`` [num_chunks] int32.
    ``positions`` and ``slot_mapping`` [num_tokens] int64 are as in `AttentionInputs`.
    """

    generation_tables: Tensor
    generation_lengths: Tensor
    chunk_tables: Tensor
    chunk_lengths: Tensor
    query_starts: Tensor
    positions: Tensor
    slot_mapping: Tensor


class AttentionStep(Protocol):
    """One step; layers are run in order, each once."""

    def attend(self, layer: int, heads: Tensor, norms: HeadNorms) -> Tensor:
        """``heads`` [T, H + 2 * KVH, D] are query, key and value. Norm and turn query and key,
        store key and value, then attend: -> [T, H, D]."""


class AttentionBackend(Protocol):
    """Runs on the memory of one `KvPool`."""

    reads_past_the_end: bool
    """True if stale slots of a block are read with weight 0, where a NaN would still count."""

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Prepare what all layers of the step share."""


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """One whose steps a graph can hold: those of generations alone, and mixed ones of fixed sizes,
    need no `HostLengths`."""

    def begin_mixed(self, inputs: MixedAttention) -> AttentionStep:
        """`begin` for a mixed step of fixed sizes."""
