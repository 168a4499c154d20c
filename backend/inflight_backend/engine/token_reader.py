"""Drawn tokens on their way to the host: a copy nobody waits for until the tokens are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inflight_backend.engine.interface import StepOutputs
from inflight_backend.engine.observer import PendingOutputs

_DEPTH = 2  # steps whose tokens may be on their way at once


class PendingTokens:
    """The tokens of a step that may still run."""

    __slots__ = ("_outputs", "_tokens", "_wait")

    def __init__(
        self, tokens: Tensor, wait: Callable[[], object], outputs: PendingOutputs | None = None
    ) -> None:
        self._tokens = tokens
        self._wait = wait
        self._outputs = outputs

    def read(self) -> list[int]:
        """Wait for the step and return its tokens, in plan order."""
        self._wait()
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def read_outputs(self) -> StepOutputs | None:
        """What the step brought beside tokens, once these are read; None if no request asked."""
        return None if self._outputs is None else self._outputs.read()


class TokenReader:
    """Copies tokens to the host: on CUDA through pinned buffers, each with an event.

    The tokens of a step must be read before those of the step after the next are sent.
    """

    def __init__(self, max_tokens: int, device: str) -> None:
        self._turn = 0
        self._lanes: Sequence[tuple[Tensor, torch.cuda.Event]] = []
        if device != "cpu":
            self._lanes = [
                (torch.empty(max_tokens, dtype=torch.int64, pin_memory=True), new_event())
                for _ in range(_DEPTH)
            ]

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return sum(host.nbytes for host, _ in self._lanes)

    def send(self, tokens: Tensor, outputs: PendingOutputs | None = None) -> PendingTokens:
        """Start the copy of tokens [n] int64; the tensor may be overwritten by later steps.

        ``outputs``: copies that were started before this one.
        """
        if not self._lanes:
            return PendingTokens(tokens.clone(), _return_at_once, outputs)
        host, event = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        target = host[: len(tokens)]
        target.copy_(tokens, non_blocking=True)
        event.record()
        return PendingTokens(target, event.synchronize, outputs)


def new_event() -> torch.cuda.Event:
    """An event of the current CUDA device."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _return_at_once() -> None:
    """On a CPU a step has run when it returns."""
