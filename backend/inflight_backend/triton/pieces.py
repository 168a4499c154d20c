"""What one request has to say in one round of sending: consecutive responses as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight_backend.inference_request import Array, NamedTensor
from inflight_backend.triton.extras import merge


@dataclass(slots=True)
class Piece:
    """Tokens, the other tensors by name, and perhaps the end.

    ``is_whole``: each response says everything anew (beams), and all its tensors are ``extras``.
    """

    ids: list[int] = field(default_factory=list)
    extras: dict[str, Array] = field(default_factory=dict)
    is_final: bool = False
    error: str = ""
    is_whole: bool = False

    def add(self, tensors: Sequence[NamedTensor], is_final: bool, error: str) -> None:
        """Append one response."""
        self.is_final = is_final or bool(error)
        self.error = self.error or error
        if self.is_whole:
            self.extras.update(tensors)
            return
        for name, tensor in tensors:
            if name == "output_ids":
                self.ids += tensor.ravel().tolist()
        if len(tensors) > 2:  # sequence_length follows from the ids
            extras = {n: t for n, t in tensors if n not in ("output_ids", "sequence_length")}
            self.extras = merge(self.extras, extras) if self.extras else extras
