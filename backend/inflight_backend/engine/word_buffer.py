"""int32 words on their way to the device, at fixed addresses there.

On a GPU there are two host sides, page-locked: one is filled while the copy of the other may still
be on its way. On a CPU host and device side are the same memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from inflight_backend.engine.token_reader import new_event


class WordBuffer:
    """Owner of both sides, ``fill`` everywhere until something is sent."""

    def __init__(self, num_words: int, fill: int, device: str) -> None:
        is_cuda = device != "cpu"
        self._hosts = [
            torch.full((num_words,), fill, dtype=torch.int32, pin_memory=is_cuda)
            for _ in range(2 if is_cuda else 1)
        ]
        self._words = [host.numpy() for host in self._hosts]
        self._copied = [new_event() for _ in self._hosts] if is_cuda else []
        self._turn = 0
        self.device = self._hosts[0].to(device)  # the same memory on a CPU

    def __len__(self) -> int:
        return len(self.device)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return sum(host.nbytes for host in self._hosts if host.is_pinned())

    def open(self) -> npt.NDArray[np.int32]:
        """The words to be sent next, once the plan before the last one has been copied."""
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._words[self._turn]

    def send(self, num_words: int) -> None:
        """Start the copy of the first ``num_words`` of what `open` gave."""
        if self._copied:
            self.device[:num_words].copy_(self._hosts[self._turn][:num_words], non_blocking=True)
            self._copied[self._turn].record()
            self._turn = 1 - self._turn
