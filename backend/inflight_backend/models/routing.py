"""Which experts a token gets, by the scores of a router."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_backend.models.config import RoutingConfig


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
