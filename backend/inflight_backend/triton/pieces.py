"""What one request has to say in one round of sending: consecutive responses as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.triton_io.extras import Extras


@dataclass(slots=True)
class Piece:
    """Tokens, the other tensors by name, and perhaps the end.

    ``is_whole``: each response says everything anew (beams), and all its tensors are ``extras``.
    """

    ids: list[int] = field(default_factory=list)
    extras: Extras = field(default_factory=Extras)
    is_final: bool = False
    error: str = ""
    is_whole: bool = False

    def add(self, tensors: Sequence[NamedTensor], is_final: bool, error: str) -> None:
        """Append one response."""
        self.is_final = is_final or bool(error)
        self.error = self.error or error
        if self.is_whole:
            self.extras.last.update(tensors)
            return
        for name, tensor in tensors:
            if name == "output_ids":
                if tensor.size == 1:  # nearly always
                    self.ids.append(tensor.item())
                else:
                    self.ids += tensor.ravel().tolist()
            elif name != "sequence_length":  # that follows from the ids
                self.extras.add(name, tensor)
