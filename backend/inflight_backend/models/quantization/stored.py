"""Which tensors a linear has in the files of a checkpoint, by its scheme; read without torch."""

from __future__ import annotations

from dataclasses import dataclass

from inflight_backend.models.quantization.schemes import Scheme

_Shape = tuple[int, ...]
WIDE = ("F32", "F16", "BF16")
"""Types of weights that are not quantised."""
_SCALES = (*WIDE, "F8_E8M0")

PASSED_OVER = (
    r".*\.(input_scale|input_zero_point|activation_scale|weight_shape|weight_zero_point|g_idx)",
    r".*\.(weight_g_idx|[qkv]_scale|[qkv]_zero_point|[kv]_proj\.output_scale)",
)
"""Tensors of quantised linears that are not needed: scales that were measured for their inputs,
which have one per token here, and for a KV cache in FP8; what symmetric schemes write of zeros."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file may have it: the one of ``shapes`` that is usual comes first."""

    shapes: tuple[_Shape, ...]
    dtypes: tuple[str, ...] = WIDE
    is_optional: bool = False


def stored_tensors(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """By the ends of their names, for a weight [rows, columns]."""
    return _LAYOUTS[scheme.layout](scheme, rows, columns)


def _float8(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    scales: tuple[_Shape, ...] = ((rows, 1), (1,), (), (1, 1), (rows,))
    if scheme.group_size is not None:
        scales = ((-(-rows // scheme.block_rows), scheme.num_groups(columns)),)
    return {
        "weight": Stored(((rows, columns),), ("F8_E4M3",)),
        scheme.scales: Stored(scales, _SCALES),
    }


def _int8(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    groups = scheme.num_groups(columns)
    scales: tuple[_Shape, ...] = ((rows, groups),)
    if groups == 1:
        scales = ((rows, 1), (1,), (), (1, 1), (rows,))
    stored = {
        "weight": Stored(((rows, columns),), ("I8",)),
        "weight_scale": Stored(scales),
    }
    if not scheme.is_symmetric:
        stored["weight_zero_point"] = Stored(scales, ("I8",))
    return stored


def _packed(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """Zeros are packed along the rows, weights along the columns."""
    groups = scheme.num_groups(columns)
    scales: tuple[_Shape, ...] = ((rows, groups),)
    if groups == 1:
        scales = ((rows, 1), (1,))
    stored = {
        "weight_packed": Stored(((rows, _words(columns, scheme.bits)),), ("I32",)),
        "weight_scale": Stored(scales),
    }
    if not scheme.is_symmetric:
        zeros = (_words(rows, scheme.bits), groups)
        stored["weight_zero_point"] = Stored((zeros,), ("I32",))
    if scheme.has_order:
        stored["weight_g_idx"] = Stored(((columns,),), ("I32", "I64"))
    return stored


def _awq(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """Transposed, and packed along the outputs."""
    groups, words = scheme.num_groups(columns), _words(rows, scheme.bits)
    return {
        "qweight": Stored(((columns, words),), ("I32",)),
        "qzeros": Stored(((groups, words),), ("I32",)),
        "scales": Stored(((groups, rows),)),
    }


def _gptq(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """Transposed, weights packed along the inputs and zeros along the outputs."""
    groups = scheme.num_groups(columns)
    return {
        "qweight": Stored(((_words(columns, scheme.bits), rows),), ("I32",)),
        "qzeros": Stored(((groups, _words(rows, scheme.bits)),), ("I32",)),
        "scales": Stored(((groups, rows),)),
        "g_idx": Stored(((columns,),), ("I32", "I64"), is_optional=not scheme.has_order),
    }


def _words(count: int, bits: int) -> int:
    """Words of 32 bits for so many numbers."""
    return -(-count * bits // 32)


_LAYOUTS = {"float8": _float8, "int8": _int8, "packed": _packed, "awq": _awq, "gptq": _gptq}
