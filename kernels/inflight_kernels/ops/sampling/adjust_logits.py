"""Bias and penalties, in one pass over the logits, in place.

The rule is that of ``reference.adjust_logits`` (which names its source). One program per row and
chunk of the vocabulary; rows that ask for nothing are left alone after reading their settings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_MAX_CHUNK = 2048


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "temperature_ptr", "penalties_ptr"])
def _adjust_logits_kernel(
    logits_ptr,  # [N, V] float32
    slots_ptr,  # [N] int64
    temperature_ptr,  # [N] float32
    bias_ptr,  # [S, V] float32, read with HAS_BIAS only
    counts_ptr,  # [S, V] int32, read with HAS_COUNTS only
    penalties_ptr,  # [N, 3] float32
    vocabulary,
    stride_logits,
    HAS_BIAS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = offs < vocabulary
    slot = tl.load(slots_ptr + row)
    repetition = tl.load(penalties_ptr + 3 * row)
    presence = tl.load(penalties_ptr + 3 * row + 1)
    frequency = tl.load(penalties_ptr + 3 * row + 2)
    has_penalties = (repetition != 1) | (presence != 0) | (frequency != 0)
    if has_penalties | HAS_BIAS:
        x = tl.load(logits_ptr + row * stride_logits + offs, mask=mask, other=0.0)
        if HAS_BIAS:
            x += tl.load(bias_ptr + slot * vocabulary + offs, mask=mask, other=0.0)
        if HAS_COUNTS:
            seen = tl.load(counts_ptr + slot * vocabulary + offs, mask=mask, other=0)
            divisor = tl.zeros_like(x) + repetition
            x = tl.where(seen > 0, tl.where(x < 0, x * repetition, tl.div_rn(x, divisor)), x)
            number = (seen // 2).to(tl.float32)
            temperature = tl.load(temperature_ptr + row)
            scale = tl.where(temperature == 0, 1.0, temperature)
            x -= scale * (tl.where(number > 0, presence, 0.0) + number * frequency)
        tl.store(logits_ptr + row * stride_logits + offs, x, mask=mask)


def adjust_logits(
    logits: torch.Tensor,  # [N, V] float32, changed in place
    slots: torch.Tensor,  # [N] int64
    temperature: torch.Tensor,  # [N] float32
    bias: torch.Tensor | None,  # [S, V] float32
    counts: torch.Tensor | None,  # [S, V] int32
    penalties: torch.Tensor,  # [N, 3] float32: repetition, presence, frequency
) -> None:
    """Add bias and apply penalties for what was seen; see ``reference.adjust_logits``.

    Raises ValueError naming the argument that does not fit.
    """
    launch.check_arguments(
        Argument("logits", logits, ("N", "V"), (torch.float32,), launch.check_rows),
        Argument("slots", slots, ("N",), (torch.int64,)),
        Argument("temperature", temperature, ("N",), (torch.float32,)),
        Argument("penalties", penalties, ("N", 3), (torch.float32,)),
        Argument("bias", bias, ("S", "V"), (torch.float32,)),
        Argument("counts", counts, ("S", "V"), (torch.int32,)),
    )
    num_rows, vocabulary = logits.shape
    if num_rows == 0 or (bias is None and counts is None):
        return
    chunk = min(launch.next_power_of_2(vocabulary), _MAX_CHUNK)
    _adjust_logits_kernel[(launch.cdiv(vocabulary, chunk), num_rows)](
        logits,
        slots,
        temperature,
        logits if bias is None else bias,
        slots if counts is None else counts,
        penalties,
        vocabulary,
        logits.stride(0),
        HAS_BIAS=bias is not None,
        HAS_COUNTS=counts is not None,
        CHUNK=chunk,
        num_warps=8,
        **launch.LAUNCH_OPTIONS,
    )
