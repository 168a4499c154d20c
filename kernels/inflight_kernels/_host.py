"""What the host side of every op needs: argument checks and facts about the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CACHE_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn)

# H200, the machine the launch heuristics were written for. Used where there is no CUDA device to
# ask: in the interpreter, and when compiling for another machine.
_H200_NUM_SMS = 132
_H200_CAPABILITY = 90
_FP8_CAPABILITY = 89

# Programmatic dependent launch (Hopper and later): the kernels of a layer come to the device while
# the one before them ends, and wait there for its results (`_device.wait_for_inputs`). Off until it
# has been measured; `INFLIGHT_EARLY_LAUNCH=1` turns it on.
IS_EARLY = os.environ.get("INFLIGHT_EARLY_LAUNCH") == "1" and not knobs.runtime.interpret

# Every launch asks for fused multiply-adds, the default that Triton 3.10 gives up: without them
# softmax, norms and the draw are slower, and round otherwise.
LAUNCH_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
EARLY_OPTIONS = {**LAUNCH_OPTIONS, **({"launch_pdl": True} if IS_EARLY else {})}

# For up to 256 threads. The compiler aims at some number of resident programs, and spills a few
# registers for the last one of them; with this it takes what it needs. For where something else
# bounds that number, or speed does not matter.
ALL_REGISTERS: dict[str, Any] = {"maxnreg": 255}


def next_power_of_2(value: int) -> int:
    """The smallest power of two >= value (and >= 1): Triton's tiles have no other lengths."""
    return 1 << max(value - 1, 0).bit_length()


def dtype_name(dtype: torch.dtype) -> str:
    """As torch names it, without its own name."""
    return str(dtype).removeprefix("torch.")


def cdiv(value: int, divisor: int) -> int:
    """Division rounded up."""
    return -(-value // divisor)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; an H200's for a CPU tensor (interpreter, compile gate)."""
    if device.type != "cuda":
        return _H200_NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def capability() -> int:
    """CUDA capability kernels are compiled for, as 80 or 90; an H200's in the interpreter."""
    if knobs.runtime.interpret:
        return _H200_CAPABILITY
    return int(driver.active.get_current_target().arch)


def has_large_shared_memory() -> bool:
    """True with 228 KiB per multiprocessor: compute capability 9 to 11. (12 has 100 KiB.)"""
    return 90 <= capability() < 120


_NUM_REMEMBERED = 4  # context and generation attention take turns in a mixed step


def once_in_a_row(check: Callable[..., None]) -> Callable[..., None]:
    """``check``, left out for arguments like some that have just passed: tensors are alike that
    differ in what they hold and where they lie. The layers of a step ask the same again, and checks
    were a fifth of what the kernels of an eager step take of the host (38 of 172 us of a layer of
    an 8B). For a check of nothing but its arguments."""
    passed: tuple[list[Any], ...] = ()

    @wraps(check)
    def run(*arguments: Any) -> None:
        nonlocal passed
        signature = [_signature(argument) for argument in arguments]
        if signature not in passed:
            check(*arguments)
            passed = (signature, *passed[: _NUM_REMEMBERED - 1])

    return run


def _signature(argument: Any) -> Any:
    """What checks look at."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    return argument


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError naming the argument unless its shape matches (None matches any size)."""
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(
        w is not None and w != s for w, s in zip(shape, sizes, strict=True)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape must be [{wanted}], got {list(sizes)}")


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise ValueError naming the argument unless its dtype is one of those given."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(map(dtype_name, dtypes))
        got = dtype_name(tensor.dtype)
        raise ValueError(f"{name}: dtype must be one of {allowed}; got {got}")


def check_fp8_device() -> None:
    """Raise ValueError unless the GPU converts float8_e4m3fn."""
    if capability() < _FP8_CAPABILITY:
        raise ValueError(
            f"float8_e4m3fn: needs a GPU of compute capability {_FP8_CAPABILITY / 10} or later, "
            f"this one has {capability() / 10}"
        )


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless elements of the last dimension lie next to each other in memory."""
    if tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: last dimension must have stride 1, got {tensor.stride(-1)}; "
            "pass a tensor whose last dimension is contiguous"
        )


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous; call .contiguous() before passing it")


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError naming the first tensor that is not where the first one is."""
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = present[0]
    for name, tensor in present[1:]:
        if tensor.device != first.device:
            raise ValueError(
                f"{name}: is on {tensor.device} but {first_name} is on {first.device}; "
                "move them to one device"
            )


def check_positive(name: str, value: float | None) -> None:
    """Raise ValueError unless the number is absent or greater than zero."""
    if value is not None and not value > 0:
        raise ValueError(f"{name}: must be greater than 0 or None, got {value}")
