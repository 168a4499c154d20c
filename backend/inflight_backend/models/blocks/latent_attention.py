"""Multi-head latent attention (DeepSeek V2 and V3), in its absorbed form.

The cache holds, for each token, one latent vector of ``kv_rank`` numbers and ``rope`` numbers that
turn, shared by all heads. The matrices that would make keys and values of a latent are multiplied
into the query and onto what attention finds instead, so attention runs over the latents as over one
key head, whose values are its keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_backend.models.attention import AttentionStep, HeadParameters
from inflight_backend.models.blocks.attention import temper
from inflight_backend.models.blocks.mlp import Linear
from inflight_backend.models.config import AttentionConfig
from inflight_backend.models.layers import Activation
from inflight_backend.models.ops import Ops

NORM_EPS = 1e-6
"""Of the norms inside, whatever the model's other norms have (DeepSeek's published code)."""


class LatentAttention:
    """Of the layer ``index``: as `Attention`."""

    def __init__(
        self,
        config: AttentionConfig,
        index: int,
        query: tuple[Linear, ...],
        query_norm: Tensor | None,
        key_value: Linear,
        key_value_norm: Tensor,
        to_latents: Linear,
        to_values: Linear,
        output: Linear,
        ops: Ops,
    ) -> None:
        """``query``: one linear, or two with a norm between. Products of heads: ``to_latents``
        [T, H, nope] -> [T, H, kv_rank] and ``to_values`` [T, H, kv_rank] -> [T, H, value]."""
        latent = config.latent
        assert latent is not None
        self._config, self._latent, self._index, self._ops = config, latent, index, ops
        self._query, self._query_norm = query, query_norm
        self._key_value, self._key_value_norm = key_value, key_value_norm
        self._to_latents, self._to_values = to_latents, to_values
        device = key_value_norm.device
        order = torch.tensor(config.rotary_order or range(config.head_dim), device=device)
        self._order, self._inverse = order, order.argsort()[latent.rope :]
        self.output = output

    def __call__(
        self, x: Activation, num_tokens: int, positions: Tensor, step: AttentionStep
    ) -> Tensor:
        """x [T, hidden] -> [T, H * value]."""
        latent, ops = self._latent, self._ops
        query = self._query[0](x)
        if self._query_norm is not None:
            query = ops.plain_rms_norm(query, self._query_norm, NORM_EPS)
            query = self._query[1](ops.to_activation(query))
        query = query.view(num_tokens, self._config.num_heads, latent.nope + latent.rope)
        if self._config.temperature is not None:
            query = temper(query, positions, self._config.temperature)
        plain, turning = torch.split(query, [latent.nope, latent.rope], dim=-1)
        plain = self._to_latents(plain)
        sizes = [latent.kv_rank, latent.rope]
        latents, shared = torch.split(self._key_value(x), sizes, dim=-1)
        latents = ops.plain_rms_norm(latents.contiguous(), self._key_value_norm, NORM_EPS)
        key = torch.cat((shared, latents), dim=-1)[:, None]
        heads = torch.cat((torch.cat((turning, plain), dim=-1), key), dim=1)
        heads = heads.index_select(-1, self._order)
        found = step.attend(self._index, heads, HeadParameters())
        found = found.index_select(-1, self._inverse)  # [T, H, rank]
        return self._to_values(found).reshape(num_tokens, -1)
