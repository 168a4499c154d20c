"""The decoder that all families share, over packed tokens: a `ModelConfig` says what it is made of.

Where norms stand (``block``), for attention ``A`` and feed-forward layer ``F`` of the stream x:

    pre         x += A(n1(x));          x += F(n2(x))
    post        x += n1(A(x));          x += n2(F(x))
    sandwich    x += p1(A(n1(x)));      x += p2(F(n2(x)))
    parallel    x += A(n1(x)) + F(n1(x))
    parallel2   x += A(n1(x)) + F(n2(x))
    post_add    x = n1(x + A(x));       x = n2(x + F(x))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_backend.models.attention import AttentionStep, HeadParameters
from inflight_backend.models.blocks.activations import make_activation
from inflight_backend.models.blocks.attention import Attention
from inflight_backend.models.blocks.gated_delta import GatedDelta
from inflight_backend.models.blocks.latent_attention import LatentAttention
from inflight_backend.models.blocks.layer_inputs import LayerInputBranch, LayerInputs
from inflight_backend.models.blocks.mlp import ExpertBranch, Linear, Mlp, Moe
from inflight_backend.models.blocks.norms import Norm
from inflight_backend.models.blocks.rope import sinusoids
from inflight_backend.models.config import (
    NORMS_OF_BLOCK,
    AttentionConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from inflight_backend.models.layers import Parameter
from inflight_backend.models.ops import Ops
from inflight_backend.models.quantization.forms import JoinedWeight, PackedWeight
from inflight_backend.models.quantization.linears import (
    MultiplyGroups,
    make_packed_experts,
    make_packed_linear,
)


class Parameters:
    """The parameters of a decoder, each taken once."""

    def __init__(self, values: dict[str, Parameter], ops: Ops, prefix: str = "") -> None:
        self._values, self._ops, self._prefix = values, ops, prefix

    def below(self, prefix: str) -> Parameters:
        """Those whose names begin with ``prefix``, by the rest of their names."""
        return Parameters(self._values, self._ops, self._prefix + prefix)

    def optional(self, name: str) -> Tensor | None:
        """A tensor; None if there is none."""
        value = self._values.pop(self._prefix + name, None)
        assert value is None or isinstance(value, Tensor), "only weights of linears are quantised"
        return value

    def tensor(self, name: str) -> Tensor:
        """A tensor."""
        value = self.optional(name)
        assert value is not None, f"no parameter {self._prefix}{name}"
        return value

    def experts(self, name: str, count: int) -> MultiplyGroups:
        """Linears of ``count`` experts, whose biases are [count, rows] together."""
        weight = self._values.pop(f"{self._prefix}{name}.weight")
        bias = self.optional(f"{name}.bias")
        bias = None if bias is None else bias.view(count, -1)
        if isinstance(weight, PackedWeight | JoinedWeight):
            return make_packed_experts(weight, bias, count, self._ops.make_linear)
        assert isinstance(weight, Tensor), "experts are never FP8"
        stacked = weight.view(count, -1, weight.shape[-1])
        multiply = self._ops.grouped_linear
        return lambda x, starts: multiply(x, stacked, starts, bias)

    def linear(self, name: str) -> Linear:
        """A linear with its bias, if it has one."""
        weight = self._values.pop(f"{self._prefix}{name}.weight")
        bias = self.optional(f"{name}.bias")
        if isinstance(weight, PackedWeight | JoinedWeight):
            return make_packed_linear(weight, bias, self._ops.make_linear)
        return self._ops.make_linear(weight, bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: Attention | LatentAttention | GatedDelta
    mlp: Mlp | Moe
    input_norm: Norm | None
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp_output_norm: Norm | None
    experts: ExpertBranch | None
    layer_input: LayerInputBranch | None
    scalar: Tensor | None


class Decoder:
    """Weights of a model and the way through them. Holds no state of any request."""

    def __init__(self, config: ModelConfig, parameters: dict[str, Parameter], ops: Ops) -> None:
        """Takes ``parameters`` (names of `decoder_parameters`) over: the dict is emptied."""
        self.config, self._ops = config, ops
        self._is_fused = (
            config.block == "pre"
            and config.norm.kind == "rms"
            and config.norm.has_weight
            and config.residual_scale == 1.0
        )
        given = Parameters(parameters, ops)
        self._embedding = given.tensor("embedding")
        self._positions = given.optional("positions")
        self._embedding_norm = self._take_norm(given, "embedding_norm")
        self._project_in, self._project_out = (
            given.linear(name) if config.embedding_size is not None else None
            for name in ("project_in", "project_out")
        )
        self._layer_inputs = self._take_layer_inputs(given) if config.layer_input_size else None
        self._layers = [
            self._take_layer(given.below(f"layers.{index}."), index, layer)
            for index, layer in enumerate(config.layers)
        ]
        self._final_norm = self._take_norm(given, "final_norm")
        head = given.optional("head.weight")
        self._head = ops.make_head(self._embedding if head is None else head)
        self._head_bias = given.optional("head.bias")
        self._norm_weights = [
            (_weight(each.input_norm), _weight(each.mlp_norm))
            for each in (self._layers if self._is_fused else [])
        ]
        assert not parameters, f"parameters without a use: {sorted(parameters)}"

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """tokens and positions [T] -> normed hidden states [N, hidden] of ``rows`` [N], None for
        all.

        The other tokens only leave their keys and values; the last layer does no more for them.
        """
        if self._is_fused:
            return self._run_fused(tokens, positions, attention, rows)
        x, last = self._embed(tokens, positions), len(self._layers) - 1
        inputs = None if self._layer_inputs is None else self._layer_inputs(tokens, x)
        for index, layer in enumerate(self._layers):
            given = None if inputs is None else inputs[index]
            x = self._run(layer, x, positions, attention, rows if index == last else None, given)
        if self._final_norm is not None:
            x = self._final_norm(x)
        return x if self._project_out is None else self._project_out(self._ops.to_activation(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> [N, vocab] float32."""
        return self.plain_logits(hidden).float()

    def plain_logits(self, hidden: Tensor) -> Tensor:
        """The same numbers in the dtype of the model, for a draw that changes none of them: of many
        rows, their float32 form takes longer to write and to read than all else of a draw."""
        config, logits = self.config, self._head(hidden)
        if self._head_bias is not None:
            logits = logits + self._head_bias
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.final_softcap is not None:
            logits = torch.tanh(logits / config.final_softcap) * config.final_softcap
        return logits

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        config = self.config
        x = self._embedding[tokens]  # [T, hidden]
        if config.embedding_scale != 1.0:
            x = x * torch.tensor(config.embedding_scale, dtype=x.dtype)
        if self._project_in is not None:
            x = self._project_in(self._ops.to_activation(x))
        if config.has_sinusoids:
            x = x + sinusoids(positions + (config.position_offset or 0), x.shape[1]).to(x.dtype)
        if self._positions is not None:
            x = x + self._positions[positions + (config.position_offset or 0)]
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def _run_fused(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """`forward` for the block "pre" with RMS norms, where each norm adds what came before it:
        a launch less for each branch, and no row of hidden_size more than `memory_plan` counts."""
        ops, last, eps = self._ops, len(self._layers) - 1, self.config.norm.eps
        weights = self._norm_weights
        residual = self._embed(tokens, positions)
        normed = ops.rms_norm(residual, weights[0][0], eps)
        for index, layer in enumerate(self._layers):
            x = layer.attention(normed, len(residual), positions, attention)
            if rows is not None and index == last:
                if rows.numel() == 0:
                    return residual[:0]
                x, residual = x[rows], residual[rows]
            x = layer.attention.output(ops.to_activation(x))
            if isinstance(layer.mlp, Moe):
                plain, residual = ops.final_norm(x, residual, weights[index][1], eps)
                x = layer.mlp(plain)
            else:
                normed, residual = ops.add_rms_norm(x, residual, weights[index][1], eps)
                x = layer.mlp(normed)
            if index < last:
                normed, residual = ops.add_rms_norm(x, residual, weights[index + 1][0], eps)
        return ops.final_norm(x, residual, _weight(self._final_norm), eps)[0]

    def _run(
        self,
        layer: _Layer,
        x: Tensor,
        positions: Tensor,
        attention: AttentionStep,
        rows: Tensor | None,
        given: Tensor | None,
    ) -> Tensor:
        """One layer; ``given`` [T, size]: its own embeddings of the tokens."""
        config, to_activation = self.config, self._ops.to_activation
        is_parallel = config.block.startswith("parallel")
        normed = _apply(layer.input_norm, x)
        found = layer.attention(to_activation(normed), len(x), positions, attention)
        if rows is not None:
            found, x = found[rows], x[rows]
            normed, given = normed[rows], None if given is None else given[rows]
        found = layer.attention.output(to_activation(found))
        if is_parallel:
            inner = normed if layer.mlp_norm is None else layer.mlp_norm(x)
            return x + (found + self._feed(layer, inner)) * config.residual_scale
        if config.block == "post_add":
            x = _apply(layer.attention_output_norm, x + found)
            return _apply(layer.mlp_output_norm, x + self._feed(layer, x))
        x = x + _apply(layer.attention_output_norm, found) * config.residual_scale
        inner = self._feed(layer, _apply(layer.mlp_norm, x))
        if layer.experts is not None:
            inner = layer.experts(x, inner)
        x = x + _apply(layer.mlp_output_norm, inner) * config.residual_scale
        if layer.layer_input is not None and given is not None:
            x = layer.layer_input(x, given)
        return x if layer.scalar is None else x * layer.scalar

    def _feed(self, layer: _Layer, x: Tensor) -> Tensor:
        mlp = layer.mlp
        return mlp(x) if isinstance(mlp, Moe) else mlp(self._ops.to_activation(x))

    def _take_norm(self, given: Parameters, name: str) -> Norm | None:
        """The norm of that name; None if the model has none there."""
        config = self.config
        weight, bias = given.optional(f"{name}.weight"), given.optional(f"{name}.bias")
        if weight is None and (config.norm.has_weight or not _has_norm(config, name)):
            return None
        return Norm(config.norm, weight, bias, self._ops)

    def _take_layer(self, given: Parameters, index: int, layer: LayerConfig) -> _Layer:
        return _Layer(
            self._take_mixer(given, index, layer.attention),
            self._take_mlp(given, layer.mlp)
            if isinstance(layer.mlp, MlpConfig)
            else self._take_moe(given, layer.mlp),
            self._take_norm(given, "input_norm"),
            self._take_norm(given, "attention_output_norm"),
            self._take_norm(given, "mlp_norm"),
            self._take_norm(given, "mlp_output_norm"),
            self._take_experts_beside(given, layer),
            self._take_layer_input(given) if self.config.layer_input_size else None,
            given.optional("scalar"),
        )

    def _take_experts_beside(self, given: Parameters, layer: LayerConfig) -> ExpertBranch | None:
        if layer.experts_beside is None:
            return None
        given = given.below("beside.")
        moe = self._take_moe(given, layer.experts_beside)
        return ExpertBranch(
            moe, *(self._norm(given, name) for name in ("input_norm", "output_norm", "dense_norm"))
        )

    def _take_layer_inputs(self, given: Parameters) -> LayerInputs:
        given, size = given.below("layer_inputs."), self.config.layer_input_size
        embedding, projection = given.tensor("embedding"), given.linear("projection")
        return LayerInputs(embedding, projection, self._norm(given, "norm"), size, self._ops)

    def _take_layer_input(self, given: Parameters) -> LayerInputBranch:
        given = given.below("layer_input.")
        mlp = self.config.layers[0].mlp
        activation = make_activation(mlp.activation, None)
        gate, projection = given.linear("gate"), given.linear("projection")
        return LayerInputBranch(gate, projection, self._norm(given, "norm"), activation, self._ops)

    def _norm(self, given: Parameters, name: str) -> Norm:
        return Norm(self.config.norm, given.tensor(f"{name}.weight"), None, self._ops)

    def _take_mixer(
        self, given: Parameters, index: int, config: AttentionConfig
    ) -> Attention | LatentAttention | GatedDelta:
        if config.delta is not None:
            given = given.below("delta.")
            return GatedDelta(
                config.delta,
                index,
                given.linear("inputs"),
                given.linear("gates"),
                given.tensor("conv"),
                (given.tensor("rate"), given.tensor("step_bias")),
                given.tensor("norm"),
                given.linear("output"),
            )
        take = self._take_attention if config.latent is None else self._take_latent
        return take(given, index, config)

    def _take_attention(self, given: Parameters, index: int, config: AttentionConfig) -> Attention:
        heads = HeadParameters(
            given.optional("query_norm"), given.optional("key_norm"), given.optional("sinks")
        )
        output = given.linear("output")
        return Attention(config, index, given.linear("qkv"), output, heads, self._ops)

    def _take_latent(
        self, given: Parameters, index: int, config: AttentionConfig
    ) -> LatentAttention:
        query_norm = given.optional("query_a_norm")
        names = ("query",) if query_norm is None else ("query_a", "query")
        return LatentAttention(
            config,
            index,
            tuple(given.linear(name) for name in names),
            query_norm,
            given.linear("key_value"),
            given.tensor("key_value_norm"),
            given.tensor("expand"),
            given.linear("output"),
            self._ops,
        )

    def _take_mlp(self, given: Parameters, config: MlpConfig) -> Mlp:
        up = given.linear("gate_up" if config.is_gated else "up")
        down = given.linear("down")
        activation = make_activation(config.activation, given.optional("activation"))
        return Mlp(config, up, down, activation, self._ops)

    def _take_moe(self, given: Parameters, config: MoeConfig) -> Moe:
        shared, shared_gate = None, given.optional("shared_gate.weight")
        if config.shared is not None:
            shared = self._take_mlp(given.below("shared."), config.shared)
        return Moe(
            config,
            self._ops.make_head(given.tensor("router.weight").float()),
            given.optional("router.bias"),
            given.optional("router.correction"),
            given.experts("experts.gate_up", config.num_experts),
            given.experts("experts.down", config.num_experts),
            shared,
            None if shared_gate is None else self._ops.make_head(shared_gate),
            self._ops,
            given.optional("router.scale"),
            given.optional("router.expert_scales"),
        )


def _weight(norm: Norm | None) -> Tensor:
    assert norm is not None
    assert norm.weight is not None
    return norm.weight


def _apply(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _has_norm(config: ModelConfig, name: str) -> bool:
    """Whether a model has a norm at that place, as far as its kind of block says."""
    if name == "final_norm":
        return config.has_final_norm
    if name == "embedding_norm":
        return config.has_embedding_norm
    return name in NORMS_OF_BLOCK[config.block]
