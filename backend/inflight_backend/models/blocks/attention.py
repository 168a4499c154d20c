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
from inflight_backend.models.parallel.collectives import NO_COLLECTIVES, Collectives


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
        ranks: Collectives = NO_COLLECTIVES,
    ) -> None:
        """``qkv`` gives queries, keys, values and gates side by side."""
        self._ranks = ranks
        self._config, self._ops = config, ops
        self.index, self.qkv = index, qkv
        self.output = output
        is_backends = config.qk_norm in (None, "head")
        self._norms = None if is_backends else parameters[:2]
        if not is_backends:
            parameters = parameters._replace(query_norm=None, key_norm=None)
        self.parameters = parameters

    @property
    def is_plain(self) -> bool:
        """Whether a step's attention gets what `qkv` gives, but for `full_norms`, and `output` what
        it finds."""
        config = self._config
        changes = config.has_gate or config.has_value_norm or config.temperature or config.clip
        is_normed = self._norms is not None and self.full_norms is None
        return not (is_normed or changes)

    @property
    def full_norms(self) -> tuple[tuple[Tensor, Tensor], float] | None:
        """The weights of RMS norms over all queries, and over all keys, and their eps; None without
        such norms."""
        if self._config.qk_norm != "full" or self._norms is None:
            return None
        query, key = self._norms
        assert query is not None
        assert key is not None
        return (query, key), self._config.qk_norm_kind.eps

    def __call__(
        self, x: Activation, num_tokens: int, positions: Tensor, step: AttentionStep
    ) -> Tensor:
        """x [T, hidden] -> what the heads found [T, query_size], before `output`."""
        config, gate = self._config, None
        heads = self.qkv(x)
        if config.has_gate:
            sizes = [heads.shape[-1] - config.query_size, config.query_size]
            heads, gate = torch.split(heads, sizes, dim=-1)
        heads = heads.view(num_tokens, -1, config.head_dim)
        if self._norms is not None or config.has_value_norm or config.temperature is not None:
            heads = self._change(heads, positions)
        if config.clip is not None:
            heads = heads.clamp(-config.clip, config.clip)
        found = step.attend(self.index, heads, self.parameters).reshape(num_tokens, -1)
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
            query = temper(query, positions, config.temperature)
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
        if self._ranks.place.tensor_size > 1:
            return self._norm_over_ranks(x.flatten(1), weight).view_as(x)
        return self._ops.plain_rms_norm(x.flatten(1), weight, kind.eps).view_as(x)

    def _norm_over_ranks(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, n], the heads of this rank, normed over those of all, each held equally often."""
        wide, ranks = x.float(), self._ranks
        mean = ranks.add(wide.square().mean(-1, keepdim=True)) / ranks.place.tensor_size
        return (wide * torch.rsqrt(mean + self._config.qk_norm_kind.eps)).to(x.dtype) * weight


class CrossAttention:
    """Attention of the layer ``index`` over the answer of an encoder."""

    def __init__(
        self,
        config: AttentionConfig,
        index: int,
        query: Linear,
        key_value: Linear,
        output: Linear,
        ops: Ops,
    ) -> None:
        """``key_value`` gives keys and values side by side."""
        self._config, self._index, self._ops = config, index, ops
        self._query, self._key_value, self._output = query, key_value, output

    def __call__(self, x: Tensor, step: AttentionStep) -> Tensor:
        """x [T, hidden] -> what the answers have for it [T, hidden]; ``step`` is over these."""
        heads = self._query(self._ops.to_activation(x))
        heads = heads.view(len(x), -1, self._config.head_dim)
        found = step.attend(self._index, heads, HeadParameters()).reshape(len(x), -1)
        return self._output(self._ops.to_activation(found))

    def keys_and_values(self, answer: Tensor) -> tuple[Tensor, Tensor]:
        """Of an answer [T, hidden] of the encoder, each [T, KVH, D]: what the cache holds of it."""
        found = self._key_value(self._ops.to_activation(answer))
        keys, values = found.view(len(answer), 2, -1, self._config.head_dim).unbind(1)
        return keys.contiguous(), values.contiguous()


def temper(query: Tensor, positions: Tensor, temperature: tuple[float, float, float]) -> Tensor:
    """query [T, H, D] times what `AttentionConfig.temperature` says of each position [T]."""
    scale, span, shift = temperature
    steps = torch.floor((positions + shift) / span)
    return query * (1 + scale * torch.log1p(steps))[:, None, None].to(query.dtype)
