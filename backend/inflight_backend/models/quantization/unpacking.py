"""Makes a `PackedWeight` of the tensors that a file has of a linear: the order of their bits, and
what becomes of scales. Which tensors those are is in `stored`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.quantization.blocks import unpack_blocks
from inflight_backend.models.quantization.forms import E2M1, PackedWeight, pack_zeros
from inflight_backend.models.quantization.schemes import FACTORS, GGUF_SCHEMES, Scheme
from inflight_backend.models.quantization.stored import QUANT_STATE
from inflight_kernels import reference


def unpack(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    """``tensors`` by the ends of their names (`stored`), for a weight of ``shape`` in a model of
    ``dtype``; `CheckpointError` says what numbers cannot be."""
    if scheme.layout in GGUF_SCHEMES:
        return unpack_blocks(scheme, tensors["weight"], dtype)
    packed = _LAYOUTS[scheme.layout](scheme, tensors, shape, dtype)
    return replace(packed, factors=tensors[FACTORS].to(dtype)) if scheme.has_factors else packed


def check_scales(name: str, scales: Tensor, bound: str) -> None:
    """``ValueError`` unless numbers of that tensor are what `Stored.scale` says."""
    if not bound or not scales.numel():
        return
    lowest, highest = (float(each) for each in _powers(scales).float().aminmax())
    is_finite = lowest > -math.inf and highest < math.inf  # not of NaN, which both then are
    is_high = {"finite": True, "0 or above": lowest >= 0, "above 0": lowest > 0}[bound]
    if not (is_finite and is_high):
        found = lowest if not is_high or lowest == -math.inf else highest
        also = "" if bound == "finite" else f" and {bound}"
        raise ValueError(f"{name} has {found}; scales must be finite{also}")


def _float8(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    rows, columns = shape
    scales = _powers(tensors[scheme.scales]).float()
    if scheme.group_size is None:
        scales = _row_scales(scales, rows)
    else:
        scales = scales.reshape(-1, scheme.num_groups(columns))
        scales = scales.repeat_interleave(scheme.block_rows, dim=0)[:rows]
    group_size = scheme.group_size or columns
    return PackedWeight(
        tensors["weight"],
        scales.contiguous(),
        None,
        None,
        group_size,
        dtype,
        quantizes_input=scheme.quantizes_input,
    )


def _int8(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    rows, columns = shape
    scales, zeros = (
        None if each is None else _row_scales(each, rows).to(dtype)
        for each in (tensors["weight_scale"], tensors.get("weight_zero_point"))
    )
    assert scales is not None
    group_size = scheme.group_size or columns
    return PackedWeight(
        tensors["weight"], scales, zeros, None, group_size, dtype, scheme.quantizes_input
    )


def _packed(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    rows, columns = shape
    values = unpack_words(tensors["weight_packed"], scheme.bits)[:, :columns]
    zeros = None
    if not scheme.is_symmetric:
        zeros = unpack_words(tensors["weight_zero_point"].t(), scheme.bits).t()[:rows]
    scales = _row_scales(tensors["weight_scale"], rows)
    return _integers(scheme, values, scales, zeros, tensors.get("weight_g_idx"), dtype)


def _mxfp4(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    return _codes(scheme, tensors["weight_packed"], tensors["weight_scale"], dtype)


def _mxfp4_blocks(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    return _codes(scheme, tensors["blocks"].flatten(1), tensors["scales"], dtype)


def _nvfp4(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    scales = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    return _codes(scheme, tensors["weight_packed"], scales, dtype)


def _modelopt_nvfp4(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    scales = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    return _codes(scheme, tensors["weight"], scales, dtype)


def _modelopt_mxfp4(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    return _codes(scheme, tensors["weight"], tensors["weight_scale"], dtype)


def _modelopt_int4(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    """The even row is in the low bits. Numbers are from -8, in two's complement."""
    values = reference.unpack_nibbles(tensors["weight"].t().contiguous()).t() ^ 8
    return _integers(scheme, values, tensors["weight_scale"], None, None, dtype)


def _codes(scheme: Scheme, values: Tensor, scales: Tensor, dtype: torch.dtype) -> PackedWeight:
    """values [rows, columns / 2] with the lower column in the low bits, scales [rows, groups]."""
    scales = _powers(scales).to(dtype).contiguous()
    assert scheme.group_size is not None
    size = scheme.group_size
    return PackedWeight(
        values.contiguous(), scales, None, None, size, dtype, codebook=E2M1.to(values.device)
    )


def _powers(scales: Tensor) -> Tensor:
    """Bytes are exponents of two (E8M0)."""
    return scales.view(torch.float8_e8m0fnu).float() if scales.dtype == torch.uint8 else scales


def _bnb4(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    """The high bits come first."""
    (rows, columns), size = shape, scheme.group_size
    assert size is not None
    values = tensors["weight"].contiguous().view(torch.uint8).reshape(rows, columns // 2)
    values = (values << 4) | (values >> 4)
    own = scheme.group_columns(columns)
    scales = _absmax(tensors)
    check_scales("weight.absmax", scales, "finite")
    scales = scales.repeat_interleave(size // own)[: rows * columns // own]
    scales = scales.view(rows, -1).to(dtype)
    codebook = tensors["weight.quant_map"].float()
    return PackedWeight(values, scales, None, None, own, dtype, codebook=codebook)


def _absmax(tensors: Mapping[str, Tensor]) -> Tensor:
    """The largest number of each block; quantised with a table of their own, if they are bytes."""
    scales = tensors["weight.absmax"]
    if scales.dtype != torch.uint8:
        return scales
    state = next((each for end, each in tensors.items() if end.startswith(QUANT_STATE)), None)
    if state is None or not {"weight.nested_absmax", "weight.nested_quant_map"} <= tensors.keys():
        raise ValueError("its absmax are quantised, and the tensors that say how are missing")
    found = json.loads(bytes(state.tolist()))
    said = JsonReader(found if isinstance(found, dict) else {}, "quant_state")
    wide = tensors["weight.nested_quant_map"].float()[scales.int()]
    blocks = (
        tensors["weight.nested_absmax"].float().repeat_interleave(said.integer("nested_blocksize"))
    )
    return wide * blocks[: len(wide)] + said.number("nested_offset")


def _bnb8(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    """Scales are the largest number of each row."""
    if "weight_format" in tensors and int(tensors["weight_format"]) != 0:
        raise ValueError("its weight_format is not 0: the rows are not as they are multiplied")
    scales = (tensors["SCB"] / 127).view(-1, 1).to(dtype)
    return PackedWeight(tensors["weight"], scales, None, None, shape[1], dtype)


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output ``8 j + i`` lies at bit ``4 * _AWQ_ORDER[i]`` of word ``j``."""


def _awq(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    values, zeros = (
        unpack_words(tensors[name], scheme.bits, _AWQ_ORDER)[:, : shape[0]].t()
        for name in ("qweight", "qzeros")
    )
    return _integers(scheme, values, tensors["scales"].t(), zeros, None, dtype)


def _gptq(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    rows, columns = shape
    values = unpack_words(tensors["qweight"].t(), scheme.bits)[:, :columns]
    zeros = unpack_words(tensors["qzeros"], scheme.bits)[:, :rows].t()
    middle = 2 ** (scheme.bits - 1)
    # Files exist that say v1 and hold the zeros of v2: of a symmetric one both are known.
    is_middle = scheme.is_symmetric and bool(((zeros == middle) | (zeros == middle - 1)).all())
    return _integers(
        scheme,
        values,
        tensors["scales"].t(),
        None if is_middle else zeros,
        tensors.get("g_idx"),
        dtype,
    )


def _integers(
    scheme: Scheme,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor | None,
    dtype: torch.dtype,
) -> PackedWeight:
    """values [rows, columns] and zeros [rows, groups] are integers from 0, of either 4 or 8 bits,
    those less ``zero_offset`` of the scheme, without zeros the middle one; ``groups`` [columns]: of
    each column, None if they follow one another."""
    columns = values.shape[1]
    group_size = scheme.group_size or columns
    order = None if groups is None else _order(groups, group_size)
    if order is not None:
        values = values.index_select(1, order)
    scales = scales.to(dtype).contiguous()
    middle = 2 ** (scheme.bits - 1)
    if scheme.bits == 4:
        values = reference.pack_nibbles(values)
        zeros = None if zeros is None else pack_zeros(zeros)
    else:
        values = (values.to(torch.int16) - middle).to(torch.int8).contiguous()
        if zeros is not None:
            zeros = (zeros + scheme.zero_offset).to(torch.int16) - middle
            zeros = zeros.to(dtype).contiguous()
    return PackedWeight(
        values,
        scales,
        zeros,
        order,
        group_size,
        dtype,
        scheme.quantizes_input,
        first_zero=scheme.zero_offset,
    )


def _order(groups: Tensor, group_size: int) -> Tensor | None:
    """The columns sorted by their groups; None if they are."""
    expected = torch.arange(len(groups), device=groups.device) // group_size
    if torch.equal(groups.long(), expected):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups.long()[order], expected):
        raise ValueError(f"its columns are not in groups of {group_size} (g_idx)")
    return order.to(torch.int32)


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits]: the numbers of each word, the low bits first;
    with ``order`` number ``i`` of a word is at bit ``bits * order[i]``."""
    numbers = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        numbers = reference.unpack_nibbles(numbers)
    if order is None:
        return numbers
    return numbers.view(len(words), -1, 32 // bits)[..., list(order)].flatten(-2)


def _row_scales(scales: Tensor, rows: int) -> Tensor:
    """[rows, groups], of one number too."""
    if scales.dim() == 2 and len(scales) == rows:
        return scales
    return scales.reshape(-1, 1).expand(rows, 1).contiguous()


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
}
