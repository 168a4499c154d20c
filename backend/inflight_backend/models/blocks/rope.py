"""Positions: tables of the rotary embedding for a served length, and sines that are added."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inflight_backend.models.attention import RopeTables
from inflight_backend.models.config import ModelConfig, RopeConfig


def make_tables(model: ModelConfig, num_positions: int, device: str) -> RopeTables:
    """The tables that the layers of a model need."""
    return {kind: make_cos_sin(*kind, num_positions).to(device) for kind in model.rope_kinds}


def sinusoids(positions: Tensor, size: int) -> Tensor:
    """positions [T] -> [T, size] float32: sines, then cosines of size / 2 angles, as tensor2tensor
    has them (XGLM)."""
    half = size // 2
    exponents = torch.arange(half, device=positions.device) * (-math.log(10_000) / (half - 1))
    angles = positions[:, None] * exponents.exp()
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def make_cos_sin(rope: RopeConfig | None, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32 on the CPU: the cosines of head_dim / 2 angles, the sines.

    The angle of pair ``i`` at position ``p`` is ``p * frequency[i]``; 0 without ``rope``.
    """
    angles = torch.zeros(num_positions, head_dim // 2)
    scale = torch.ones(head_dim // 2)
    if rope is not None:
        frequencies = _frequencies(rope, num_positions)
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles[:, : len(frequencies)] = positions[:, None] * frequencies
        scale[: len(frequencies)] = rope.attention_factor
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1)


def _frequencies(rope: RopeConfig, num_positions: int) -> Tensor:
    """``theta ** (-2 i / dim)``, then scaled; see the kinds below."""
    theta = rope.theta
    if rope.kind == "dynamic" and num_positions > rope.original_max_positions:
        # The theta of a sequence of the served length, so that all sequences share one table.
        stretch = rope.factor * num_positions / rope.original_max_positions - (rope.factor - 1)
        theta *= stretch ** (rope.dim / (rope.dim - 2))
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    frequencies = 1.0 / (theta**exponents)
    is_short = num_positions <= rope.original_max_positions
    if divisors := rope.short_divisors if is_short else rope.divisors:
        return frequencies / torch.tensor(divisors)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "proportional":
        frequencies[rope.num_turning :] = 0.0
        return frequencies
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1 (``apply_scaling`` of the published reference code): waves longer than ``original /
    low`` positions are divided by ``factor``, waves shorter than ``original / high`` stay, those
    between are blended linearly in ``original / wavelength``."""
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    share = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - share) * frequencies / rope.factor + share * frequencies


def _yarn(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071): frequencies that turn more than ``beta_fast`` times in the original
    length stay, those that turn less than ``beta_slow`` times are divided by ``factor``; those
    between are blended linearly in their index."""

    def index_of(num_turns: float) -> float:
        length = rope.original_max_positions / (num_turns * 2 * math.pi)
        return rope.dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high if high > low else low + 0.001
    ramp = ((torch.arange(rope.dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (1 - ramp) + frequencies / rope.factor * ramp
