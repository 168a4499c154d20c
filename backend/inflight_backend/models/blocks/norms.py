"""Norms over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.config import NormConfig
from inflight_backend.models.ops import Ops


class Norm:
    """x [..., dim] -> [..., dim] of the same dtype."""

    __slots__ = ("_ops", "bias", "config", "weight")

    def __init__(
        self, config: NormConfig, weight: Tensor | None, bias: Tensor | None, ops: Ops
    ) -> None:
        """``weight`` [dim] has the offset in it; it may be float32 where x is not."""
        self.config, self.weight, self.bias, self._ops = config, weight, bias, ops

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of each row."""
        eps = self.config.eps
        if self.config.kind != "rms":
            return self._ops.layer_norm(x, self.weight, self.bias, eps)
        if self.weight is None:
            return plain_rms_norm(x, eps)
        return self._ops.plain_rms_norm(x, self.weight, eps)


def plain_rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)``, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def per_head_norm(x: Tensor, weight: Tensor, config: NormConfig) -> Tensor:
    """x [T, H, D] with a weight [H, D] for each head, over D."""
    if config.kind == "rms":
        return plain_rms_norm(x, config.eps) * weight
    return functional.layer_norm(x, x.shape[-1:], eps=config.eps) * weight
