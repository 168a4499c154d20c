"""Device code that several kernels share, and where the interpreter of Triton 3.6 needs help.

Five of its operations differ from a GPU's. The kernels hand it numbers it cannot get wrong;
compiled code has none of this.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inflight_kernels import _host

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
_IS_EARLY = tl.constexpr(_host.IS_EARLY)
FP8_MAX = tl.constexpr(448.0)  # largest finite float8_e4m3fn


@triton.jit
def wait_for_inputs():
    """First of all in a kernel that is launched with `_host.EARLY_OPTIONS`: nothing of memory may
    be touched before, and no program may leave without it (or the kernel could end, and the next
    one begin, before the one before it). The next kernel may come as early."""
    if _IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def dot(a, b):
    """a [M, K] @ b [K, N] in float32. (The interpreter multiplies the bits of bfloat16.)"""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_by_rows(a, b):
    """`dot` whose rows do not depend on their place in the tile. Matrix units compute every row
    alike. (The library behind the interpreter does not, so the products are summed one by one.)"""
    if INTERPRETED:
        return tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    return dot(a, b)


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
