"""The decoder all families share: norm, attention, norm, gated MLP, over packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_backend.engine.attention import AttentionStep
from inflight_backend.engine.layers import Linear
from inflight_backend.engine.model_config import ModelConfig
from inflight_backend.engine.ops import Ops
from inflight_backend.engine.rope import make_cos_sin


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights of a model and the way through them. Holds no state of any request."""

    def __init__(
        self, config: ModelConfig, parameters: dict[str, Tensor], ops: Ops, max_positions: int
    ) -> None:
        """Takes ``parameters`` (names of `decoder_parameters`) over: the dict is emptied."""
        self._config = config
        self._ops = ops
        self._embedding = parameters.pop("embedding")
        self._layers = [_take_layer(parameters, layer) for layer in range(config.num_layers)]
        self._norm = parameters.pop("norm")
        self._lm_head = Linear(parameters.pop("lm_head", self._embedding))
        assert not parameters, f"parameters without a use: {sorted(parameters)}"
        device = self._embedding.device
        self._cos_sin = make_cos_sin(config.rope, config.head_dim, max_positions).to(device)
        # The norm that follows each layer: the next one's input norm, at last the final norm.
        self._next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """tokens, positions [T] -> normed hidden states [N, hidden] of ``rows`` [N], None for all.

        The other tokens only leave their keys and values; the last layer does no more for them.
        """
        residual = self._embedding[tokens]  # [T, hidden]
        eps = self._config.rms_norm_eps
        normed = self._ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            x = self._attend(index, layer, normed, positions, attention)
            if rows is not None and index == len(self._layers) - 1:
                if rows.numel() == 0:
                    return x[:0].new_empty(0, self._config.hidden_size)
                x, residual = x[rows], residual[rows]
            normed, residual = self._ops.add_rms_norm(
                layer.output(x), residual, layer.post_norm, eps
            )
            x = layer.down(self._ops.silu_mul(layer.gate_up(normed)))
            normed, residual = self._ops.add_rms_norm(x, residual, self._next_norms[index], eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> [N, vocab] float32."""
        return self._lm_head(hidden).float()

    def _attend(
        self, index: int, layer: _Layer, x: Tensor, positions: Tensor, attention: AttentionStep
    ) -> Tensor:
        """x [T, hidden] -> what the heads found, [T, query_size]."""
        config, ops = self._config, self._ops
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(x).view(len(x), num_heads + 2 * num_kv_heads, config.head_dim)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = ops.rms_norm(query, layer.query_norm, config.rms_norm_eps)
            key = ops.rms_norm(key, layer.key_norm, config.rms_norm_eps)
        query, key = ops.apply_rope(query, key, self._cos_sin, positions)
        return attention.attend(index, query, key, value).view(len(x), config.query_size)


def _take_layer(parameters: dict[str, Tensor], layer: int) -> _Layer:
    def take(name: str) -> Tensor:
        return parameters.pop(f"layers.{layer}.{name}")

    def take_optional(name: str) -> Tensor | None:
        return parameters.pop(f"layers.{layer}.{name}", None)

    def take_linear(name: str) -> Linear:
        return Linear(take(f"{name}.weight"), take_optional(f"{name}.bias"))

    return _Layer(
        input_norm=take("input_norm"),
        qkv=take_linear("qkv"),
        query_norm=take_optional("query_norm"),
        key_norm=take_optional("key_norm"),
        output=take_linear("output"),
        post_norm=take("post_norm"),
        gate_up=take_linear("gate_up"),
        down=take_linear("down"),
    )
