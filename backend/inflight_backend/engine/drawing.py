"""What is done to logits around a draw, beside adjustments and filters; nothing waits for the
device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inflight_backend.engine.interface import (
    EditSource,
    MaskSource,
    TokenMasks,
    edits_of_rows,
    masks_of_rows,
)
from inflight_backend.engine.slots import SamplingInputs
from inflight_backend.engine.to_device import to_device
from inflight_backend.models.ops import Ops


@dataclass(slots=True)
class HostRules:
    """What the host wants done to the logits of a step beside what its slots say."""

    edits: EditSource | None = None
    masks: MaskSource | None = None

    def __bool__(self) -> bool:
        return self.edits is not None or self.masks is not None

    def parts(self, num_rows: int, size: int) -> Iterator[tuple[slice, HostRules]]:
        """``size`` rows at a time, with the rules for them; each source is asked once."""
        masks = None if self.masks is None else self.masks()
        edits = None if self.edits is None else self.edits()
        for start in range(0, num_rows, size):
            rows = slice(start, start + size)
            yield (
                rows,
                HostRules(
                    None if edits is None else partial(edits_of_rows, edits, rows),
                    None if masks is None else partial(masks_of_rows, masks, rows),
                ),
            )


def edit_logits(logits: Tensor, source: EditSource | None) -> None:
    """Let the host's edits change rows of logits [N, vocab]."""
    if source is None:
        return
    stream = torch.cuda.current_stream().cuda_stream if logits.is_cuda else None
    for row, edit in source():
        edit(logits[row].view(1, 1, -1), stream)


def send_masks(source: MaskSource | None, device: str) -> Tensor | None:
    """The masks of ``source`` on their way to the device."""
    if source is None:
        return None
    masks: TokenMasks = source()
    return to_device(torch.from_numpy(masks), device)


def restrict(logits: Tensor, sampling: SamplingInputs, masks: Tensor | None, ops: Ops) -> None:
    """Put -inf at what the rows of logits [N, vocab] may not draw now, in place."""
    if sampling.may_forbid_end:
        _forbid_end(logits, sampling)
    if masks is not None:
        ops.mask_logits(logits, masks)  # last: a token they force is drawn


def _forbid_end(logits: Tensor, sampling: SamplingInputs) -> None:
    """Put -inf at the end id of rows whose next token comes before their minimum, in place."""
    end_ids = sampling.end_ids.long()
    is_forbidden = (end_ids >= 0) & (end_ids < logits.shape[1])
    is_forbidden &= sampling.positions < sampling.min_end_positions
    columns = end_ids.clamp(0, logits.shape[1] - 1)[:, None]
    kept = logits.gather(1, columns)
    logits.scatter_(1, columns, kept.masked_fill(is_forbidden[:, None], -torch.inf))
