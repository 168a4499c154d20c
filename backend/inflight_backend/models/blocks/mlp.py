"""Feed-forward layers: one of its own, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.blocks.activations import KINDS, Activate, clamped_swiglu
from inflight_backend.models.blocks.lora import MultiplyRows
from inflight_backend.models.blocks.norms import Norm, plain_rms_norm
from inflight_backend.models.config import MlpConfig, MoeConfig
from inflight_backend.models.layers import Activation
from inflight_backend.models.ops import Ops
from inflight_backend.models.quantization.linears import MultiplyGroups

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
        self.kind = None if config.sparsity else KINDS.get(config.activation)
        """Of `reference.ACTIVATIONS`; None: another function."""
        self.is_gated = config.is_gated

    def __call__(self, x: Activation) -> Tensor:
        """One step's tokens."""
        if self.kind == "silu" and self.is_gated:
            # Without a name for what goes in: it is the most that lives in a step.
            return self.down(self._ops.silu_mul(self.up(x)))
        inner = self._activate(self.up(x))
        return self.down(self._ops.to_activation(inner))

    def _activate(self, inner: Tensor) -> Tensor:
        if self.kind is not None:
            return self._ops.activate(inner, self.kind, self.is_gated)
        if not self.is_gated:
            return self._activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self._activation(gate) * up


class PlainExperts:
    """`MultiplyRows` of linears that nothing changes."""

    __slots__ = ("multiply",)

    def __init__(self, multiply: MultiplyGroups) -> None:
        self.multiply = multiply

    def __call__(self, x: Tensor, starts: Tensor, tokens: Tensor) -> Tensor:
        """Rows of x, sorted by expert, times their expert's weight."""
        return self.multiply(x, starts)


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
        self.config, self._ops = config, ops
        self.router, self._router_bias, self._correction = router, router_bias, correction
        self.gate_up, self.down = gate_up, down
        self.shared, self._shared_gate = shared, shared_gate
        self._router_scale, self._expert_scales = router_scale, expert_scales
        self._add_up = add_up
        self.kind = KINDS.get(config.activation)
        """Of `reference.ACTIVATIONS`; None: another function."""

    @property
    def is_plain(self) -> bool:
        """Whether the answers of experts, chosen by the softmax of what the router says, and of
        what all tokens pass are added up as they are."""
        others = (self._router_bias, self._correction, self._shared_gate)
        is_plain = self.config.routing.is_plain and self.config.held_experts is None
        return is_plain and all(each is None for each in others)

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """One step's tokens; the router reads ``routed`` [T, hidden] in their place, if given."""
        config, num_tokens = self.config, len(x)
        routed = (x if routed is None else routed).float()
        if self._router_scale is not None:
            routed = plain_rms_norm(routed, ROUTER_EPS) * self._router_scale
        logits = self.router(routed)
        if self._router_bias is not None:
            logits = logits + self._router_bias
        experts, weights = self._ops.choose_experts(
            config.routing, config.top_k, logits, self._correction
        )
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
        inner = self.gate_up(rows, starts, tokens)
        inner = self._activate(inner)
        found = self.down(inner, starts, tokens)
        if config.held_experts is not None:  # what stands for another rank's may be infinite
            found = found.masked_fill(sorted_weights == 0, 0)
        if not config.routing.scales_input:
            found = found * sorted_weights
        by_token = torch.empty_like(found)
        by_token[order] = found
        answer = by_token.view(num_tokens, config.top_k, x.shape[1]).sum(1)
        if self.shared is None:
            return self._add_up(answer)
        shared = self.shared(self._ops.to_activation(x))
        if self._shared_gate is not None:
            shared = shared * self._shared_gate(x).sigmoid()
        return self._add_up(answer + shared)

    def _activate(self, inner: Tensor) -> Tensor:
        if self.config.activation == "clamped_swiglu":
            gate, up = inner.chunk(2, dim=-1)
            return clamped_swiglu(gate, up)
        if self.kind == "silu":
            return self._ops.plain_silu_mul(inner)
        assert self.kind is not None, "families read no other"
        return self._ops.activate(inner, self.kind, True)


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
