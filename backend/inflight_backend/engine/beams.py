"""Rows that search: what the engine tells of them in place of a token.

A row of a search draws nothing. The engine sends the most likely tokens behind it with their log
probabilities: log softmax of the logits divided by the temperature, after everything else that the
request wants done to them. Which of them are followed is decided by the host (`BeamSearch`), and
`BeamMove` brings it back with the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inflight_backend.engine.observer import Observer
from inflight_backend.engine.to_device import to_device
from inflight_scheduler import SlotSetup


class BeamRows:
    """Knows which slots search, and how many candidates each wants."""

    def __init__(self, num_slots: int, device: str) -> None:
        self._device = device
        self._num_candidates = np.zeros(num_slots, dtype=np.int64)
        self._is_used = False

    def set_up(self, setups: Sequence[SlotSetup]) -> None:
        """Take over the setups of a plan."""
        for setup in setups:
            self._num_candidates[setup.slot] = setup.num_candidates
        if setups:
            self._is_used = bool(self._num_candidates.any())

    def are_in(self, slots: Sequence[int]) -> bool:
        """Whether any of ``slots`` searches."""
        return self._is_used and bool(self._num_candidates[list(slots)].any())

    def keep(
        self, slots: Sequence[int], logits: Tensor, temperature: Tensor, observer: Observer
    ) -> None:
        """Send the candidates of the rows of ``slots`` that search.

        logits [N, vocab] float32 and temperature [N], of all rows; 0 counts as 1, since there is no
        draw it could make greedy.
        """
        rows = [row for row, slot in enumerate(slots) if self._num_candidates[slot]]
        numbers = [int(self._num_candidates[slots[row]]) for row in rows]
        index = observer.index(rows, len(slots))
        scale = temperature[index]
        chosen = logits[index] / torch.where(scale > 0, scale, 1.0)[:, None]
        log_probs = torch.log_softmax(chosen, dim=-1)
        values, tokens = log_probs.topk(min(max(numbers), logits.shape[1]), dim=-1)
        observer.keep_candidates([slots[row] for row in rows], numbers, tokens, values)

    def without(self, sampling_slots: Tensor, slots: Sequence[int], padding_slot: int) -> Tensor:
        """``sampling_slots`` [N] with the padding slot for rows that search: what was drawn there
        is nobody's."""
        searches = to_device(torch.from_numpy(self._num_candidates[list(slots)] > 0), self._device)
        return torch.where(searches, padding_slot, sampling_slots)
