"""The decoder that all families share, over packed tokens: a `ModelConfig` says what it is made of.

Where norms stand (``block``), for attention ``A`` and feed-forward layer ``F`` of the stream x:

    pre         x += A(n1(x));          x += F(n2(x))
    post        x += n1(A(x));          x += n2(F(x))
    sandwich    x += p1(A(n1(x)));      x += p2(F(n2(x)))
    parallel    x += A(n1(x)) + F(n1(x))
    parallel2   x += A(n1(x)) + F(n2(x))
    post_add    x = n1(x + A(x));       x = n2(x + F(x))

Attention over an encoder's answer comes between both, with a norm of its own in the place of n1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from inflight_backend.models.attention import AttentionStep, HeadParameters
from inflight_backend.models.blocks.activations import make_activation, sparse
from inflight_backend.models.blocks.altup import AltUp, Laurel, Streams
from inflight_backend.models.blocks.attention import Attention, CrossAttention
from inflight_backend.models.blocks.gated_delta import GatedDelta
from inflight_backend.models.blocks.latent_attention import LatentAttention
from inflight_backend.models.blocks.layer_inputs import LayerInputBranch, LayerInputs
from inflight_backend.models.blocks.lora import AdapterTable, MultiplyRows
from inflight_backend.models.blocks.mlp import ExpertBranch, Linear, Mlp, Moe, PlainExperts
from inflight_backend.models.blocks.norms import Norm
from inflight_backend.models.blocks.rope import sinusoids
from inflight_backend.models.config import (
    NORMS_OF_BLOCK,
    AltUpConfig,
    AttentionConfig,
    LatentConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from inflight_backend.models.layers import Parameter
from inflight_backend.models.ops import DecoderParts, LayerParts, Ops, RunLayers
from inflight_backend.models.parallel.collectives import NO_COLLECTIVES, Collectives
from inflight_backend.models.parallel.place import Place
from inflight_backend.models.quantization.forms import JoinedWeight, PackedWeight
from inflight_backend.models.quantization.linears import (
    HasRows,
    HeadPart,
    MultiplyGroups,
    RowTable,
)

READING_ALL_TOKENS = {"qkv", "query_a", "query", "key_value", "inputs", "gates"}
"""The linears of a layer before its attention; of the last layer the others read those rows only
that draw."""


class Parameters:
    """The parameters of a decoder, each taken once."""

    def __init__(
        self,
        values: dict[str, Parameter],
        ops: Ops,
        adapters: AdapterTable | None = None,
        prefix: str = "",
        last_layer: str | None = None,
        ranks: Collectives = NO_COLLECTIVES,
    ) -> None:
        """``adapters`` may change linears of layers; ``last_layer``: the prefix of the last, if it
        is here."""
        self._values, self._ops, self._adapters = values, ops, adapters
        self._prefix, self._last_layer, self._ranks = prefix, last_layer, ranks

    def below(self, prefix: str) -> Parameters:
        """Those whose names begin with ``prefix``, by the rest of their names."""
        prefix = self._prefix + prefix
        return Parameters(
            self._values, self._ops, self._adapters, prefix, self._last_layer, self._ranks
        )

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

    def weight(self, name: str) -> Tensor | PackedWeight | None:
        """A weight of one tensor of the checkpoint; None if there is none."""
        value = self._values.pop(self._prefix + name, None)
        assert value is None or isinstance(value, Tensor | PackedWeight), "one tensor, never FP8"
        return value

    def experts(self, name: str, count: int) -> MultiplyRows:
        """Linears of ``count`` experts, whose biases are [count, rows] together."""
        linear = PlainExperts(self._experts(name, count))
        if self._adapters is None:
            return linear
        return self._adapters.wrap_experts(
            self._prefix + name, linear, of_draws=self._is_of_draws(name)
        )

    def _experts(self, name: str, count: int) -> MultiplyGroups:
        weight = self._values.pop(f"{self._prefix}{name}.weight")
        bias = self.optional(f"{name}.bias")
        bias = None if bias is None else bias.view(count, -1)
        if isinstance(weight, PackedWeight | JoinedWeight):
            return self._ops.make_packed_experts(weight, bias, count, self._ops.make_linear)
        assert isinstance(weight, Tensor), "experts are never FP8"
        return self._ops.make_experts(weight.view(count, -1, weight.shape[-1]), bias)

    def linear(self, name: str) -> Linear:
        """A linear with its bias, if it has one."""
        weight = self._values.pop(f"{self._prefix}{name}.weight")
        bias = self.optional(f"{name}.bias")
        if isinstance(weight, PackedWeight | JoinedWeight):
            linear = self._ops.make_packed_linear(weight, bias, self._ops.make_linear)
            if isinstance(weight, PackedWeight) and weight.inputs is not None:
                linear = self._reading_all(weight.inputs, linear)
        else:
            linear = self._ops.make_linear(weight, bias)
        return self._adapted(name, linear, bias)

    def latent_products(self, heads: int, latent: LatentConfig) -> tuple[Linear, Linear]:
        """What of `LatentAttention` brings queries to latents, and latents to values; adapters may
        change both. Of a file with one weight, keys are its first rows of each head; one that has
        them apart has those of keys turned."""
        weight, make = self.weight("expand"), self._ops.make_heads
        if weight is not None:
            of_values = range(latent.nope, latent.nope + latent.value)
            parts = [HeadPart(range(latent.nope), True), HeadPart(of_values, False)]
            to_latents, to_values = make(weight, heads, parts)
        else:
            keys, values = self.weight("expand_keys"), self.weight("expand_values")
            assert keys is not None
            assert values is not None
            of_keys = HeadPart(range(latent.kv_rank), False)
            if isinstance(keys, Tensor):  # a CPU takes twice as long for a token by columns
                turned = keys.view(heads, latent.kv_rank, latent.nope).transpose(1, 2)
                keys, of_keys = (
                    turned.reshape(-1, latent.kv_rank),
                    HeadPart(range(latent.nope), True),
                )
            (to_latents,) = make(keys, heads, [of_keys])
            (to_values,) = make(values, heads, [HeadPart(range(latent.value), False)])
        return self._heads("expand_key", to_latents), self._heads("expand_value", to_values)

    def _heads(self, name: str, multiply: Linear) -> Linear:
        """``multiply`` [T, heads, columns] -> [T, heads, rows], which adapters may change."""
        if self._adapters is None:
            return multiply
        return self._adapters.wrap_heads(self._prefix + name, multiply)

    def gate(self, name: str, dtype: torch.dtype | None = None) -> Linear | None:
        """A linear that weighs the branches of a mixture of experts, as `plain_linear`; None if
        there is none."""
        linear = self.plain_linear(name, dtype)
        return None if linear is None else self._adapted(name, linear, None)

    def plain_linear(self, name: str, dtype: torch.dtype | None = None) -> Linear | None:
        """A linear without a bias that reads and answers plain numbers of ``dtype`` (None: of the
        model), none of which are rounded to few bits; None if there is none."""
        weight = self.weight(f"{name}.weight")
        if weight is None:
            return None
        if isinstance(weight, PackedWeight):
            weight = replace(weight, dtype=dtype or weight.dtype, quantizes_input=False)
            return self._ops.make_packed_linear(weight, None, self._ops.make_linear)
        return self._ops.make_head(weight.to(dtype or weight.dtype))

    def _adapted(self, name: str, linear: Linear, bias: Tensor | None) -> Linear:
        if self._adapters is None or not self._prefix.startswith("layers."):
            return linear
        of_draws = self._is_of_draws(name)
        return self._adapters.wrap(self._prefix + name, linear, bias, of_draws=of_draws)

    def _reading_all(self, inputs: Tensor, linear: Linear) -> Linear:
        """``linear`` of the columns ``inputs`` of what all ranks have."""
        ranks = self._ranks
        count = len(inputs) * ranks.place.tensor_size
        return lambda x: linear(ranks.join_columns(x, count).index_select(1, inputs))

    def _is_of_draws(self, name: str) -> bool:
        is_last = self._last_layer is not None and self._prefix.startswith(self._last_layer)
        return is_last and name not in READING_ALL_TOKENS

    def summed_linear(self, name: str) -> Linear:
        """A linear that reads what the ranks have made each a part of: their answers are summed."""
        linear, ranks = self.linear(name), self._ranks
        if ranks.place.tensor_size == 1:
            return linear
        return lambda x: ranks.add(linear(x))


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
    cross: CrossAttention | None
    cross_norm: Norm | None
    altup: AltUp | None
    laurel: Laurel | None


class Decoder:
    """Weights of a model and the way through them. Holds no state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: dict[str, Parameter],
        ops: Ops,
        adapters: AdapterTable | None = None,
        ranks: Collectives = NO_COLLECTIVES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Takes ``parameters`` (names of `decoder_parameters`) over: the dict is emptied.

        ``adapters`` change the linears of layers; before `forward` they are told whose rows come.
        ``ranks``: those that hold the rest of the model, of which ``config`` is the own part
        (`parallel.shards`); hidden states are of ``dtype``.
        """
        self.config, self._ops, self._ranks, self._dtype = config, ops, ranks, dtype
        place = ranks.place
        self._is_fused = (
            config.block == "pre"
            and config.norm.kind == "rms"
            and config.norm.has_weight
            and config.residual_scale == 1.0
            and config.encoder is None
        )
        last_layer = f"layers.{config.num_layers - 1}." if place.is_last_stage else None
        given = Parameters(parameters, ops, adapters, last_layer=last_layer, ranks=ranks)
        self._own_tokens = place.vocabulary_of(config.vocab_size)
        table = given.weight("embedding") if place.is_first_stage else None
        positions = given.weight("positions")
        self._positions = None if positions is None else RowTable(positions)
        self._embedding_norm = self._take_norm(given, "embedding_norm")
        self._project_in, self._project_out = (
            given.linear(name) if config.embedding_size is not None and is_here else None
            for name, is_here in (
                ("project_in", place.is_first_stage),
                ("project_out", place.is_last_stage),
            )
        )
        self._layer_inputs = self._take_layer_inputs(given) if config.layer_input_size else None
        self._streams = None if config.altup is None else self._take_streams(given, config.altup)
        self._layers = [
            self._take_layer(given.below(f"layers.{index}."), index, layer)
            for index, layer in enumerate(config.layers)
        ]
        self._final_norm = self._take_norm(given, "final_norm")
        head = given.weight("head.weight")
        is_shared = head is None
        head = table if head is None else head
        self._head = None if config.is_encoder or head is None else self._make_head(head)
        self._embedding: Linear | None = None if table is None else RowTable(table)
        if is_shared and isinstance(self._head, HasRows):
            self._embedding = self._head.look_up
        self._head_bias = given.optional("head.bias")
        self._norm_weights = [
            (_weight(each.input_norm), _weight(each.mlp_norm))
            for each in (self._layers if self._is_fused else [])
        ]
        self._run_joined = self._join_layers()
        assert not parameters, f"parameters without a use: {sorted(parameters)}"

    def _join_layers(self) -> RunLayers | None:
        config = self.config
        has_more = self._ranks.place.size > 1 or self._project_out is not None
        if has_more or config.block == "post_add" or not all(map(_has_usual_parts, self._layers)):
            return None
        layers = [
            LayerParts(
                each.attention, each.mlp, each.input_norm, each.attention_output_norm,
                each.mlp_norm, each.mlp_output_norm,
            )
            for each in self._layers
        ]  # fmt: skip
        is_parallel = config.block.startswith("parallel")
        parts = DecoderParts(layers, self._final_norm, is_parallel, config.residual_scale)
        return self._ops.join_layers(parts)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """tokens and positions [T] -> normed hidden states [N, hidden] of ``rows`` [N], None for
        all.

        The other tokens only leave their keys and values; the last layer does no more for them. In
        a pipeline the answer is a place for them, see `receive`.
        """
        place = self._ranks.place
        run = self._run_fused if self._is_fused else self._run_all
        x = run(tokens, positions, attention, rows if place.is_last_stage else None)
        if place.pipeline_size == 1:
            return x
        num_rows = len(tokens) if rows is None else len(rows)
        if num_rows or not place.is_last_stage:
            self._ranks.to_next_stage(x)
        return self._empty(tokens, num_rows, self._answer_size)

    def receive(self, answer: Tensor) -> Tensor:
        """``answer`` of `forward`, in whose place the first stage of a pipeline gets here what the
        last one has; on the others it stays without meaning. In the order of the calls before."""
        place = self._ranks.place
        if place.pipeline_size > 1 and place.is_first_stage and len(answer):
            return self._ranks.from_previous_stage(answer)
        return answer

    def _enter(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the first layer reads [T, hidden]: of the embedding, or from the stage before."""
        if self._ranks.place.is_first_stage:
            return self._embed(tokens, positions)
        return self._ranks.from_previous_stage(self._empty(tokens, len(tokens)))

    def _empty(self, tokens: Tensor, num_rows: int, size: int | None = None) -> Tensor:
        """Memory for hidden states on the device of ``tokens``."""
        size = self.config.hidden_size if size is None else size
        return torch.empty((num_rows, size), dtype=self._dtype, device=tokens.device)

    @property
    def _answer_size(self) -> int:
        """Columns of what the head reads."""
        return self.config.embedding_size or self.config.hidden_size

    def _run_all(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """The layers, and on the last stage what comes behind them."""
        x, last = self._enter(tokens, positions), len(self._layers) - 1
        if self._run_joined is not None:
            found = self._run_joined(x, attention, rows)
            if found is not None:
                return found
        inputs = None if self._layer_inputs is None else self._layer_inputs(tokens, x)
        run = self._run
        if self._streams is not None:
            x, run = self._streams.open(x), self._run_streams
        for index, layer in enumerate(self._layers):
            given = None if inputs is None else inputs[index]
            x = run(layer, x, positions, attention, rows if index == last else None, given)
        if self._streams is not None:
            x = self._streams.close(x)
        if self._final_norm is not None:
            x = self._final_norm(x)
        return x if self._project_out is None else self._project_out(self._ops.to_activation(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> [N, vocab] float32."""
        return self.plain_logits(hidden).float()

    def plain_logits(self, hidden: Tensor) -> Tensor:
        """The same numbers in the dtype of the model, for a draw that changes none of them: of many
        rows, their float32 form takes longer to write and to read than all else of a draw."""
        assert self._head is not None, "the first stage has the head, an encoder has none"
        config, logits = self.config, self._head(hidden)
        if self._head_bias is not None:
            logits = logits + self._head_bias
        logits = self._ranks.join_columns(logits, config.vocab_size)
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.final_softcap is not None:
            logits = torch.tanh(logits / config.final_softcap) * config.final_softcap
        return logits

    def cross_keys_and_values(self, answer: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of an encoder's answer [T, hidden]: layer, keys and values, each [T, KVH, D]."""
        for index, layer in enumerate(self._layers):
            if layer.cross is not None:
                yield index, *layer.cross.keys_and_values(answer)

    def _make_head(self, weight: Tensor | PackedWeight) -> Linear:
        if isinstance(weight, Tensor):
            return self._ops.make_head(weight)
        return self._ops.make_packed_linear(weight, None, self._ops.make_linear)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        config = self.config
        x = self._look_up(tokens)  # [T, hidden]
        if config.embedding_scale != 1.0:
            x = x * torch.tensor(config.embedding_scale, dtype=x.dtype)
        if self._project_in is not None:
            x = self._project_in(self._ops.to_activation(x))
        if config.has_sinusoids:
            x = x + sinusoids(positions + (config.position_offset or 0), x.shape[1]).to(x.dtype)
        if self._positions is not None:
            x = x + self._positions(positions + (config.position_offset or 0))
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def _look_up(self, tokens: Tensor) -> Tensor:
        """The rows of the embedding; each rank has those of some tokens."""
        assert self._embedding is not None
        if self._ranks.place.tensor_size == 1:
            return self._embedding(tokens).to(self._dtype)
        own = tokens - self._own_tokens.start
        is_own = (own >= 0) & (own < len(self._own_tokens))
        found = self._embedding(own.clamp(0, len(self._own_tokens) - 1)).to(self._dtype)
        return self._ranks.add(found * is_own[:, None])

    def _run_fused(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """`_run_all` for the block "pre" with RMS norms, where each norm adds what came before it:
        a launch less for each branch, and no row of hidden_size more than `memory_plan` counts."""
        ops, last, eps = self._ops, len(self._layers) - 1, self.config.norm.eps
        weights = self._norm_weights
        residual = self._enter(tokens, positions)
        if self._run_joined is not None:
            found = self._run_joined(residual, attention, rows)
            if found is not None:
                return found
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
        if self._final_norm is None:
            return x + residual
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
        if rows is not None and layer.cross is None:
            found, x = found[rows], x[rows]
            normed, given = normed[rows], None if given is None else given[rows]
        found = layer.attention.output(to_activation(found))
        if is_parallel:
            inner = normed if layer.mlp_norm is None else layer.mlp_norm(x)
            return x + (found + self._feed(layer, inner)) * config.residual_scale
        if config.block == "post_add":
            x = _apply(layer.attention_output_norm, x + found)
            x = self._attend_across(layer, x, attention, rows)
            return _apply(layer.mlp_output_norm, x + self._feed(layer, x))
        x = x + _apply(layer.attention_output_norm, found) * config.residual_scale
        if layer.laurel is not None:
            x = layer.laurel.mix(x, normed)
        x = self._attend_across(layer, x, attention, rows)
        inner = self._feed(layer, _apply(layer.mlp_norm, x))
        if layer.experts is not None:
            inner = layer.experts(x, inner)
        x = x + _apply(layer.mlp_output_norm, inner) * config.residual_scale
        if layer.layer_input is not None and given is not None:
            x = layer.layer_input(x, given)
        return x if layer.scalar is None else x * layer.scalar

    def _run_streams(
        self,
        layer: _Layer,
        x: Tensor,
        positions: Tensor,
        attention: AttentionStep,
        rows: Tensor | None,
        given: Tensor | None,
    ) -> Tensor:
        """One layer of a model whose tokens are several streams each: x [S, T, hidden]."""
        altup, branch = layer.altup, layer.layer_input
        assert altup is not None
        assert branch is not None
        assert given is not None
        predicted, x = altup.predict(x)
        x = self._run(layer, x, positions, attention, rows, None)
        if rows is not None:
            predicted, given = predicted[:, rows], given[rows]
        return altup.correct(predicted, x, partial(branch.added, given=given))

    def _attend_across(
        self, layer: _Layer, x: Tensor, attention: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """Attention over an encoder's answer, where the layer has it; then ``rows`` go on."""
        if layer.cross is None:
            return x
        assert attention.cross is not None
        if self.config.block == "post_add":
            x = _apply(layer.cross_norm, x + layer.cross(x, attention.cross))
        else:
            x = x + layer.cross(_apply(layer.cross_norm, x), attention.cross)
        return x if rows is None else x[rows]

    def _feed(self, layer: _Layer, x: Tensor) -> Tensor:
        mlp = layer.mlp
        return mlp(x) if isinstance(mlp, Moe) else mlp(self._ops.to_activation(x))

    def _take_norm(self, given: Parameters, name: str) -> Norm | None:
        """The norm of that name; None if the model has none there."""
        config = self.config
        weight, bias = given.optional(f"{name}.weight"), given.optional(f"{name}.bias")
        has_norm = _has_norm(config, name) and _is_here(self._ranks.place, name)
        if weight is None and (config.norm.has_weight or not has_norm):
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
            self._take_cross(given.below("cross."), index, layer.cross),
            self._take_norm(given, "cross_norm"),
            self._take_altup(given.below("altup.")),
            self._take_laurel(given.below("laurel.")),
        )

    def _take_streams(self, given: Parameters, altup: AltUpConfig) -> Streams:
        given, others = given.below("streams."), range(altup.num_streams - 1)
        openers, closers = (
            [given.linear(f"{name}{index}") for index in others] for name in ("open", "close")
        )
        return Streams(openers, closers, self._ops)

    def _take_altup(self, given: Parameters) -> AltUp | None:
        config = self.config.altup
        if config is None:
            return None
        router, predictions, corrections = (
            given.plain_linear(name) for name in ("router", "predictions", "corrections")
        )
        assert router is not None
        assert predictions is not None
        assert corrections is not None
        norm, scale = self._norm(given, "router_norm"), given.tensor("scale")
        return AltUp(config, router, norm, predictions, corrections, scale)

    def _take_laurel(self, given: Parameters) -> Laurel | None:
        if self.config.altup is None:
            return None
        left, right = given.linear("left"), given.linear("right")
        return Laurel(left, right, self._norm(given, "norm"), self._ops)

    def _take_cross(
        self, given: Parameters, index: int, config: AttentionConfig | None
    ) -> CrossAttention | None:
        if config is None:
            return None
        query, key_value, output = map(given.linear, ("query", "key_value", "output"))
        return CrossAttention(config, index, query, key_value, output, self._ops)

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
        table, projection = given.weight("embedding"), given.linear("projection")
        assert table is not None
        norm, num_rows = self._norm(given, "norm"), self.config.layer_input_rows
        return LayerInputs(RowTable(table), projection, norm, size, self._ops, num_rows=num_rows)

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
                given.summed_linear("output"),
                self._ops,
            )
        take = self._take_attention if config.latent is None else self._take_latent
        return take(given, index, config)

    def _take_attention(self, given: Parameters, index: int, config: AttentionConfig) -> Attention:
        key_scale, value_scale = (given.optional(f"{part}_scale") for part in ("key", "value"))
        heads = HeadParameters(
            given.optional("query_norm"),
            given.optional("key_norm"),
            given.optional("sinks"),
            1.0 if key_scale is None else float(key_scale),
            1.0 if value_scale is None else float(value_scale),
            given.optional("relative_bias"),
        )
        output = given.summed_linear("output")
        qkv = given.linear("qkv")
        return Attention(config, index, qkv, output, heads, self._ops, self._ranks)

    def _take_latent(
        self, given: Parameters, index: int, config: AttentionConfig
    ) -> LatentAttention:
        assert config.latent is not None
        query_norm = given.optional("query_a_norm")
        names = ("query",) if query_norm is None else ("query_a", "query")
        to_latents, to_values = given.latent_products(config.num_heads, config.latent)
        return LatentAttention(
            config,
            index,
            tuple(given.linear(name) for name in names),
            query_norm,
            given.linear("key_value"),
            given.tensor("key_value_norm"),
            to_latents,
            to_values,
            given.summed_linear("output"),
            self._ops,
        )

    def _take_mlp(self, given: Parameters, config: MlpConfig, *, is_summed: bool = True) -> Mlp:
        up = given.linear("gate_up" if config.is_gated else "up")
        down = given.summed_linear("down") if is_summed else given.linear("down")
        activation = make_activation(config.activation, given.optional("activation"))
        if config.sparsity:
            activation = sparse(activation, config.sparsity, self._ranks)
        return Mlp(config, up, down, activation, self._ops)

    def _take_moe(self, given: Parameters, config: MoeConfig) -> Moe:
        shared, router = None, given.gate("router", torch.float32)
        assert router is not None
        if config.shared is not None:
            shared = self._take_mlp(given.below("shared."), config.shared, is_summed=False)
        return Moe(
            config,
            router,
            given.optional("router.bias"),
            given.optional("router.correction"),
            given.experts("experts.gate_up", config.num_held),
            given.experts("experts.down", config.num_held),
            shared,
            given.gate("shared_gate"),
            self._ops,
            given.optional("router.scale"),
            given.optional("router.expert_scales"),
            self._ranks.add,
        )


def _weight(norm: Norm | None) -> Tensor:
    assert norm is not None
    assert norm.weight is not None
    return norm.weight


def _has_usual_parts(layer: _Layer) -> bool:
    """Whether it has attention, a feed-forward layer and norms, and nothing else."""
    others = (
        layer.experts,
        layer.layer_input,
        layer.scalar,
        layer.cross,
        layer.altup,
        layer.laurel,
    )
    return all(each is None for each in others)


def _apply(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _is_here(place: Place, name: str) -> bool:
    """Whether the norm ``name`` is that of the rank's stage."""
    if name == "embedding_norm":
        return place.is_first_stage
    return place.is_last_stage or name != "final_norm"


def _has_norm(config: ModelConfig, name: str) -> bool:
    """Whether a model has a norm at that place, as far as its kind of block says."""
    if name == "final_norm":
        return config.has_final_norm
    if name == "embedding_norm":
        return config.has_embedding_norm
    return name in NORMS_OF_BLOCK[config.block]
