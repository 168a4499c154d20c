"""The gated activation of a feed-forward layer, optionally quantised to FP8 per token.

    out[t, i] = round(silu(gate_up[t, i])) * gate_up[t, I + i]       silu(x) = x / (1 + exp(-x))

``round`` is to the dtype of the input, as the checkpoints' own code does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument, narrow, store_fp8_row

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_BLOCK = 1024
# A quantised row is held in registers until its largest value is known.
_MAX_QUANTIZED = 32768


@triton.jit
def _silu_mul_kernel(
    out_ptr,  # [T, SIZE] dtype of the input, or float8_e4m3fn
    scales_ptr,  # [T] float32, with QUANTIZE
    gate_up_ptr,  # [T, 2 * SIZE]
    stride_row,
    SIZE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    gate_ptr = gate_up_ptr + row * stride_row + offs
    gate = tl.load(gate_ptr, mask=mask, other=0.0)
    up = tl.load(gate_ptr + SIZE, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    y = narrow(wide / (1.0 + tl.exp(-wide)), gate.dtype).to(tl.float32) * up
    if QUANTIZE:
        store_fp8_row(out_ptr, scales_ptr, y, row, offs, mask, SIZE)
    else:
        tl.store(out_ptr + row * SIZE + offs, narrow(y, gate.dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate first -> [T, I] of the same dtype."""
    num_tokens, size = _check(gate_up)
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _silu_mul_kernel[(num_tokens, launch.cdiv(size, _BLOCK))](
            out,
            out,
            gate_up,
            gate_up.stride(0),
            SIZE=size,
            QUANTIZE=False,
            BLOCK=_BLOCK,
            **launch.LAUNCH_OPTIONS,
        )
    return out


def silu_mul_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(silu(gate) * up as float8_e4m3fn [T, I], scales [T, 1] float32): value = out * scale."""
    num_tokens, size = _check(gate_up)
    if size > _MAX_QUANTIZED:
        raise ValueError(
            f"gate_up: quantised rows may have up to {2 * _MAX_QUANTIZED} elements, got {2 * size}"
        )
    device = gate_up.device
    out = torch.empty((num_tokens, size), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=device)
    if num_tokens:
        block = launch.next_power_of_2(size)
        _silu_mul_kernel[(num_tokens, 1)](
            out,
            scales,
            gate_up,
            gate_up.stride(0),
            SIZE=size,
            QUANTIZE=True,
            BLOCK=block,
            num_warps=min(max(block // 1024, 4), 16),
            **launch.LAUNCH_OPTIONS,
        )
    return out, scales


def _check(gate_up: torch.Tensor) -> tuple[int, int]:
    """(tokens, size of the output rows); raises ValueError naming the argument."""
    launch.check_arguments(
        Argument("gate_up", gate_up, ("T", "2I"), launch.FLOAT_DTYPES, launch.check_rows)
    )
    num_tokens, double_size = gate_up.shape
    if double_size % 2:
        raise ValueError(f"gate_up: rows must hold gate and up of one size, got {double_size}")
    return num_tokens, double_size // 2
