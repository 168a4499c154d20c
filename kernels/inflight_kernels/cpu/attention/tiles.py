"""Products of a few rows and panels that stay in registers, over all steps of their columns.

A step is 32 bits of a row of x: a float32, or a pair of bfloat16. A panel has `WIDTH` of these for
each step, side by side. `linear` says how its weight is made of them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from inflight_kernels.cpu.intrinsics import (
    F32,
    FLOATS,
    I64,
    WIDTH,
    load_floats,
    loop,
    multiply_add,
    multiply_add_pairs,
    pointer_to,
    splat,
)


class Layout(NamedTuple):
    """Addresses, and how many bytes lie between rows, steps and panels. ``out`` is float32; its
    panels lie side by side. (Integers of Python and of numpy, which are the same to numba.)"""

    x: Any
    x_row: Any
    x_step: Any
    weight: Any
    weight_panel: Any
    weight_step: Any
    out: Any
    out_row: Any


def make_tile(num_rows: int, num_panels: int, adds: bool):
    """An intrinsic: the product of ``num_rows`` rows of x and ``num_panels`` panels, over
    ``num_steps`` steps (one or more), becomes ``out``, or is added to what is there."""
    grid = [(row, panel) for row in range(num_rows) for panel in range(num_panels)]

    @intrinsic
    def tile(_, like, layout, num_steps):
        """``like``: a number of x and of the weight; uint16 stands for bfloat16."""
        multiply = multiply_add_pairs if like == types.uint16 else multiply_add

        def generate(context, builder, signature, arguments):
            _, packed, num_steps = arguments
            fields = [builder.extract_value(packed, i) for i in range(len(Layout._fields))]
            x, x_row, x_step, weight, weight_panel, weight_step, out, out_row = fields

            def at(address, stride, index):
                return builder.add(address, builder.mul(stride, ir.Constant(I64, index)))

            x_rows = [at(x, x_row, row) for row in range(num_rows)]
            panels = [at(weight, weight_panel, panel) for panel in range(num_panels)]

            def add(step, sums):
                far = builder.mul(step, weight_step)
                weights = [load_floats(builder, builder.add(each, far)) for each in panels]
                far, added = builder.mul(step, x_step), []
                for row, address in enumerate(x_rows):
                    place = pointer_to(builder, builder.add(address, far), F32)
                    number = splat(builder, builder.load(place, align=4))
                    for panel, numbers in enumerate(weights):
                        total = sums[row * num_panels + panel]
                        added.append(multiply(builder, number, numbers, total))
                return added

            zeros = [ir.Constant(FLOATS, [0.0] * WIDTH)] * len(grid)
            totals = loop(builder, num_steps, zeros, add)
            for (row, panel), total in zip(grid, totals, strict=True):
                address = builder.add(at(out, out_row, row), ir.Constant(I64, panel * 64))
                # Of sums that begin with what is there LLVM 22 made poison without AVX-512.
                if adds:
                    total = builder.fadd(load_floats(builder, address), total)
                builder.store(total, pointer_to(builder, address, FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(like, layout, types.int64), generate

    return tile
