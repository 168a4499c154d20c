"""The gated delta rule (arXiv 2412.06464) in plain torch.

For each head a matrix S [key_dim, value_dim] maps keys to values. At each token, with a decay
g <= 0 and a strength b, query and key unit vectors, and the query divided by the root of their
size:

    S = exp(g) S;    S += k (b (v - S^T k))^T;    out = S^T q
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 64
"""Tokens of a prompt that are computed at once."""


def delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    states: Tensor,
    slots: Tensor,
    eps: float,
) -> Tensor:
    """One token of each of B texts: queries and keys [B, key heads, K], values [B, H, V], decay and
    strength [B, H] float32 -> answers [B, H, V] float32. The rows ``slots`` [B] of states
    [S, H, K, V] float32 are carried on. ``eps``: below the root where vectors are made units."""
    query, key = delta_heads(query, key, value.shape[1], eps)
    state = states[slots] * decay.exp()[..., None, None]
    known = torch.einsum("bhkv,bhk->bhv", state, key)
    change = (value.float() - known) * strength[..., None]
    state = state + key[..., None] * change[..., None, :]
    states[slots] = state
    return torch.einsum("bhkv,bhk->bhv", state, query)


def delta_heads(query: Tensor, key: Tensor, num_heads: int, eps: float) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, key heads, K] of any dtype, for ``num_heads`` heads of values [T, H, K]
    in float32: units, and the queries scaled."""
    share = num_heads // key.shape[1]
    query, key = (_unit(each.float(), eps).repeat_interleave(share, dim=1) for each in (query, key))
    return query / key.shape[2] ** 0.5, key


def delta_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens of one text: queries and keys [T, H, K] as `delta_heads` makes them, values [T, H, V],
    decay and strength [T, H] float32, state [H, K, V] -> answers [T, H, V], and the state behind
    them.

    Within a chunk the changes of all tokens solve a triangular system: each is what its value is
    beyond what the state and the changes before it say.
    """
    query, key, value = (each.transpose(0, 1) for each in (query, key, value))
    decay, strength = decay.t(), strength.t()[..., None]
    found = []
    for start in range(0, query.shape[1], _CHUNK):
        rows = slice(start, start + _CHUNK)
        q, k, weight = query[:, rows], key[:, rows], strength[:, rows]
        past, between = _left(decay[:, rows])
        system = ((k * weight) @ k.transpose(1, 2) * between).tril(-1)
        wanted = torch.cat((value[:, rows] * weight, k * weight * past), dim=-1)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        changes, known = torch.split(solved, [value.shape[2], key.shape[2]], dim=-1)
        changes = changes - known @ state
        scores = (q @ k.transpose(1, 2)) * between
        found.append((q * past) @ state + scores @ changes)
        kept = k * between[:, -1, :, None]
        state = state * past[:, -1:] + kept.transpose(1, 2) @ changes
    return torch.cat(found, dim=1).transpose(0, 1), state


def _left(decay: Tensor) -> tuple[Tensor, Tensor]:
    """decay [H, T] -> what is left at each token of the state before them [H, T, 1], and at token
    i of what token j has brought [H, T, T], 0 for i < j.

    The latter adds up decays between the two: of differences of sums from the beginning, which may
    be hundreds, the last digits would be lost.
    """
    size = decay.shape[1]
    behind = decay[:, :, None].expand(-1, size, size).tril(-1)
    return decay.cumsum(dim=1).exp()[..., None], behind.cumsum(dim=1).exp().tril()


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
