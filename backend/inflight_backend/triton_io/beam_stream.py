"""The responses of a beam search: each holds all beams from their beginning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from inflight_backend.requests.inference_request import Array
from inflight_backend.requests.tensors import finish_reason_tensor
from inflight_backend.triton_io.token_stream import AnswerStream, TextWriter
from inflight_scheduler import FinishReason


@dataclass(slots=True, eq=False)
class BeamStream(AnswerStream):
    """All beams of one request; nothing is put together.

    ``make_writer`` is set when text is among the outputs: each beam of each response is written
    from its beginning. Words that end an answer are found by the search.
    """

    repeats_all: ClassVar[bool] = True

    make_writer: Callable[[], TextWriter] | None = None

    def _make(
        self, ids: Sequence[int], extras: Mapping[str, Array], is_final: bool
    ) -> tuple[dict[str, Array], bool]:
        """``extras`` hold all that is known of the beams, and ``ids`` are empty."""
        tensors = dict(extras)
        if self.make_writer is not None:
            texts = []
            beams = zip(tensors["output_ids"][0], tensors["sequence_length"][0], strict=True)
            for beam, length in beams:
                text, _ = self.make_writer().write(beam[:length].tolist(), is_final)
                texts.append(text.encode())
            tensors["text_output"] = np.array(texts, dtype=np.object_)
        tensors.setdefault("finish_reason", finish_reason_tensor(FinishReason.NOT_FINISHED))
        tensors.update(self.constants)
        if is_final and self.zeros is not None and "output_ids" in tensors:
            tensors |= self.zeros.tensors(*tensors["output_ids"].shape[1:])
        outputs = self.outputs | self.final_outputs if is_final else self.outputs
        return {name: tensor for name, tensor in tensors.items() if name in outputs}, False
