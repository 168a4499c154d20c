"""Which tokens a row may draw, as one bit each."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_logits(logits: Tensor, masks: Tensor) -> None:
    """Forbid tokens of some rows of ``logits`` [N, V] float32, in place.

    A row of ``masks`` [M, 2 + ceil(V / 32)] int32 holds the row of ``logits`` it is for, the one
    token that must be drawn there (-1: none), and a bit for each token, the lowest first: tokens
    without one become -inf. A token that must be drawn gets 0 and all others -inf, whatever they
    were. At most one mask per row.
    """
    if len(masks) == 0:
        return
    vocabulary = logits.shape[1]
    rows, forced = masks[:, 0].long(), masks[:, 1].long()
    shifts = torch.arange(32, device=masks.device, dtype=torch.int32)
    bits = (masks[:, 2:, None] >> shifts) & 1  # [M, words, 32]
    is_allowed = bits.reshape(len(masks), -1)[:, :vocabulary] != 0
    chosen = torch.arange(vocabulary, device=masks.device) == forced[:, None]
    free = logits[rows].masked_fill(~is_allowed, -torch.inf)
    only = torch.zeros_like(free).masked_fill(~chosen, -torch.inf)
    logits[rows] = torch.where(forced[:, None] >= 0, only, free)
