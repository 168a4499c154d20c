"""Compiled products of few bits against torch's in float32 of what they stand for."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.cpu import quantized_linear

pytestmark = pytest.mark.fast(4)
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
NORMAL = torch.randn(16, generator=torch.Generator().manual_seed(5)).sort().values


def make(
    generator: torch.Generator, kind: str, shape: tuple[int, int], size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Values, scales, zeros and codebook of a weight in groups of ``size``."""
    rows, columns = shape
    groups = (rows, -(-columns // size))
    scales = torch.rand(groups, generator=generator) + 0.1
    if kind == "float8":
        values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        return values, scales, None, None
    if kind.startswith("8"):
        values = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    else:
        values = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 16, groups, generator=generator).to(dtype)
    if "zeros" not in kind:
        return values, scales.to(dtype), None, NORMAL if kind == "codebook" else None
    return values, scales.to(dtype), zeros, None


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits [rows, groups], two groups a byte."""
    even = torch.nn.functional.pad(zeros.to(torch.uint8), (0, zeros.shape[1] % 2))
    return reference.pack_nibbles(even)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(
    "kind",
    ["4 bits", "4 bits, zeros", "4 bits, small zeros", "codebook", "8 bits", "8 bits, zeros",
     "float8"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("shape", "size"), [((32, 16), 16), ((112, 96), 32), ((96, 200), 64), ((144, 72), 72)]
)
def test_equals_torch(
    generator: torch.Generator, dtype: torch.dtype, kind: str, shape: tuple[int, int], size: int
) -> None:
    """Every split of rows and panels into tiles; a last group that is short; a row of the answer
    does not depend on the others."""
    values, scales, zeros, codebook = make(generator, kind, shape, size, dtype)
    assert quantized_linear.takes(values, dtype, size, has_codebook=codebook is not None)
    given_zeros, first_zero = zeros, 0
    if zeros is not None and "small" in kind:
        given_zeros, first_zero, zeros = pack_zeros(zeros), 1, zeros + 1
    packed = quantized_linear.pack(values, scales, given_zeros, size, dtype, codebook, first_zero)
    wide = reference.dequantize(values, scales, zeros, size, codebook)
    bias = torch.randn(shape[0], generator=generator)
    x = torch.randn(77, shape[1], generator=generator).to(dtype)
    for given in (None, bias):
        expected = torch.nn.functional.linear(x.float(), wide, given)
        bound = LIMIT[dtype] * float(expected.abs().max())
        for count in (0, 1, 3, 13, 77):
            found = quantized_linear.quantized_linear(x[:count], packed, given)
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), expected[:count], atol=bound, rtol=0)
        alone = [quantized_linear.quantized_linear(row[None], packed, given) for row in x[:9]]
        assert torch.equal(torch.cat(alone), found[:9])
    numbers = torch.tensor([shape[0] - 1, 0, 17, 17])
    found_values, found_scales, found_zeros = quantized_linear.rows(packed, numbers)
    if zeros is not None and given_zeros is not None and found_zeros is not None:
        assert torch.equal(found_zeros, given_zeros[numbers])
        found_zeros = zeros[numbers]
    assert packed.first_zero == first_zero
    table = None if codebook is None else codebook.to(dtype).float()
    wide = reference.dequantize(values, scales, zeros, size, table)
    again = reference.dequantize(found_values, found_scales, found_zeros, size, table)
    assert torch.equal(again, wide[numbers])


@pytest.mark.parametrize("kind", ["4 bits", "4 bits, small zeros"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits_give_what_they_give_in_float32(
    generator: torch.Generator, dtype: torch.dtype, kind: str
) -> None:
    values, scales, zeros, _ = make(generator, kind, (112, 96), 32, dtype)
    zeros = None if zeros is None else pack_zeros(zeros)
    x = torch.randn(13, 96, generator=generator)
    answers = [
        quantized_linear.quantized_linear(
            x, quantized_linear.pack(values, each, zeros, 32, torch.float32), None
        )
        for each in (scales, scales.float())
    ]
    assert scales.dtype == dtype
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        (torch.zeros(40, 32, dtype=torch.int8), 32),
        (torch.zeros(32, 34, dtype=torch.int8), 34),
        (torch.zeros(32, 32, dtype=torch.uint8), 4),
        (torch.zeros(32, 32), 32),
    ],
    ids=["rows", "columns", "groups", "type"],
)
def test_others_are_not_taken(values: torch.Tensor, size: int) -> None:
    assert not quantized_linear.takes(values, torch.float32, size, has_codebook=False)
    assert not quantized_linear.takes(values, torch.float16, size, has_codebook=False)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("shape", [(32, 16), (112, 96), (144, 72)])
def test_integers_times_integers(
    generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Sums are exact, whatever the scales; a row of zeros stays one."""
    values = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    scales = torch.rand(shape[0], 1, generator=generator) + 0.1
    if not quantized_linear.takes_integers(values, scales):
        pytest.skip("needs a CPU that adds up four products of integers at once (VNNI)")
    packed = quantized_linear.pack_integers(values, scales)
    x = torch.randn(77, shape[1], generator=generator).to(dtype)
    x[2] = 0
    numbers, of_x = reference.quantize_int8(x)
    wide = numbers.double() @ values.double().t() * of_x.double() * scales.double().t()
    bias = torch.randn(shape[0], generator=generator)
    for given in (None, bias):
        expected = wide if given is None else wide + given
        for count in (0, 1, 3, 13, 77):
            found = quantized_linear.integer_linear(x[:count], packed, given)
            assert found.dtype == dtype
            rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(found.double(), expected[:count], rtol=rounding, atol=1e-4)
    assert not quantized_linear.takes_integers(values[:24], scales[:24])
    assert not quantized_linear.takes_integers(values, scales.expand(-1, 2))
