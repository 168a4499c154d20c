"""What rows may not draw: their end id before its time, and all that a mask forbids."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_backend.engine.ops import Ops
from inflight_backend.engine.slots import SamplingInputs
from inflight_backend.step_outputs import TokenMasks


def restrict(logits: Tensor, sampling: SamplingInputs, masks: Tensor | None, ops: Ops) -> None:
    """Put -inf at what the rows of logits [N, vocab] may not draw now, in place."""
    if sampling.may_forbid_end:
        _forbid_end(logits, sampling)
    if masks is not None:
        ops.mask_logits(logits, masks)  # last: a token they force is drawn


def send_masks(masks: TokenMasks, device: str) -> Tensor:
    """To the device, without waiting for it."""
    tensor = torch.from_numpy(masks)
    if device == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _forbid_end(logits: Tensor, sampling: SamplingInputs) -> None:
    """Put -inf at the end id of rows whose next token comes before their minimum, in place."""
    end_ids = sampling.end_ids
    is_forbidden = (end_ids >= 0) & (end_ids < logits.shape[1])
    is_forbidden &= sampling.positions < sampling.min_end_positions
    columns = end_ids.clamp(0, logits.shape[1] - 1)[:, None]
    kept = logits.gather(1, columns)
    logits.scatter_(1, columns, kept.masked_fill(is_forbidden[:, None], -torch.inf))
