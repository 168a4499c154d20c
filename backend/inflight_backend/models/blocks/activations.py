"""Activation functions by the names that ``config.json`` has for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.parallel.collectives import NO_COLLECTIVES, Collectives
from inflight_kernels import reference

Activate = Callable[[Tensor], Tensor]

KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Which function of `reference.ACTIVATIONS` a name means."""


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """That of gpt-oss, for gate and up of one shape."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """Of Apertus (arXiv 2411.13010), with four learned numbers."""
    alpha_p, alpha_n, beta, eps = numbers.to(x.dtype).unbind()
    alpha_p, alpha_n = functional.softplus(alpha_p), beta + functional.softplus(alpha_n)
    negative = (torch.expm1(torch.minimum(x, eps)) - x) * alpha_n + beta * x
    return torch.where(x > 0, alpha_p * x * x + beta * x, negative)


def sparse(activate: Activate, sparsity: float, ranks: Collectives = NO_COLLECTIVES) -> Activate:
    """``activate`` of numbers that are taken for normally distributed in each row: of the largest,
    less where they begin, and 0 for the ``sparsity`` that are smaller (Gemma 3n). A row is that of
    all ``ranks``, of which each has equally many of its numbers."""
    deviations, size = NormalDist().inv_cdf(sparsity), ranks.place.tensor_size

    def mean_of(x: Tensor) -> Tensor:
        return ranks.add(x.mean(-1, keepdim=True)) / size

    def apply(x: Tensor) -> Tensor:
        wide = x.float()
        mean = mean_of(wide)
        deviation = mean_of((wide - mean).square()).sqrt()
        return activate(functional.relu(x - (mean + deviation * deviations).to(x.dtype)))

    return apply


def make_activation(name: str, numbers: Tensor | None) -> Activate:
    """The function of that name, with the ``numbers`` that a layer has learned for it."""
    if numbers is not None:
        return partial(_xielu, numbers=numbers)
    return reference.ACTIVATIONS[KINDS[name]]
