"""The decoder that all families share: norm, attention, norm, gated MLP, over packed tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from inflight_backend.models.attention import AttentionStep, HeadNorms
from inflight_backend.models.config import ModelConfig, RopeConfig
from inflight_backend.models.layers import Activation, Parameter
from inflight_backend.models.ops import Ops


def make_cos_sin(config: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32 on the CPU: the cosines of head_dim / 2 angles, the sines.

    The angle of pair ``i`` at position ``p`` is ``p * frequency[i]``.
    """
    frequencies = _frequencies(config, head_dim)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies  # [num_positions, head_dim / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """``theta ** (-2 i / head_dim)``, then scaled.

    linear: all divided by ``factor``. llama3 (Llama 3.1, ``apply_scaling`` of the published
    reference code): waves longer than ``original / low`` positions are divided by ``factor``,
    waves shorter than ``original / high`` stay, and those between are blended linearly in
    ``original / wavelength``.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return frequencies
    slow = frequencies / config.factor
    if config.kind == "linear":
        return slow
    turns = config.original_max_positions * frequencies / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    share = ((turns - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - share) * slow + share * frequencies


_Linear: TypeAlias = Callable[[Any], Tensor]  # takes the `Activation` of its own `Ops`


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: _Linear
    head_norms: HeadNorms
    output: _Linear
    post_norm: Tensor
    gate_up: _Linear
    down: _Linear


class Decoder:
    """Weights of a model and the way through them. Holds no state of any request."""

    def __init__(self, config: ModelConfig, parameters: dict[str, Parameter], ops: Ops) -> None:
        """Takes ``parameters`` (names of `decoder_parameters`) over: the dict is emptied."""
        self.config = config
        self._ops = ops
        self._embedding = _tensor(parameters.pop("embedding"))
        self._layers = [_take_layer(parameters, layer, ops) for layer in range(config.num_layers)]
        self._norm = _tensor(parameters.pop("norm"))
        self._lm_head = ops.make_head(_tensor(parameters.pop("lm_head", self._embedding)))
        assert not parameters, f"parameters without a use: {sorted(parameters)}"

    def forward(self, tokens: Tensor, attention: AttentionStep, rows: Tensor | None) -> Tensor:
        """tokens [T] -> normed hidden states [N, hidden] of ``rows`` [N], None for all.

        The other tokens only leave their keys and values; the last layer does no more for them.
        """
        ops, last = self._ops, len(self._layers) - 1
        residual = self._embedding[tokens]  # [T, hidden]
        eps = self.config.rms_norm_eps
        normed = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            x = self._attend(index, layer, normed, len(tokens), attention)
            if rows is not None and index == last:
                if rows.numel() == 0:
                    return x[:0].new_empty(0, self.config.hidden_size)
                x, residual = x[rows], residual[rows]
            x = layer.output(ops.to_activation(x))
            normed, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(normed)))
            if index < last:
                next_norm = self._layers[index + 1].input_norm
                normed, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return ops.final_norm(x, residual, self._norm, eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> [N, vocab] float32."""
        return self.plain_logits(hidden).float()

    def plain_logits(self, hidden: Tensor) -> Tensor:
        """The same numbers in the dtype of the model, for a draw that changes none of them: of many
        rows, their float32 form takes longer to write and to read than all else of a draw."""
        return self._lm_head(hidden)

    def _attend(
        self, index: int, layer: _Layer, x: Activation, num_tokens: int, attention: AttentionStep
    ) -> Tensor:
        """x [T, hidden] -> what the heads found, [T, query_size]."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(x).view(num_tokens, num_heads + 2 * num_kv_heads, config.head_dim)
        found = attention.attend(index, heads, layer.head_norms)
        return found.reshape(num_tokens, config.query_size)


def _tensor(parameter: Parameter) -> Tensor:
    assert isinstance(parameter, Tensor), "only the weights of linears are quantised"
    return parameter


def _take_layer(parameters: dict[str, Parameter], layer: int, ops: Ops) -> _Layer:
    prefix = f"layers.{layer}."

    def take(name: str) -> Tensor:
        return _tensor(parameters.pop(prefix + name))

    def take_optional(name: str) -> Tensor | None:
        return take(name) if prefix + name in parameters else None

    def take_linear(name: str) -> _Linear:
        weight = parameters.pop(f"{prefix}{name}.weight")
        return ops.make_linear(weight, take_optional(f"{name}.bias"))

    query_norm, key_norm = take_optional("query_norm"), take_optional("key_norm")
    return _Layer(
        input_norm=take("input_norm"),
        qkv=take_linear("qkv"),
        head_norms=None if query_norm is None or key_norm is None else (query_norm, key_norm),
        output=take_linear("output"),
        post_norm=take("post_norm"),
        gate_up=take_linear("gate_up"),
        down=take_linear("down"),
    )
