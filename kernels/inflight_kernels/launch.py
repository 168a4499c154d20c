"""What all ops share: argument checks, facts about the device, tuned tiles, and device functions.

``tuned_tiles.json`` beside this file holds measured tiles; without it, or for a shape that is not
in it, the ops choose by rule (their ``choose_tile``). ``python -m kernel_ops.best_tiles`` writes it
from the report of a sweep on the GPU in question.

Five operations of the interpreter of Triton 3.6 differ from a GPU's; the device functions here work
around them. Compiled code has none of this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BYTE_DTYPES = (torch.float8_e4m3fn, torch.int8)
"""Of a quantised cache."""
CACHE_DTYPES = (*FLOAT_DTYPES, *BYTE_DTYPES)

# H200, the machine the launch heuristics were written for. Used where there is no CUDA device to
# ask: in the interpreter, and when compiling for another machine.
_H200_NUM_SMS = 132
_H200_CAPABILITY = 90
_FP8_CAPABILITY = 89

# Every launch asks for fused multiply-adds, the default that Triton 3.10 gives up: without them
# softmax, norms and the draw are slower, and round otherwise.
LAUNCH_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

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


class Argument(NamedTuple):
    """A tensor that an op was given, and what it must be."""

    name: str
    tensor: torch.Tensor | None  # None: not given
    shape: tuple[int | str, ...]  # a name stands for one size, wherever it occurs in a call's table
    dtypes: Sequence[torch.dtype]
    check_layout: Callable[[str, torch.Tensor], None] | None = check_contiguous


def check_arguments(*arguments: Argument) -> dict[str, int]:
    """The sizes that the names in the shapes stand for. The first tensor must be given, and all
    others be on its device. Raises ValueError naming the argument that does not fit."""
    first_name, first = arguments[0][:2]
    sizes: dict[str, int] = {}
    for name, tensor, shape, dtypes, check_layout in arguments:
        if tensor is None:
            continue
        check_shape(name, tensor, [sizes.get(s) if isinstance(s, str) else s for s in shape])
        sizes.update((s, n) for s, n in zip(shape, tensor.shape, strict=True) if isinstance(s, str))
        check_dtype(name, tensor, dtypes)
        if check_layout is not None:
            check_layout(name, tensor)
        if first is None or tensor.device != first.device:
            check_same_device(**{first_name: first, name: tensor})
    return sizes


def check_positive(name: str, value: float | None) -> None:
    """Raise ValueError unless the number is absent or greater than zero."""
    if value is not None and not value > 0:
        raise ValueError(f"{name}: must be greater than 0 or None, got {value}")


_MAX_ROW_SIZE = 32768  # a row is held in registers until its largest value is known


def quantize_rows(
    kernel: Any, x: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantize_fp8` and `quantize_int8` do around their kernels: x [T, n] -> numbers of
    ``dtype`` [T, n] and scales [T, 1] float32. Raises ValueError naming what does not fit."""
    check_arguments(Argument("x", x, ("T", "n"), FLOAT_DTYPES, check_rows))
    num_tokens, size = x.shape
    if not 0 < size <= _MAX_ROW_SIZE:
        raise ValueError(f"x: rows must have 1 to {_MAX_ROW_SIZE} elements, got {size}")
    out = torch.empty((num_tokens, size), dtype=dtype, device=x.device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    if num_tokens:
        block = next_power_of_2(size)
        num_warps = min(max(block // 512, 4), 16)
        kernel[(num_tokens,)](
            out, scales, x, x.stride(0), SIZE=size, BLOCK=block, num_warps=num_warps,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
    return out, scales


PATH = Path(__file__).with_name("tuned_tiles.json")


def tile_key(op: str, capability: int, head_dim: int, group: int, cache_dtype: str) -> str:
    """How a tile is looked up; ``cache_dtype`` as torch names it, ``group`` query heads per KV
    head."""
    return f"{op} sm_{capability} head_dim={head_dim} group={group} {cache_dtype}"


def tuned_tile(op: str, head_dim: int, group: int, cache_dtype: str) -> list[int] | None:
    """The fields of the op's tile for the current GPU, None if it was not measured."""
    return _table().get(tile_key(op, capability(), head_dim, group, cache_dtype))


@cache
def _table() -> dict[str, list[int]]:
    if not PATH.is_file():
        return {}
    content = json.loads(PATH.read_text(encoding="utf-8"))
    tiles: dict[str, list[int]] = content["tiles"]
    return tiles


# mypy: disable-error-code="no-untyped-def, untyped-decorator"

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
FP8_MAX = tl.constexpr(448.0)  # largest finite float8_e4m3fn


@triton.jit
def dot(a, b):
    """a [M, K] @ b [K, N] in float32. (The interpreter multiplies the bits of bfloat16.)"""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_dot_by_rows(acc, a, b):
    """acc + `dot` whose numbers do not depend on their place in the tile. Matrix units compute all
    alike, and sum onto ``acc`` themselves (of FP8, a sum behind them would keep them waiting).
    (The library behind the interpreter does not, so the products are summed one by one.)"""
    if INTERPRETED:
        return acc + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def find_group(tile, starts_ptr, num_groups, SIZE: tl.constexpr):
    """The group that owns a tile of ``SIZE`` rows, where group g has rows ``starts[g]`` to
    ``starts[g + 1]``.

    Group g gets the tiles from ``starts[g] // SIZE + g`` on: at least as many as it needs, at most
    one too many, and their numbers rise with g, so counting finds the owner.
    """
    AT_A_TIME: tl.constexpr = 256  # one compiled kernel for any number of groups
    num_before = 0
    for first in range(0, num_groups, AT_A_TIME):
        groups = first + tl.arange(0, AT_A_TIME)
        starts = tl.load(starts_ptr + groups, mask=groups < num_groups, other=0)
        is_before = (starts // SIZE + groups <= tile) & (groups < num_groups)
        num_before += tl.sum(is_before.to(tl.int32), axis=0)
    return num_before - 1


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to dtype, rounded to nearest even. (The interpreter cuts bfloat16 off.)"""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def to_fp8(x):
    """float32 to float8_e4m3fn, clamped to +-448 and rounded to nearest even.

    (The interpreter loses the carry of a rounding mantissa, so it gets numbers on the grid:
    multiples of 2^(exponent - 3), and of 2^-9 below the smallest normal one.)
    """
    x = tl.clamp(x, -FP8_MAX, FP8_MAX)
    if INTERPRETED:
        exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
        step = ((tl.maximum(exponent, 127 - 6) - 3) << 23).to(tl.float32, bitcast=True)
        shift = step * 12582912.0  # 1.5 * 2^23: adding it rounds to a multiple of step
        x = (x + shift) - shift
    return x.to(tl.float8e4nv)


@triton.jit
def to_int8(x):
    """float32 to int8, clamped to its range and rounded to nearest even."""
    x = tl.clamp(x, -128.0, 127.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23, where floats are integers


@triton.jit
def int8_to_float16(x):
    """The numbers of int8 from the low bytes of int16, by logic alone, which is faster than the
    conversion: float16 from 1024 to 2047 have the integer that they are more in their low bits."""
    return (((x & 0xFF) ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def store_fp8_row(out_ptr, scales_ptr, y, row, offs, mask, SIZE: tl.constexpr):
    """y [BLOCK] in float32, zeros beyond ``mask``, to a row of out [T, SIZE] in float8_e4m3fn and
    its scale, which makes the largest number 448."""
    # The floor keeps an all-zero row finite.
    scale = tl.maximum(tl.max(tl.abs(y), axis=0), 1e-12) / FP8_MAX
    tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * SIZE + offs, to_fp8(y / scale), mask=mask)


@triton.jit
def unpack_bytes(words, IS_INT8: tl.constexpr):
    """int16 words of two numbers each -> (the lower ones, the upper ones) in float16, which holds
    them all."""
    if IS_INT8:
        return int8_to_float16(words), int8_to_float16(words >> 8)
    else:
        return unpack_fp8(words)


@triton.jit
def unpack_fp8(words):
    """int16 words of two float8_e4m3fn numbers each -> (the lower ones, the upper ones) in float16,
    which holds them all. From sm_89 on, like all of Triton's float8_e4m3fn.

    The instruction converts both numbers of a word into one register, and a matrix product wants
    neighbours of the same kind in one: so two words are converted, and their halves sorted.
    (The interpreter has no assembly, and reads NaN as 480.)
    """
    if INTERPRETED:
        lower = (words & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        upper = (words >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        lower = tl.where(tl.abs(lower) > FP8_MAX, float("nan"), lower)
        return lower, tl.where(tl.abs(upper) > FP8_MAX, float("nan"), upper)
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b16 first, second;
            .reg .b32 pair, next;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 pair, first;
            cvt.rn.f16x2.e4m3x2 next, second;
            prmt.b32 $0, pair, next, 0x5410;
            prmt.b32 $1, pair, next, 0x7632;
        }
        """,
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
