"""Multi-head latent attention (DeepSeek V2 and V3), in its absorbed form.

The cache holds, for each token, one latent vector of ``kv_rank`` numbers and ``rope`` numbers that
turn, shared by all heads. The matrices that would make keys and values of a latent are multiplied
into the query and onto what attention finds instead, so attention runs over the latents as over one
key head, whose values are its keys.
"""

from __future__ import annotations

from collections.abc import Callable

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
        expand: Tensor,
        output: Linear,
        ops: Ops,
        adapt: Callable[[str, Linear], Linear],
    ) -> None:
        """``query``: one linear, or two with a norm between; ``expand`` [H * (nope + value),
        kv_rank] makes keys and values of latents. ``adapt`` lets adapters change a product of
        heads [T, H, columns] -> [T, H, rows], which it calls by a name."""
        latent = config.latent
        assert latent is not None
        self._config, self._latent, self._index, self._ops = config, latent, index, ops
        self._query, self._query_norm = query, query_norm
        self._key_value, self._key_value_norm = key_value, key_value_norm
        parts = expand.view(config.num_heads, latent.nope + latent.value, latent.kv_rank)
        to_latents = parts[:, : latent.nope]  # [H, nope, rank]
        to_values = parts[:, latent.nope :].transpose(1, 2)  # [H, rank, value]
        self._to_latents = adapt(
            "expand_key", lambda query: torch.einsum("thd,hdr->thr", query, to_latents)
        )
        self._to_values = adapt(
            "expand_value", lambda found: torch.einsum("thr,hrv->thv", found, to_values)
        )
        order = torch.tensor(config.rotary_order or range(config.head_dim), device=expand.device)
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
