"""Linears of quantised weights on a CPU, each by an operator of torch that widens in registers.

Milliseconds of one thread for 2048 x 2048, weights read from memory, 1 / 2 / 8 tokens (Zen 4, torch
2.13): plain float32 1.2 / 1.5 / 1.2, plain bfloat16 0.56 / 0.65 / 0.61, `Int4Linear` 0.23 / 0.31 /
0.82, `FixedPointLinear` float32 0.32 / 0.32 / 0.67 and bfloat16 0.37 / 0.27 / 0.46, `BagLinear` of
4 bits 0.43 / 0.72 / 2.5 and of 8 bits 0.40 / 0.62 / 1.8.

The operators are not public, so each must prove once that it does what it did.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.quantization.forms import PackedWeight
from inflight_kernels import reference


class CpuProduct(Protocol):
    """A linear ``x @ weight.T + bias`` of some quantised weights."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None: ...

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether there is such a product for it."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        ...


class Int4Linear:
    """``x @ weight.T + bias`` of 4-bit weights in bfloat16, by torch's product for few tokens."""

    __slots__ = ("_bias", "_group_size", "_order", "_packed", "_pairs")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._bias, self._order = bias, weight.order
        self._group_size = _int4_group(weight)
        numbers = reference.unpack_nibbles(weight.values).to(torch.int32)
        self._packed = _pack_int4(numbers)
        # The product is of (number - 8) * scale + shift.
        zeros = weight.wide_zeros
        shifts = (
            8 - (torch.full_like(weight.scales, 8) if zeros is None else zeros)
        ) * weight.scales
        pairs = torch.stack((weight.scales.t(), shifts.t()), dim=-1)
        repeats = weight.group_size // self._group_size
        self._pairs = pairs.repeat_interleave(repeats, dim=0).contiguous()

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether there is such a product for it."""
        return (
            weight.values.dtype == torch.uint8
            and weight.codebook is None
            and weight.dtype == torch.bfloat16
            and _int4_group(weight) > 0
            and weight.rows % 16 == 0
            and _multiplies_int4()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        answer = _linear_int4(x, self._packed, self._group_size, self._pairs)
        return answer if self._bias is None else answer.add_(self._bias)


def _int4_group(weight: PackedWeight) -> int:
    """The largest group of columns that the product has and of which the weight's are made; 0:
    none."""
    columns = 2 * weight.values.shape[1]
    fitting = (
        each
        for each in (256, 128, 64, 32)
        if weight.group_size % each == 0 and columns % weight.group_size == 0
    )
    return next(fitting, 0)


def _pack_int4(numbers: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return packed


def _linear_int4(x: Tensor, packed: Tensor, group_size: int, pairs: Tensor) -> Tensor:
    answer: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, pairs)
    return answer


@cache
def _multiplies_int4() -> bool:
    numbers = torch.arange(16 * 32, dtype=torch.int32).view(16, 32) % 16
    pairs = torch.tensor([2.0, 1.0], dtype=torch.bfloat16).expand(1, 16, 2).contiguous()
    try:
        answer = _linear_int4(torch.eye(32).bfloat16(), _pack_int4(numbers), 32, pairs)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(answer.float(), ((numbers - 8) * 2 + 1).t().float())


class _Int8Weight:
    """int8 [rows, columns] in oneDNN's layout; products with integers are exact."""

    __slots__ = ("_packed", "_scales", "_zeros")

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        """scales [rows]: of the answers."""
        # What is packed must not be a view of what others still hold.
        self._packed = torch.ops.onednn.qlinear_prepack(values.contiguous(), None)
        self._scales = scales.float().contiguous()
        self._zeros = torch.zeros(len(scales), dtype=torch.int64)

    @property
    def rows(self) -> int:
        """Numbers of an answer."""
        return len(self._scales)

    def multiply(self, numbers: Tensor) -> Tensor:
        """numbers [T, columns] uint8, 128 more than what they stand for -> [T, rows] float32."""
        answer: Tensor = torch.ops.onednn.qlinear_pointwise(
            numbers, 1.0, 128, self._packed, self._scales, self._zeros, None, 1.0, 0,
            torch.float32, "none", [], "",
        )  # fmt: skip
        return answer


@cache
def _multiplies_int8() -> bool:
    """Old CPUs add up products of two integers in 16 bits, which the largest ones overflow."""
    weight = torch.full((16, 64), -128, dtype=torch.int8)
    weight[::2] = 127
    numbers = torch.full((3, 64), 255, dtype=torch.uint8)
    numbers[1] = 0
    try:
        answer = _Int8Weight(weight, torch.full((16,), 0.5)).multiply(numbers)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(answer, (numbers.float() - 128) @ weight.float().t() * 0.5)


def _is_int8_by_rows(weight: PackedWeight) -> bool:
    return (
        weight.values.dtype == torch.int8
        and weight.order is None
        and weight.scales.shape[1] == 1
        and _multiplies_int8()
    )


class IntegerLinear:
    """``x @ weight.T + bias`` in integers of 8 bits, with a scale per row and per token."""

    __slots__ = ("_bias", "_dtype", "_weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._weight = _Int8Weight(weight.values, weight.scales[:, 0])
        self._bias, self._dtype = bias, weight.dtype

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether the scheme asks for it, and the machine multiplies integers exactly."""
        return weight.quantizes_input and weight.zeros is None and _is_int8_by_rows(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        numbers, scales = reference.quantize_int8(x)
        answer = self._weight.multiply(numbers.view(torch.uint8) ^ 128)
        answer = answer.mul_(scales).to(self._dtype)
        return answer if self._bias is None else answer.add_(self._bias)


class FixedPointLinear:
    """``x @ weight.T + bias`` of 8-bit weights with a scale per row, by products of integers.

    A token becomes integers of 23 bits (16 in half precision) and a scale. Their digits of 8 bits
    are rows of one product with the weight, which is exact, and the sums are put together again:
    as good as a sum of float32 products, whose largest one has 24 bits.
    """

    __slots__ = ("_base", "_bias", "_dtype", "_num_digits", "_shifts", "_unit", "_weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._weight = _Int8Weight(weight.values, weight.scales[:, 0])
        self._bias, self._dtype = bias, weight.dtype
        self._num_digits = 3 if weight.dtype == torch.float32 else 2
        # Float32 from 2^23 to 2^24 are the integers, and their last 23 bits, low bytes first, are
        # what they are more than 2^23. From the middle, digits are 128 more than they stand for,
        # but the third, of 7 bits, is 64 more.
        self._base = torch.tensor([2.0**23 + 2.0**22 + 0x8080])
        # The largest number becomes a bit less than there is room for: quotients are rounded.
        self._unit = 1 / (2.0**22 - 2.0**16 if self._num_digits == 3 else 2.0**15 - 2.0**9)
        self._shifts = None
        if weight.zeros is not None:
            self._shifts = (weight.zeros.float() * weight.scales.float()).t()  # [1, rows]

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether there is such a product for it."""
        return _is_int8_by_rows(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        (num_tokens, columns), count, wide = x.shape, self._num_digits, x.float()
        scales = torch.linalg.vector_norm(wide, torch.inf, dim=-1, keepdim=True)
        scales.clamp_(min=1e-30).mul_(self._unit)
        fixed = torch.addcdiv(self._base, wide, scales)
        digits = fixed.view(torch.uint8).view(num_tokens, columns, 4).permute(2, 0, 1)[:count]
        digits = digits.reshape(count * num_tokens, columns)
        if count == 3:
            digits[2 * num_tokens :] += 64
        sums = self._weight.multiply(digits).view(count, num_tokens, self._weight.rows)
        low, high, *highest = sums.unbind()
        answer = torch.add(low, high, alpha=2**8)
        for third in highest:
            answer.add_(third, alpha=2**16)
        answer.mul_(scales)
        if self._shifts is not None:
            answer.addmm_(wide.sum(dim=-1, keepdim=True), self._shifts, alpha=-1)
        answer = answer.to(self._dtype)
        return answer if self._bias is None else answer.add_(self._bias)


_FEW_TOKENS = 16
"""Up to so many `BagLinear` is faster than widening the weight."""


class BagLinear:
    """``x @ weight.T + bias`` of weights of 4 or 8 bits in groups of any size, in float32.

    A sum of quantised rows, each times a number, is what torch has for bags of embeddings. Here the
    rows are the columns of the weight, the numbers those of a token, and a group is a bag.
    """

    __slots__ = (
        "_bias", "_dtype", "_group_size", "_num_columns", "_order", "_rows", "_scales", "_starts",
        "_sum_bags", "_zeros",
    )  # fmt: skip

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._bias, self._dtype, self._order = bias, weight.dtype, weight.order
        self._group_size = weight.group_size
        is_nibble = weight.values.dtype == torch.uint8
        values = reference.unpack_nibbles(weight.values) if is_nibble else weight.values
        self._num_columns = values.shape[1]
        zeros = weight.wide_zeros
        if is_nibble and zeros is not None:  # as `_bag_rows` has the numbers
            zeros = zeros - 8
        self._rows = _bag_rows(values, is_nibble=is_nibble)
        self._sum_bags = _BAG_SUMS[is_nibble]
        self._scales = weight.scales.t().contiguous()  # [groups, rows]
        self._zeros = None if zeros is None else zeros.t().contiguous()
        self._starts = torch.arange(0, self._num_columns, weight.group_size, dtype=torch.int32)

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether there is such a product for it."""
        is_whole = weight.values.dtype == torch.int8 or weight.rows % 2 == 0
        is_integer = weight.values.dtype != torch.float8_e4m3fn and weight.codebook is None
        return is_integer and is_whole and _sums_bags()

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        multiply = self._multiply if len(x) <= _FEW_TOKENS else self._widen_and_multiply
        answer = multiply(x)
        return answer if self._bias is None else answer.add_(self._bias)

    def _multiply(self, x: Tensor) -> Tensor:
        count, columns = x.shape
        places = torch.arange(columns, dtype=torch.int32).repeat(count)
        firsts = torch.arange(0, count * columns, columns, dtype=torch.int32)
        starts = (firsts[:, None] + self._starts).flatten()
        wide = x.float().contiguous()
        sums = self._sum(places, starts, wide.flatten()).view(count, *self._scales.shape)
        if self._zeros is not None:
            sums.sub_(self._group_sums(wide)[..., None] * self._zeros)
        return sums.mul_(self._scales).sum(dim=1).to(self._dtype)

    def _group_sums(self, x: Tensor) -> Tensor:
        """[T, columns] -> [T, groups]."""
        count = len(self._starts)
        padded = functional.pad(x, (0, self._group_size * count - self._num_columns))
        return padded.view(len(x), count, self._group_size).sum(dim=-1)

    def _widen_and_multiply(self, x: Tensor) -> Tensor:
        places = torch.arange(self._num_columns, dtype=torch.int32)
        wide = self._sum(places, places, None)  # [columns, rows]
        for group, start in enumerate(self._starts.tolist()):
            part = wide[start : start + self._group_size]
            if self._zeros is not None:
                part.sub_(self._zeros[group])
            part.mul_(self._scales[group])
        return x @ wide.to(self._dtype)

    def _sum(self, places: Tensor, starts: Tensor, factors: Tensor | None) -> Tensor:
        """Sums of rows times factors, from each start to the next: [bags, rows] float32."""
        answer: Tensor = self._sum_bags(self._rows, places, starts, False, 0, False, factors)
        return answer


_BAG_SUMS = {
    True: torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
    False: torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
}
"""By whether numbers have 4 bits."""


def _bag_rows(values: Tensor, *, is_nibble: bool) -> Tensor:
    """values [rows, columns], of 4 bits or int8, as [columns, bytes]: behind the numbers of a
    column come the scale, 1, and what is added to numbers that start from 0, in float16 or, beside
    bytes, in float32. 4 bits become -8 to 7."""
    columns = values.t().contiguous()
    if is_nibble:
        numbers = reference.pack_nibbles(columns)
        end = torch.tensor([1.0, -8.0], dtype=torch.float16)
    else:
        numbers = columns.view(torch.uint8) ^ 128
        end = torch.tensor([1.0, -128.0])
    return torch.cat((numbers, end.view(torch.uint8).expand(len(columns), -1)), dim=1)


@cache
def _sums_bags() -> bool:
    x, starts = torch.tensor([0.5, 2.0, 3.0, -1.0]), torch.tensor([0, 2], dtype=torch.int32)
    places = torch.arange(4, dtype=torch.int32)
    try:
        for is_nibble, sums in _BAG_SUMS.items():
            values = torch.arange(8).view(2, 4).to(torch.uint8 if is_nibble else torch.int8)
            rows = _bag_rows(values, is_nibble=is_nibble)
            wide = values.float() - (8 if is_nibble else 0)
            expected = (wide * x).view(2, 2, 2).sum(-1).t()
            if not torch.equal(sums(rows, places, starts, False, 0, False, x), expected):
                return False
    except (AttributeError, RuntimeError):
        return False
    return True


CPU_PRODUCTS: tuple[type[CpuProduct], ...] = (
    Int4Linear,
    IntegerLinear,
    FixedPointLinear,
    BagLinear,
)
"""The first that takes a weight multiplies by it."""
