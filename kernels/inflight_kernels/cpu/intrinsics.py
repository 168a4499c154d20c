"""What numba has no words for: vectors at addresses, bits of numbers, a counter of all threads."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, overload
from torch import Tensor

FAST: dict[str, Any] = {
    "nogil": True,
    "fastmath": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
"""How loops are compiled: sums in any order, and no check of a division, which is a branch. They
are called by compiled code only: ways in from Python and C took a fifth of the compiler's time."""
WIDTH = 16
"""Numbers of float32 in a vector."""
HAS_WIDE_REGISTERS = "+avx512f" in get_host_cpu_features()
"""32 registers of a vector each; else there are 16, of half a vector."""
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
FLOATS = ir.VectorType(F32, WIDTH)
INTS = ir.VectorType(I32, WIDTH)
SHORTS = ir.VectorType(I16, WIDTH)


def compiled_for(kind: str) -> Any:
    """Decorates a function that is made anew for each kind. LLVM tells functions apart by their
    names, also those that other processes have compiled: it must not meet two of one name."""

    def decorate(function):
        function.__qualname__ = f"{function.__name__}_{kind.replace(' ', '_')}"
        return njit(**FAST)(function)

    return decorate


@intrinsic
def address_to(_, address):
    """An address as a pointer that ``numba.carray`` takes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def take_next(_, address):
    """The number at ``address``, which is then one higher, whichever threads ask."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def finish_piece(_, address):
    """Count a piece that is done, behind the number that `take_next` has at ``address``; who reads
    the count sees what the piece has written."""

    def generate(context, builder, signature, arguments):
        place = builder.add(arguments[0], ir.Constant(I64, 8))
        pointer = builder.inttoptr(place, I64.as_pointer())
        builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "release")
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def read_shared(_, address):
    """The number at ``address``, which other threads change."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def pause(_):
    """Tell the CPU that this is a loop that waits."""

    def generate(context, builder, signature, arguments):
        function = builder.module.declare_intrinsic(
            "llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])
        )
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call(_, function, argument):
    """Call the function at an address with an integer, for the one that it returns."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(I64, [I64])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(types.int64, types.int64), generate


def pointer_to(builder, address, kind):
    """``address`` as a pointer to ``kind``."""
    return builder.inttoptr(address, kind.as_pointer())


def load_floats(builder, address):
    """A vector of float32 that lies there."""
    return builder.load(pointer_to(builder, address, FLOATS), align=4)


def load_ints(builder, address):
    """A vector of int32 that lies there."""
    return builder.load(pointer_to(builder, address, INTS), align=4)


def load_bfloat16(builder, address):
    """A vector of bfloat16 that lies there, as float32."""
    bits = builder.zext(builder.load(pointer_to(builder, address, SHORTS), align=2), INTS)
    return builder.bitcast(builder.shl(bits, constant(16)), FLOATS)


def load_float16(builder, address):
    """A vector of float16 that lies there, as float32."""
    kind = ir.VectorType(ir.HalfType(), WIDTH)
    return builder.fpext(builder.load(pointer_to(builder, address, kind), align=2), FLOATS)


def load_words(builder, address, count):
    """A vector of 32 bits, of which ``count`` lie there; zeros for the others, which are not read.
    float32 numbers, or what stands for pairs of bfloat16."""
    pointer, flags = FLOATS.as_pointer(), ir.VectorType(ir.IntType(1), WIDTH)
    name = f"llvm.masked.load.v{WIDTH}f32.p0"
    kind = ir.FunctionType(FLOATS, [pointer, I32, flags, FLOATS])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    lanes = ir.Constant(INTS, list(range(WIDTH)))
    mask = builder.icmp_signed("<", lanes, splat_int(builder, count))
    nothing = ir.Constant(FLOATS, [0.0] * WIDTH)
    return builder.call(
        function, [pointer_to(builder, address, FLOATS), ir.Constant(I32, 4), mask, nothing]
    )


def halves(builder, words):
    """The lower bfloat16 of each pair as float32, and the upper one."""
    bits = builder.bitcast(words, INTS)
    low, high = builder.shl(bits, constant(16)), builder.and_(bits, constant(-65536))
    return [builder.bitcast(each, FLOATS) for each in (low, high)]


def loop(builder, count, totals, body):
    """``body(index, totals)`` gives the next ones, ``count`` times (once or more)."""
    begin, again = builder.block, builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(again)
    builder.position_at_end(again)
    index, held = builder.phi(I64), [builder.phi(each.type) for each in totals]
    index.add_incoming(ir.Constant(I64, 0), begin)
    for each, total in zip(held, totals, strict=True):
        each.add_incoming(total, begin)
    found = body(index, held)
    following = builder.add(index, ir.Constant(I64, 1))
    index.add_incoming(following, builder.block)
    for each, total in zip(held, found, strict=True):
        each.add_incoming(total, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), again, end)
    builder.position_at_end(end)
    return found


def sum_lanes(builder, vectors):
    """The sums of the lanes of up to `WIDTH` vectors, side by side in one."""
    nothing = ir.Constant(FLOATS, [0.0] * WIDTH)
    # Each vector has sums of some numbers, a group of lanes for each: groups of half the lanes
    # come from adding halves, and then those of two vectors fit in one.
    width = WIDTH
    while width > 1:
        half, firsts = width // 2, range(0, 2 * WIDTH, width)
        lower = [lane for first in firsts for lane in range(first, first + half)]
        masks = [ir.Constant(INTS, [lane + shift for lane in lower]) for shift in (0, half)]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(*pair, mask) for mask in masks))
            for pair in zip(
                vectors[::2], [*vectors[1::2], *[nothing] * (len(vectors) % 2)], strict=True
            )
        ]
        width = half
    (found,) = vectors
    return found


def splat(builder, scalar):
    """A vector of one float32."""
    undefined = ir.Constant(FLOATS, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(INTS, [0] * WIDTH))


def splat_int(builder, number):
    """A vector of the lower 32 bits of one integer."""
    return builder.bitcast(splat(builder, builder.bitcast(builder.trunc(number, I32), F32)), INTS)


def constant(number):
    """A vector of integers."""
    return ir.Constant(INTS, [number] * WIDTH)


def to_bfloat16(builder, floats):
    """float32 rounded to nearest even, as numbers of 16 bits."""
    bits = builder.bitcast(floats, INTS)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    return builder.trunc(builder.lshr(rounded, constant(16)), SHORTS)


def bias_of(builder, bias, panel):
    """float32 numbers of a panel at that address. (There is always one, of zeros if need be: of a
    branch around the load LLVM 22 made poison in a tile of one row and panel without AVX-512.)"""
    return load_floats(builder, builder.add(bias, ir.Constant(I64, panel * WIDTH * 4)))


@cache
def no_bias(rows: int) -> Tensor:
    """Zeros [rows]."""
    return torch.zeros(rows)


def prefetch(builder, addresses, offset):
    """Read the lines that lie ``offset`` bytes behind addresses into the caches."""
    pointer = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", (pointer,), ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    )
    numbers = [ir.Constant(I32, number) for number in (0, 3, 1)]  # to read, soon, data
    for address in addresses:
        place = builder.add(address, ir.Constant(I64, offset))
        builder.call(function, [builder.inttoptr(place, pointer), *numbers])


@intrinsic
def prefetch_at(_, address):
    """The same of the line at an address."""

    def generate(context, builder, signature, arguments):
        prefetch(builder, arguments, 0)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def multiply_add(builder, x, weight, total):
    """total + x * weight, rounded once."""
    name, kind = "llvm.fma.v16f32", ir.FunctionType(FLOATS, [FLOATS] * 3)
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [x, weight, total])


def multiply_add_pairs(builder, x, weight, total):
    """The same of two numbers in bfloat16 in each place."""
    x, weight = builder.bitcast(x, INTS), builder.bitcast(weight, INTS)
    if multiplies_bfloat16():
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(function, [total, x, weight])
    for wide_x, wide_weight in zip(halves(builder, x), halves(builder, weight), strict=True):
        total = multiply_add(builder, wide_x, wide_weight, total)
    return total


@cache
def multiplies_bfloat16() -> bool:
    """True if the CPU adds up products of pairs of bfloat16."""
    return "+avx512bf16" in get_host_cpu_features()


@intrinsic
def to_float(_, bits):
    """The float32 of 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.uint32), generate


@intrinsic
def to_bits(_, number):
    """The 32 bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], I32)

    return types.uint32(types.float32), generate


@intrinsic
def nearest(_, number):
    """The nearest whole number, of two the even one."""

    def generate(context, builder, signature, arguments):
        function = builder.module.declare_intrinsic("llvm.rint", (F32,))
        return builder.call(function, arguments)

    return types.float32(types.float32), generate


@njit(inline="always")
def widen(bits):
    """A bfloat16 (uint16) as float32."""
    return to_float(np.uint32(bits) << np.uint32(16))


@njit(inline="always")
def narrow(number):
    """A float32 as bfloat16 (uint16), rounded to nearest even."""
    bits = to_bits(np.float32(number))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


def get(array, index):
    """A number of an array in memory as float32: bfloat16 lies there as uint16."""


def put(array, index, number):
    """Round a float32 to the type of the array, and store it."""


def array_at(address, size, like):
    """What lies at an address as an array, of the type of ``like``."""


@overload(get, inline="always")
def _get(array, index):
    if array.dtype == types.uint16:
        return lambda array, index: widen(array[index])
    return lambda array, index: array[index]


@overload(put, inline="always")
def _put(array, index, number):
    if array.dtype == types.uint16:

        def put_narrow(array, index, number):
            array[index] = narrow(number)

        return put_narrow

    def put_same(array, index, number):
        array[index] = np.float32(number)

    return put_same


@overload(array_at, inline="always")
def _array_at(address, size, like):
    if like == types.uint16:
        return lambda address, size, like: carray(address_to(address), size, types.uint16)
    if like == types.uint8:
        return lambda address, size, like: carray(address_to(address), size, types.uint8)
    if like == types.int32:
        return lambda address, size, like: carray(address_to(address), size, types.int32)
    if like == types.int64:
        return lambda address, size, like: carray(address_to(address), size, types.int64)
    return lambda address, size, like: carray(address_to(address), size, types.float32)


def rounded(number, like):
    """A float32 as it is read again once stored as the type of ``like``."""


@overload(rounded, inline="always")
def _rounded(number, like):
    if like == types.uint16:
        return lambda number, like: widen(narrow(number))
    return lambda number, like: np.float32(number)


@njit(inline="always")
def exp(x):
    """e^x in float32, within two units of the last place; 0 below -87. (Cephes' expf: numba's own
    calls a function for every number.)"""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    power = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    x = x - power * np.float32(0.693359375) - power * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * x + np.float32(1.3981999507e-3)
    y = y * x + np.float32(8.3334519073e-3)
    y = y * x + np.float32(4.1665795894e-2)
    y = y * x + np.float32(1.6666665459e-1)
    y = y * x + np.float32(5.0000001201e-1)
    y = y * x * x + x + np.float32(1.0)
    # 2^power, its exponent shifted to its place as a float32 (sums of int32 would be int64).
    return y * to_float(np.uint32(np.int32((power + np.float32(127.0)) * np.float32(8388608.0))))
