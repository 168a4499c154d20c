"""The cache of an encoder's answers, and attention over it beside that over the text.

The answers have blocks and block tables of their own. Their keys and values are written once, when
the context of a request starts, and read by every step of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_backend.models.attention import (
    AttentionBackend,
    AttentionInputs,
    AttentionStep,
    HeadParameters,
)
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.kv_cache import KvPool, RecurrentStates
from inflight_kernels import reference


def write_answer(decoder: Decoder, answer: Tensor, pool: KvPool, block_ids: Sequence[int]) -> None:
    """Keys and values of an encoder's ``answer`` [n, hidden] into these blocks of ``pool``."""
    size = pool.tokens_per_block
    if len(answer) % size:  # what is left of others in the last one is read with weight 0
        pool.clean(block_ids[-1:])
    blocks = torch.tensor(block_ids, device=answer.device)
    places = (blocks[:, None] * size + torch.arange(size, device=answer.device)).flatten()
    for layer, keys, values in decoder.cross_keys_and_values(answer):
        reference.write_kv(keys, values, *pool.layer(layer), places[: len(answer)])


class CrossedAttention:
    """Attention over the text (``own``), and over the answers (``cross``)."""

    can_be_captured = can_capture_chunks = False

    def __init__(self, own: AttentionBackend, cross: AttentionBackend) -> None:
        self._own, self._cross = own, cross
        self.reads_past_the_end = own.reads_past_the_end

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Plan both."""
        assert inputs.cross is not None
        return _CrossedStep(self._own.begin(inputs), self._cross.begin(inputs.cross))


@dataclass(frozen=True, slots=True)
class _CrossedStep:
    own: AttentionStep
    cross: AttentionStep | None

    @property
    def inputs(self) -> AttentionInputs:
        return self.own.inputs

    @property
    def states(self) -> RecurrentStates | None:
        return self.own.states

    def attend(self, layer: int, heads: Tensor, parameters: HeadParameters) -> Tensor:
        return self.own.attend(layer, heads, parameters)
