"""A recurrence in place of attention: the gated delta rule (arXiv 2412.06464), of Qwen3-Next.

For each head a matrix S [key_dim, value_dim] maps keys to values. At each token, with a decay
g <= 0 and a strength b:

    S = exp(g) S;    S += k (b (v - S^T k))^T;    out = S^T q

Queries, keys and values pass a short causal convolution first. What a text has left in S and in
the convolution lies in the state of its slot (`kv_cache.RecurrentStates`), so a prompt may come in
parts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.attention import AttentionStep
from inflight_backend.models.blocks.mlp import Linear
from inflight_backend.models.blocks.norms import plain_rms_norm
from inflight_backend.models.config import DeltaConfig
from inflight_backend.models.layers import Activation

_CHUNK = 64
"""Tokens of a prompt that are computed at once."""
_NORM_EPS = 1e-6
"""Below the root where queries and keys are made unit vectors."""


class GatedDelta:
    """Of the layer ``index``: as `Attention`."""

    def __init__(
        self,
        config: DeltaConfig,
        index: int,
        inputs: Linear,
        gates: Linear,
        conv: Tensor,
        decay: tuple[Tensor, Tensor],
        norm: Tensor,
        output: Linear,
    ) -> None:
        """``inputs`` gives queries, keys, values and what gates the answer; ``gates`` strengths and
        steps; ``conv`` [channels, conv_size]; ``decay``: A_log and dt_bias [heads] float32;
        ``norm`` [value_dim]."""
        self._config, self._index = config, index
        self._inputs, self._gates, self._conv, self._norm = inputs, gates, conv, norm
        self._rate, self._step_bias = -decay[0].exp(), decay[1]
        self.output = output

    def __call__(
        self, x: Activation, num_tokens: int, positions: Tensor, step: AttentionStep
    ) -> Tensor:
        """x [T, hidden] -> [T, value_size], before `output`."""
        config = self._config
        sizes = [config.num_channels, config.value_size]
        mixed, gate = torch.split(self._inputs(x), sizes, dim=-1)
        strength, steps = self._gates(x).float().chunk(2, dim=-1)
        decay = self._rate * functional.softplus(steps + self._step_bias)
        found = self._recur(mixed, decay, strength.sigmoid(), step)
        found = plain_rms_norm(found.to(mixed.dtype), config.norm_eps) * self._norm
        gate = gate.view(found.shape).float()
        return (found.float() * functional.silu(gate)).to(mixed.dtype).view(num_tokens, -1)

    def _recur(self, mixed: Tensor, decay: Tensor, strength: Tensor, step: AttentionStep) -> Tensor:
        """mixed [T, channels], decay and strength [T, H] -> [T, H, value_dim] float32; the states
        of the step's slots go on."""
        config, inputs = self._config, step.inputs
        assert step.states is not None
        assert inputs.host is not None, "a recurrence cannot be captured"
        windows, states = step.states.layer(self._index)
        shape = (len(mixed), config.num_value_heads, config.value_dim)
        found = torch.empty(shape, dtype=torch.float32, device=mixed.device)
        start = inputs.num_generations
        if start:
            slots = inputs.slots[:start]
            window = torch.cat((windows[slots], mixed[:start, :, None]), dim=-1)
            windows[slots] = window[:, :, 1:]
            heads = self._heads(functional.silu((window * self._conv).sum(-1)))
            found[:start], states[slots] = delta_step(
                *heads, decay[:start], strength[:start], states[slots]
            )
        lengths = zip(inputs.host.query.tolist(), inputs.host.context.tolist(), strict=True)
        for index, (count, context) in enumerate(lengths):
            if index < inputs.num_generations:
                continue
            slot, rows = inputs.slots[index : index + 1], slice(start, start + count)
            window, state = windows[slot], states[slot]
            if count == context:  # the slot has another text's state
                window, state = torch.zeros_like(window), torch.zeros_like(state)
            window = torch.cat((window, mixed[None, rows].transpose(1, 2)), dim=-1)
            windows[slot] = window[:, :, 1 - config.conv_size :]
            inner = functional.conv1d(window, self._conv[:, None], groups=config.num_channels)
            heads = self._heads(functional.silu(inner[0].t()))
            found[rows], states[slot] = delta_chunks(*heads, decay[rows], strength[rows], state[0])
            start += count
        return found

    def _heads(self, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, H, key_dim], values [T, H, value_dim], float32."""
        config = self._config
        sizes = [config.key_size, config.key_size, config.value_size]
        query, key, value = torch.split(inner.float(), sizes, dim=-1)
        share = config.num_value_heads // config.num_key_heads
        query, key = (
            _unit(each.view(len(inner), -1, config.key_dim)).repeat_interleave(share, dim=1)
            for each in (query, key)
        )
        return query / config.key_dim**0.5, key, value.view(len(inner), -1, config.value_dim)


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of B texts: queries and keys [B, H, K], values [B, H, V], decay and
    strength [B, H], state [B, H, K, V] -> answers [B, H, V] and states."""
    state = state * decay.exp()[..., None, None]
    known = torch.einsum("bhkv,bhk->bhv", state, key)
    change = (value - known) * strength[..., None]
    state = state + key[..., None] * change[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, query), state


def delta_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [T, ...] of one text, otherwise as `delta_step`, with state [H, K, V].

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


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
