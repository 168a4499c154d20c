"""A second embedding of tokens, with a vector for each layer (Gemma 3n and 4, the small ones)."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from inflight_backend.models.blocks.activations import Activate
from inflight_backend.models.blocks.mlp import Linear
from inflight_backend.models.blocks.norms import Norm
from inflight_backend.models.ops import Ops


class LayerInputs:
    """tokens [T] and their embeddings [T, hidden] -> [L, T, size], one for each of L layers."""

    def __init__(
        self,
        embedding: Callable[[Tensor], Tensor],
        projection: Linear,
        norm: Norm,
        size: int,
        ops: Ops,
        *,
        num_rows: int | None = None,
    ) -> None:
        """``embedding``: numbers of rows [T] -> [T, L * size]; ``projection`` from hidden to
        L * size; ``norm`` over size. ``num_rows``: the last tokens of the vocabulary have none."""
        self._num_rows = num_rows
        self._embedding, self._projection, self._norm = embedding, projection, norm
        self._size, self._ops = size, ops

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """One step's tokens."""
        found = self._projection(self._ops.to_activation(x)) / math.sqrt(x.shape[1])
        found = self._norm(found.view(-1, self._size))
        if self._num_rows is not None:  # the others are no text, and have what token 0 has
            tokens = tokens.masked_fill(tokens >= self._num_rows, 0)
        own = self._embedding(tokens).view(-1, self._size) * math.sqrt(self._size)
        given = (found + own) * math.sqrt(0.5)
        return given.view(len(tokens), -1, self._size).transpose(0, 1)


class LayerInputBranch:
    """What a layer adds for its input: x [T, hidden], input [T, size] -> [T, hidden]."""

    def __init__(
        self, gate: Linear, projection: Linear, norm: Norm, activation: Activate, ops: Ops
    ) -> None:
        self._gate, self._projection, self._norm = gate, projection, norm
        self._activation, self._ops = activation, ops

    def __call__(self, x: Tensor, given: Tensor) -> Tensor:
        """One step's tokens."""
        return x + self.added(x, given)

    def added(self, x: Tensor, given: Tensor) -> Tensor:
        """What is added to them."""
        inner = self._activation(self._gate(self._ops.to_activation(x))) * given
        return self._norm(self._projection(self._ops.to_activation(inner)))
