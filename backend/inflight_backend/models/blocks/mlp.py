"""Feed-forward layers: one of its own, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.blocks.activations import ACTIVATIONS, Activate, clamped_swiglu
from inflight_backend.models.blocks.lora import MultiplyRows
from inflight_backend.models.blocks.norms import Norm, plain_rms_norm
from inflight_backend.models.config import MlpConfig, MoeConfig, RoutingConfig
from inflight_backend.models.layers import Activation
from inflight_backend.models.ops import Ops

ROUTER_EPS = 1e-6
"""Of the norm before a router that has one (Gemma 4's configuration of all sizes)."""

Linear: TypeAlias = Callable[[Any], Tensor]  # takes the `Activation` of its own `Ops`


class Mlp:
    """``down(act(gate) * up)``, or ``down(act(up))``: x [T, hidden] -> [T, hidden]."""

    def __init__(
        self, config: MlpConfig, up: Linear, down: Linear, activation: Activate, ops: Ops
    ) -> None:
        """``up`` gives gate and up side by side where there is a gate."""
        self.up, self.down, self._ops, self._activation = up, down, ops, activation
        self._is_gated = config.is_gated
        is_plain = config.is_gated and not config.sparsity
        self.is_silu = is_plain and config.activation in ("silu", "swish")

    def __call__(self, x: Activation) -> Tensor:
        """One step's tokens."""
        if self.is_silu:  # without a name for what goes in: it is the most that lives in a step
            return self.down(self._ops.silu_mul(self.up(x)))
        inner = self.up(x)
        if self._is_gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self._activation(gate) * up
        else:
            inner = self._activation(inner)
        return self.down(self._ops.to_activation(inner))


class Moe:
    """A mixture of experts: x [T, hidden] -> [T, hidden].

    Rows are sorted by expert, one for each token and expert, so that each linear of all experts is
    one grouped product. Nothing is waited for on a GPU.
    """

    def __init__(
        self,
        config: MoeConfig,
        router: Linear,
        router_bias: Tensor | None,
        correction: Tensor | None,
        gate_up: MultiplyRows,
        down: MultiplyRows,
        shared: Mlp | None,
        shared_gate: Linear | None,
        ops: Ops,
        router_scale: Tensor | None = None,
        expert_scales: Tensor | None = None,
        add_up: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """``router`` takes float32, whatever the model's dtype is; ``gate_up`` and
        ``down`` are the linears of all experts; ``correction`` and ``expert_scales`` [E];
        ``router_scale`` [hidden]: of what the router reads, normed. ``add_up`` sums the answers of
        the ranks that hold parts of the experts."""
        self._config, self._ops = config, ops
        self._router, self._router_bias, self._correction = router, router_bias, correction
        self._gate_up, self._down = gate_up, down
        self._shared, self._shared_gate = shared, shared_gate
        self._router_scale, self._expert_scales = router_scale, expert_scales
        self._add_up = add_up

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """One step's tokens; the router reads ``routed`` [T, hidden] in their place, if given."""
        config, num_tokens = self._config, len(x)
        routed = (x if routed is None else routed).float()
        if self._router_scale is not None:
            routed = plain_rms_norm(routed, ROUTER_EPS) * self._router_scale
        logits = self._router(routed)
        if self._router_bias is not None:
            logits = logits + self._router_bias
        experts, weights = choose_experts(config.routing, config.top_k, logits, self._correction)
        if self._expert_scales is not None:
            weights = weights * self._expert_scales[experts]
        if config.held_experts is not None:
            experts, weights = _only_held(config.held_experts, experts, weights)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(config.num_held, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        starts = functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        tokens, sorted_weights = order // config.top_k, weights.flatten()[order, None].to(x.dtype)
        rows = x[tokens]
        if config.routing.scales_input:
            rows = rows * sorted_weights
        inner = self._gate_up(rows, starts, tokens)
        inner = self._activate(inner)
        found = self._down(inner, starts, tokens)
        if config.held_experts is not None:  # what stands for another rank's may be infinite
            found = found.masked_fill(sorted_weights == 0, 0)
        if not config.routing.scales_input:
            found = found * sorted_weights
        by_token = torch.empty_like(found)
        by_token[order] = found
        answer = by_token.view(num_tokens, config.top_k, x.shape[1]).sum(1)
        if self._shared is None:
            return self._add_up(answer)
        shared = self._shared(self._ops.to_activation(x))
        if self._shared_gate is not None:
            shared = shared * self._shared_gate(x).sigmoid()
        return self._add_up(answer + shared)

    def _activate(self, inner: Tensor) -> Tensor:
        if self._config.activation in ("silu", "swish"):
            return self._ops.plain_silu_mul(inner)
        gate, up = inner.chunk(2, dim=-1)
        if self._config.activation == "clamped_swiglu":
            return clamped_swiglu(gate, up)
        return ACTIVATIONS[self._config.activation](gate) * up


class ExpertBranch:
    """Experts beside a dense layer (Gemma 4): both answers are normed, then added."""

    def __init__(self, moe: Moe, input_norm: Norm, output_norm: Norm, dense_norm: Norm) -> None:
        self._moe, self._input_norm = moe, input_norm
        self._output_norm, self._dense_norm = output_norm, dense_norm

    def __call__(self, x: Tensor, dense: Tensor) -> Tensor:
        """x [T, hidden] without the layer's norm, and what the dense layer made of it with."""
        found = self._moe(self._input_norm(x), x)
        return self._dense_norm(dense) + self._output_norm(found)


def _only_held(held: tuple[int, int], experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Experts [T, k], counted among those that are held here, and their weights: 0 where another
    rank holds the expert, and any number stands for it (nothing waits for a count of rows)."""
    first, end = held
    is_held = (experts >= first) & (experts < end)
    return (experts - first).clamp(0, end - first - 1), weights * is_held


def choose_experts(
    routing: RoutingConfig, top_k: int, logits: Tensor, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Experts [T, k] int64 and their weights [T, k] float32, by the router's logits [T, E]."""
    if routing.score == "softmax_of_chosen":
        values, experts = logits.topk(top_k, dim=-1)
        return experts, values.softmax(-1)
    if routing.score == "sigmoid_of_chosen":
        values, experts = logits.topk(top_k, dim=-1)
        return experts, values.sigmoid()
    if routing.score == "sparsemixer":
        return _sparsemixer(logits, routing.jitter)
    scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction.float()
    if routing.num_groups > 1:
        ranked = _keep_best_groups(routing, ranked)
    experts = ranked.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if routing.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.norm_eps)
    return experts, weights * routing.scale


def _keep_best_groups(routing: RoutingConfig, scores: Tensor) -> Tensor:
    groups = scores.view(len(scores), routing.num_groups, -1)
    if routing.group_score == "top2":
        best = groups.topk(2, dim=-1).values.sum(-1)
    else:
        best = groups.amax(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(routing.num_chosen_groups, dim=-1).indices, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def _sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Two experts, each weighed among the logits close to the best that is left (Phi-3.5-MoE)."""
    experts, weights, left = [], [], logits
    for _ in range(2):
        best, expert = left.max(-1, keepdim=True)
        distance = (best - logits) / logits.abs().clamp(min=best)
        near = left.masked_fill(distance > 2 * jitter, -torch.inf)
        weights.append(near.softmax(-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(experts, -1), torch.cat(weights, -1)
