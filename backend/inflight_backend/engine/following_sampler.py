"""Sampling on the ranks that draw nothing: they give a part of the logits and get the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight_backend.engine.config import EngineConfig
from inflight_backend.engine.sampler import LogitsRules
from inflight_backend.engine.slot_table import SamplingInputs, SlotTable
from inflight_backend.engine.step_buffer import StepWords
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.parallel.collectives import Collectives
from inflight_scheduler import SlotSetup


class FollowingSampler:
    """As `Sampler`, which the first rank has: it meets that one's collectives, in their order."""

    def __init__(
        self, config: EngineConfig, decoder: Decoder, slots: SlotTable, ranks: Collectives
    ) -> None:
        self._num_rows = config.num_slots
        self._decoder, self._slots, self._ranks = decoder, slots, ranks

    def set_up(self, setups: Sequence[SlotSetup]) -> None:
        """The first rank knows what requests want."""

    def move(self, words: StepWords) -> None:
        """The first rank knows what requests want."""

    def is_plain(self, slots: Sequence[int]) -> bool:
        """Whatever the first rank does, it needs the logits once and tells the tokens once."""
        return True

    def sample(
        self,
        hidden: Tensor,
        sampling: SamplingInputs,
        slots: Sequence[int],
        rules: LogitsRules,
    ) -> Tensor:
        """See `Sampler.sample`."""
        size = self._num_rows
        if len(slots) <= size:
            return self.draw(hidden, sampling)
        places = (slice(start, start + size) for start in range(0, len(slots), size))
        return torch.cat([self.draw(hidden[rows], sampling.part(rows)) for rows in places])

    def draw(self, hidden: Tensor, sampling: SamplingInputs) -> Tensor:
        """See `Sampler.draw`; behind the first stage of a pipeline nobody needs the tokens."""
        tokens = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        if len(hidden) == 0 or not self._ranks.place.is_first_stage:
            return tokens
        self._decoder.plain_logits(hidden)
        tokens = self._ranks.share(tokens)
        self._slots.store(sampling.slots, tokens)
        return tokens
