"""Norms over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.config import NormConfig
from inflight_backend.models.ops import Ops


class Norm:
    """x [..., dim] -> [..., dim] of the same dtype."""

    __slots__ = ("_bias", "_config", "_ops", "weight")

    def __init__(
        self, config: NormConfig, weight: Tensor | None, bias: Tensor | None, ops: Ops
    ) -> None:
        """``weight`` [dim] has the offset in it; it may be float32 where x is not."""
        self.weight = weight
        self._config, self._bias, self._ops = config, bias, ops

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of each row."""
        eps = self._config.eps
        if self._config.kind == "rms":
            if self.weight is None:
                return plain_rms_norm(x, eps)
            return self._ops.plain_rms_norm(x, self.weight, eps)
        if self.weight is None or self.weight.dtype == x.dtype:
            return functional.layer_norm(x, x.shape[-1:], self.weight, self._bias, eps)
        bias = None if self._bias is None else self._bias.float()
        return functional.layer_norm(x.float(), x.shape[-1:], self.weight, bias, eps).to(x.dtype)


def plain_rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)``, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def per_head_norm(x: Tensor, weight: Tensor, config: NormConfig) -> Tensor:
    """x [T, H, D] with a weight [H, D] for each head, over D."""
    if config.kind == "rms":
        return plain_rms_norm(x, config.eps) * weight
    return functional.layer_norm(x, x.shape[-1:], eps=config.eps) * weight
