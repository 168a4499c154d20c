"""The small operations a step is made of, as a table, so that a device can bring its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from inflight_kernels import reference


@dataclass(frozen=True, slots=True)
class Ops:
    """Signatures and meaning are those of `inflight_kernels.reference`."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    apply_rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    greedy: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


TORCH_OPS = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
    apply_rope=reference.apply_rope,
    greedy=reference.greedy,
    sample=reference.sample,
)
