"""A recurrence in place of attention: the gated delta rule, of Qwen3-Next.

Queries, keys and values pass a short causal convolution, and then the rule
(`inflight_kernels.reference.recurrence`). What a text has left in the matrices of the rule and in
the convolution lies in the state of its slot (`kv_cache.RecurrentStates`), so a prompt may come in
parts. Generations need nothing from the host, so that a CUDA graph can hold them.
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
from inflight_backend.models.ops import Ops
from inflight_kernels.reference import delta_chunks, delta_heads

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
        ops: Ops,
    ) -> None:
        """``inputs`` gives queries, keys, values and what gates the answer; ``gates`` strengths and
        steps; ``conv`` [channels, conv_size]; ``decay``: A_log and dt_bias [heads] float32;
        ``norm`` [value_dim]."""
        self._config, self._index = config, index
        self._inputs, self._gates, self._conv, self._norm = inputs, gates, conv, norm
        self._rate, self._step_bias = -decay[0].exp(), decay[1]
        self.output, self._step = output, ops.delta_step

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
        windows, states = step.states.layer(self._index)
        shape = (len(mixed), config.num_value_heads, config.value_dim)
        found = torch.empty(shape, dtype=torch.float32, device=mixed.device)
        start = inputs.num_generations
        if start:
            slots = inputs.slots[:start]
            window = torch.cat((windows[slots], mixed[:start, :, None]), dim=-1)
            windows[slots] = window[:, :, 1:]
            heads = self._heads(functional.silu((window * self._conv).sum(-1)))
            gates = decay[:start], strength[:start]
            found[:start] = self._step(*heads, *gates, states, slots, _NORM_EPS)
        if start == len(mixed):
            return found
        assert inputs.host is not None, "a recurrence over chunks cannot be captured"
        chunks = inputs.host.query[start:].tolist(), inputs.host.context[start:].tolist()
        for chunk, (count, context) in enumerate(zip(*chunks, strict=True)):
            slot = inputs.slots[inputs.num_generations + chunk][None]
            window, state = windows[slot], states[slot]
            if count == context:  # the slot has another text's state
                window, state = torch.zeros_like(window), torch.zeros_like(state)
            done = 0
            for end, row in (*step.states.cuts(chunk), (count, None)):
                if end == done:  # a chunk that ends with a snapshot
                    continue
                rows = slice(start + done, start + end)
                window = torch.cat((window, mixed[None, rows].transpose(1, 2)), dim=-1)
                inner = functional.conv1d(window, self._conv[:, None], groups=config.num_channels)
                window = window[:, :, 1 - config.conv_size :]
                query, key, value = self._heads(functional.silu(inner[0].t()))
                query, key = delta_heads(query, key, config.num_value_heads, _NORM_EPS)
                found[rows], state[0] = delta_chunks(
                    query, key, value.float(), decay[rows], strength[rows], state[0]
                )
                if row is not None:
                    windows[row], states[row] = window[0], state[0]
                done = end
            windows[slot], states[slot] = window, state
            start += count
        return found

    def _heads(self, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, key heads, key_dim], values [T, H, value_dim]; where these are tiled
        queries and keys [T, H, key_dim]."""
        config = self._config
        sizes = [config.key_size, config.key_size, config.value_size]
        query, key, value = torch.split(inner, sizes, dim=-1)
        query, key = (each.view(len(inner), -1, config.key_dim) for each in (query, key))
        if config.is_tiled:
            share = config.num_value_heads // config.num_key_heads
            query, key = query.repeat(1, share, 1), key.repeat(1, share, 1)
        return query, key, value.view(len(inner), -1, config.value_dim)
