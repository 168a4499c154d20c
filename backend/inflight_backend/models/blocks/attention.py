"""The attention of a layer: projections, what is done to heads around the backend, the output."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.attention import AttentionStep, HeadParameters
from inflight_backend.models.blocks.mlp import Linear
from inflight_backend.models.blocks.norms import per_head_norm, plain_rms_norm
from inflight_backend.models.config import AttentionConfig
from inflight_backend.models.layers import Activation
from inflight_backend.models.ops import Ops


class Attention:
    """Of the layer ``index``. Norms of heads with one weight [head_dim] are left to the backend."""

    def __init__(
        self,
        config: AttentionConfig,
        index: int,
        qkv: Linear,
        output: Linear,
        parameters: HeadParameters,
        ops: Ops,
    ) -> None:
        """``qkv`` gives queries, keys, values and gates side by side."""
        self._config, self._index, self._qkv, self._ops = config, index, qkv, ops
        self.output = output
        is_backends = config.qk_norm in (None, "head")
        self._norms = None if is_backends else parameters[:2]
        self._parameters = parameters if is_backends else HeadParameters(sinks=parameters.sinks)

    def __call__(
        self, x: Activation, num_tokens: int, positions: Tensor, step: AttentionStep
    ) -> Tensor:
        """x [T, hidden] -> what the heads found [T, query_size], before `output`."""
        config, gate = self._config, None
        heads = self._qkv(x)
        if config.has_gate:
            sizes = [heads.shape[-1] - config.query_size, config.query_size]
            heads, gate = torch.split(heads, sizes, dim=-1)
        heads = heads.view(num_tokens, -1, config.head_dim)
        if self._norms is not None or config.has_value_norm or config.temperature is not None:
            heads = self._change(heads, positions)
        if config.clip is not None:
            heads = heads.clamp(-config.clip, config.clip)
        found = step.attend(self._index, heads, self._parameters).reshape(num_tokens, -1)
        return found if gate is None else found * gate.sigmoid()

    def _change(self, heads: Tensor, positions: Tensor) -> Tensor:
        config = self._config
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        assert config.kv_source is None, "such layers have norms of the backend only"
        query, key, value = torch.split(heads, sizes, dim=1)
        if self._norms is not None:
            query, key = (
                self._norm(each, weight)
                for each, weight in zip((query, key), self._norms, strict=True)
            )
        if config.has_value_norm:
            value = plain_rms_norm(value, config.qk_norm_kind.eps)
        if config.temperature is not None:
            scale, span, shift = config.temperature
            steps = torch.floor((positions + shift) / span)
            query = query * (1 + scale * torch.log1p(steps))[:, None, None].to(query.dtype)
        return torch.cat((query, key, value), dim=1)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x [T, heads, head_dim], by the layer's kind of norm that the backend does not know."""
        kind = self._config.qk_norm_kind
        if weight is None:
            return plain_rms_norm(x, kind.eps)
        if self._config.qk_norm == "biased":
            return functional.layer_norm(x, x.shape[-1:], weight[0], weight[1], kind.eps)
        if weight.dim() == 2:
            return per_head_norm(x, weight, kind)
        return self._ops.plain_rms_norm(x.flatten(1), weight, kind.eps).view_as(x)
