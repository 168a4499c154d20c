"""RMS norm, alone or after a residual sum, and optionally quantised to FP8 with a scale per token.

    y = round(x / sqrt(mean(x^2) + eps)) * weight        over the last dimension, in float32

``round`` is to the dtype of x, as the checkpoints' own code does. With a residual, x is
``round(x + residual)``, which is returned too. One program per token; each number is read and
written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument, narrow, store_fp8_row

# mypy: disable-error-code="no-untyped-def, untyped-decorator"


# A row is held in registers: 64 float32 per thread at 16 warps.
_MAX_HIDDEN = 32768


@triton.jit
def _rms_norm_kernel(
    out_ptr,  # [T, HIDDEN] dtype of x, or float8_e4m3fn
    scales_ptr,  # [T] float32, with QUANTIZE
    residual_out_ptr,  # [T, HIDDEN] dtype of x, with ADD
    x_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    stride_x,
    stride_residual,
    HIDDEN: tl.constexpr,
    ADD: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < HIDDEN
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0)
    dtype = x.dtype
    if ADD:
        residual = tl.load(residual_ptr + row * stride_residual + offs, mask=mask, other=0.0)
        x = narrow(x.to(tl.float32) + residual.to(tl.float32), dtype)
        tl.store(residual_out_ptr + row * HIDDEN + offs, x, mask=mask)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = narrow(x * inverse, dtype).to(tl.float32) * weight
    if QUANTIZE:
        store_fp8_row(out_ptr, scales_ptr, y, row, offs, mask, HIDDEN)
    else:
        tl.store(out_ptr + row * HIDDEN + offs, narrow(y, dtype), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of x [T, hidden] with weight [hidden] of any float dtype -> [T, hidden] like x."""
    return _launch(x, None, weight, eps, quantize=False)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual), all [T, hidden] of one dtype; inputs are kept."""
    out, new_residual, _ = _launch(x, residual, weight, eps, quantize=False)
    return out, new_residual


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm as float8_e4m3fn [T, hidden], scales [T, 1] float32): norm = out * scale."""
    out, _, scales = _launch(x, None, weight, eps, quantize=True)
    return out, scales


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(norm of x + residual as float8_e4m3fn, its scales [T, 1] float32, x + residual)."""
    out, new_residual, scales = _launch(x, residual, weight, eps, quantize=True)
    return out, scales, new_residual


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    quantize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, new residual, scales); the last two are empty unless asked for."""
    _check(x, residual, weight)
    num_tokens, hidden = x.shape
    out_dtype = torch.float8_e4m3fn if quantize else x.dtype
    out = torch.empty((num_tokens, hidden), dtype=out_dtype, device=x.device)
    scales = torch.empty((num_tokens if quantize else 0, 1), dtype=torch.float32, device=x.device)
    new_residual = torch.empty(
        (0 if residual is None else num_tokens, hidden), dtype=x.dtype, device=x.device
    )
    if num_tokens:
        block = launch.next_power_of_2(hidden)
        _rms_norm_kernel[(num_tokens,)](
            out,
            scales,
            new_residual,
            x,
            x if residual is None else residual,
            weight,
            eps,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            HIDDEN=hidden,
            ADD=residual is not None,
            QUANTIZE=quantize,
            BLOCK=block,
            num_warps=min(max(block // 512, 4), 16),
            **launch.LAUNCH_OPTIONS,
        )
    return out, new_residual, scales


@launch.once_in_a_row
def _check(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    """Raise ValueError, naming the argument, unless all fit one another."""
    hidden = launch.check_arguments(
        Argument("x", x, ("T", "hidden"), launch.FLOAT_DTYPES, launch.check_rows),
        Argument("residual", residual, ("T", "hidden"), (x.dtype,), launch.check_rows),
        Argument("weight", weight, ("hidden",), launch.FLOAT_DTYPES),
    )["hidden"]
    if hidden > _MAX_HIDDEN:
        raise ValueError(f"x: rows may have up to {_MAX_HIDDEN} elements, got {hidden}")
