"""The table of cosines and sines of the rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inflight_backend.models.model_config import RopeConfig


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
