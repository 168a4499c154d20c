"""Which tensors a linear has in the files of a checkpoint, by its scheme: their names, shapes and
types, for ``inflight plan`` without torch. What is in them is in `unpacking`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inflight_backend.models.quantization.schemes import FACTORS, GGUF_SCHEMES, Scheme

_Shape = tuple[int, ...]
WIDE = ("F32", "F16", "BF16")
"""Types of weights that are not quantised."""
_EXPONENTS = ("U8", "F8_E8M0")
"""Types of scales that are powers of two."""

PASSED_OVER = (
    r".*[._](input_scale|input_global_scale|activation_scale|input_zero_point)",
    r".*\.(weight_shape|weight_zero_point|g_idx|weight_g_idx)",
    r".*\.([qkv]_scale|kv_scale|[qkv]_zero_point|[qkv]_global_scale|[kv]_proj\.output_scale)",
)
"""Tensors of quantised linears that are not needed: scales that were measured for their inputs,
which have one per token here, and for a KV cache where it is not one of 8 bits; what symmetric
schemes write of zeros."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file may have it: the one of ``shapes`` that is usual comes first; any if there
    are none. ``scale``: what numbers of it must be, of tensors of scales. (Some tools give groups
    of integers scales below 0.)"""

    shapes: tuple[_Shape, ...]
    dtypes: tuple[str, ...] = WIDE
    is_optional: bool = False
    scale: Literal["", "finite", "0 or above", "above 0"] = ""


def stored_tensors(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """By the ends of their names, for a weight [rows, columns]."""
    stored = _LAYOUTS[scheme.layout](scheme, rows, columns)
    if scheme.has_factors:
        stored[FACTORS] = Stored(((columns,),), scale="finite")
    return stored


def _float8(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    scales: tuple[_Shape, ...] = ((rows, 1), (1,), (), (1, 1), (rows,))
    if scheme.group_size is not None:
        of_rows, of_columns = -(-rows // scheme.block_rows), scheme.num_groups(columns)
        scales = ((of_rows, of_columns), (of_rows, 1, of_columns, 1))
        if of_rows * of_columns == 1:
            scales = (*scales, ())
    return {
        "weight": Stored(((rows, columns),), ("F8_E4M3",)),
        scheme.scales: Stored(scales, (*WIDE, *_EXPONENTS), scale="0 or above"),
    }


def _int8(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    groups = scheme.num_groups(columns)
    scales: tuple[_Shape, ...] = ((rows, groups),)
    if groups == 1:
        scales = ((rows, 1), (1,), (), (1, 1), (rows,))
    stored = {
        "weight": Stored(((rows, columns),), ("I8",)),
        "weight_scale": Stored(scales, scale="0 or above"),
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
        "weight_scale": Stored(scales, scale="finite"),
    }
    if not scheme.is_symmetric:
        zeros = (_words(rows, scheme.bits), groups)
        stored["weight_zero_point"] = Stored((zeros,), ("I32",))
    if scheme.has_order:
        stored["weight_g_idx"] = Stored(((columns,),), ("I32", "I64"))
    return stored


def _mxfp4(
    scheme: Scheme, rows: int, columns: int, values: str = "weight_packed"
) -> dict[str, Stored]:
    return {
        values: Stored(((rows, columns // 2),), ("U8",)),
        "weight_scale": Stored(
            ((rows, scheme.num_groups(columns)),), _EXPONENTS, scale="0 or above"
        ),
    }


def _modelopt_mxfp4(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    return _mxfp4(scheme, rows, columns, "weight")


def _mxfp4_blocks(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """The experts of gpt-oss."""
    assert scheme.group_size is not None
    groups = scheme.num_groups(columns)
    return {
        "blocks": Stored(((rows, groups, scheme.group_size // 2),), ("U8",)),
        "scales": Stored(((rows, groups),), _EXPONENTS, scale="0 or above"),
    }


def _nvfp4(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """Scales of groups, which a scale of the whole weight divides."""
    return {
        "weight_packed": Stored(((rows, columns // 2),), ("U8",)),
        "weight_scale": _scales_in_fp8(scheme, rows, columns),
        "weight_global_scale": Stored(((1,), ()), ("F32",), scale="above 0"),
    }


def _modelopt_nvfp4(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """The same, multiplied by it."""
    return {
        "weight": Stored(((rows, columns // 2),), ("U8",)),
        "weight_scale": _scales_in_fp8(scheme, rows, columns),
        "weight_scale_2": Stored(((), (1,)), ("F32",), scale="0 or above"),
    }


def _modelopt_int4(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """Numbers of two rows in a byte; the second scale is of what FP8 would be made of them for
    inputs in FP8."""
    return {
        "weight": Stored(((rows // 2, columns),), ("U8",)),
        "weight_scale": Stored(((rows, scheme.num_groups(columns)),), scale="0 or above"),
        "weight_scale_2": Stored(((), (1,)), is_optional=True),
    }


def _scales_in_fp8(scheme: Scheme, rows: int, columns: int) -> Stored:
    shape = rows, scheme.num_groups(columns)
    return Stored((shape,), ("F8_E4M3",), scale="0 or above")


def _awq(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """Transposed, and packed along the outputs."""
    groups, words = scheme.num_groups(columns), _words(rows, scheme.bits)
    return {
        "qweight": Stored(((columns, words),), ("I32",)),
        "qzeros": Stored(((groups, words),), ("I32",)),
        "scales": Stored(((groups, rows),), scale="finite"),
    }


def _gptq(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """Transposed, weights packed along the inputs and zeros along the outputs."""
    groups = scheme.num_groups(columns)
    return {
        "qweight": Stored(((_words(columns, scheme.bits), rows),), ("I32",)),
        "qzeros": Stored(((groups, _words(rows, scheme.bits)),), ("I32",)),
        "scales": Stored(((groups, rows),), scale="finite"),
        "g_idx": Stored(((columns,),), ("I32", "I64"), is_optional=not scheme.has_order),
    }


def _bnb4(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """NF4 and FP4 of bitsandbytes: bytes, or as many in words of another type; scales may be
    quantised themselves."""
    assert scheme.group_size is not None
    count = rows * columns
    groups = -(-count // scheme.group_size)
    stored = {
        "weight": Stored(
            tuple((count // 2 // size, 1) for size in (1, 2, 4)), ("U8", "I8", "BF16", "F16", "F32")
        ),
        "weight.absmax": Stored(((groups,),), ("F32", "U8")),
        "weight.quant_map": Stored(((16,),), scale="finite"),
        "weight.nested_absmax": Stored((), is_optional=True, scale="finite"),
        "weight.nested_quant_map": Stored(((256,),), is_optional=True, scale="finite"),
    }
    for kind in ("nf4", "fp4"):
        stored[f"{QUANT_STATE}{kind}"] = Stored((), ("U8",), is_optional=True)
    return stored


QUANT_STATE = "weight.quant_state.bitsandbytes__"


def _bnb8(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    return {
        "weight": Stored(((rows, columns),), ("I8",)),
        "SCB": Stored(((rows,),), ("F32",), scale="0 or above"),
        "weight_format": Stored(((),), ("U8",), is_optional=True),
    }


def _words(count: int, bits: int) -> int:
    """Words of 32 bits for so many numbers."""
    return -(-count * bits // 32)


def _blocks(scheme: Scheme, rows: int, columns: int) -> dict[str, Stored]:
    """Scales lie in the blocks."""
    return {"weight": Stored(((rows, columns),), (scheme.layout,))}


_LAYOUTS = {
    "float8": _float8,
    "int8": _int8,
    "packed": _packed,
    "mxfp4": _mxfp4,
    "mxfp4-blocks": _mxfp4_blocks,
    "nvfp4": _nvfp4,
    "modelopt-nvfp4": _modelopt_nvfp4,
    "modelopt-mxfp4": _modelopt_mxfp4,
    "modelopt-int4": _modelopt_int4,
    "bnb4": _bnb4,
    "bnb8": _bnb8,
    "awq": _awq,
    "gptq": _gptq,
    **dict.fromkeys(GGUF_SCHEMES, _blocks),
}
