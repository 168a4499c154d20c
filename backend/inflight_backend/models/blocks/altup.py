"""Alternating updates (AltUp, NeurIPS 2023) and a learned residual (LAuReL, arXiv 2411.07501), as
Gemma 3n has them: a token is several streams, of which a layer computes one and corrects all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inflight_backend.models.blocks.mlp import Linear
from inflight_backend.models.blocks.norms import Norm
from inflight_backend.models.config import AltUpConfig
from inflight_backend.models.ops import Ops

_LEAST_SQUARE = 1e-5  # of a stream that is made as large as the first


class Streams:
    """The way into the streams, and back: x [T, hidden] -> [S, T, hidden] -> [T, hidden]."""

    def __init__(self, openers: Sequence[Linear], closers: Sequence[Linear], ops: Ops) -> None:
        """Linears of all streams but the first."""
        self._openers, self._closers, self._ops = openers, closers, ops

    def open(self, x: Tensor) -> Tensor:
        """The embeddings and what is made of them, all as large."""
        given = self._ops.to_activation(x)
        return torch.stack([x, *(_as_large(opener(given), x) for opener in self._openers)])

    def close(self, streams: Tensor) -> Tensor:
        """Their mean, all as large as the first."""
        first, *others = streams.unbind()
        closed = [
            _as_large(closer(self._ops.to_activation(each)), first)
            for closer, each in zip(self._closers, others, strict=True)
        ]
        return torch.stack([first, *closed]).mean(0)


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """x times the square mean root of ``other``, over its own, row by row."""
    wanted = other.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()


class AltUp:
    """What a layer does around its computation of one stream."""

    def __init__(
        self,
        config: AltUpConfig,
        router: Linear,
        router_norm: Norm,
        predictions: Linear,
        corrections: Linear,
        scale: Tensor,
    ) -> None:
        """``router`` from hidden to S, ``predictions`` from S to S * S, ``corrections`` from S to
        S, all of plain numbers; ``scale`` [hidden]."""
        self._config, self._router, self._router_norm = config, router, router_norm
        self._predictions, self._corrections, self._scale = predictions, corrections, scale

    def predict(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """streams [S, T, hidden] as they are expected behind the layer, and the one it computes."""
        modes = self._route(streams[self._config.active])
        mixing = self._predictions(modes).view(len(modes), *[len(streams)] * 2)
        predicted = torch.einsum("tji,ith->jth", mixing, streams) + streams
        return predicted, predicted[self._config.active]

    def correct(self, predicted: Tensor, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """``predicted`` [S, T, hidden] by what the layer found, x [T, hidden]; all but the first
        get what ``branch`` makes of the stream that was computed."""
        shares = self._corrections(self._route(x)) + 1.0
        innovation = x - predicted[self._config.active]
        corrected = innovation * shares.t()[..., None] + predicted
        first = corrected[self._config.active]
        corrected[1:] += branch(first * self._scale if self._config.has_scale else first)
        return corrected

    def _route(self, x: Tensor) -> Tensor:
        routed = self._router(self._router_norm(x) / x.shape[-1])
        return torch.tanh(routed.float()).to(x.dtype)


class Laurel:
    """A residual of low rank: normed x [T, hidden] -> [T, hidden]; `mix` adds it."""

    def __init__(self, left: Linear, right: Linear, norm: Norm, ops: Ops) -> None:
        self._left, self._right, self._norm, self._ops = left, right, norm, ops

    def mix(self, x: Tensor, normed: Tensor) -> Tensor:
        """x behind attention, and what attention has read; their spread stays."""
        low = self._left(self._ops.to_activation(normed))
        found = normed + self._norm(self._right(self._ops.to_activation(low)))
        return (x + found) / math.sqrt(2)
