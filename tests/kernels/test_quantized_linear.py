"""Linears with weights of few bits against the product with what they stand for."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from support.quantized_weights import Weights, random_weights

from inflight_kernels import reference
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from inflight_kernels.ops.linear.quantize_int8 import quantize_int8
from inflight_kernels.ops.linear.quantized_linear import Tile, prepare, quantized_linear, rows

LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


class Case(NamedTuple):
    """A weight, by `random_weights`, and how many tokens it gets."""

    kind: str
    rows: int
    columns: int
    group_size: int
    num_tokens: int
    options: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """The same in every process, which a set's own text is not."""
        return "-".join(map(str, (*self[:5], *sorted(self.options))))


ZEROS, ORDER, CODEBOOK = frozenset({"zeros"}), frozenset({"order"}), frozenset({"codebook"})
CASES = [
    Case("int4", 40, 64, 32, 1),
    Case("int4", 70, 256, 128, 3, ZEROS),
    Case("int4", 70, 200, 200, 20, ZEROS),
    Case("int4", 64, 1100, 64, 7),
    Case("int4", 70, 200, 8, 20, ZEROS | ORDER),
    Case("int4", 64, 640, 16, 5, CODEBOOK),
    Case("int4", 48, 512, 256, 65, CODEBOOK),
    Case("int8", 40, 72, 32, 3, ZEROS),
    Case("int8", 40, 300, 300, 130),
    Case("int8", 33, 256, 128, 17, ORDER),
    Case("float8", 40, 1300, 128, 3),
    Case("float8", 40, 300, 300, 3),
]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, over that of what is expected."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.fast(16)
@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_wide_weight(
    device: torch.device, generator: torch.Generator, case: Case, dtype: torch.dtype
) -> None:
    made = random_weights(generator, case.kind, case.rows, case.columns, case.group_size,
                          case.options, dtype)  # fmt: skip
    x = torch.randn(case.num_tokens, case.columns, generator=generator).to(dtype)
    bias = torch.randn(case.rows, generator=generator)
    expected = made.gathered(x).double() @ made.wide.double().t() + bias
    weight = made.prepared(device)
    for tile in (None, Tile(32, 32, weight.depth, 2, 2, 4)):
        found = quantized_linear(x.to(device), weight, bias.to(device), tile=tile)
        assert found.dtype == dtype
        assert error(found.cpu(), expected) < LIMIT[dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_as_they_were(device: torch.device, generator: torch.Generator, case: Case) -> None:
    """Of what is prepared, in any order and twice."""
    made = random_weights(generator, case.kind, case.rows, case.columns, case.group_size,
                          case.options)  # fmt: skip
    numbers = torch.tensor([case.rows - 1, 3, 3, 0], device=device)
    for is_plain in {False, case.kind != "int4"}:
        weight = made.prepared(device, is_plain=is_plain)
        values, scales, zeros = (
            None if each is None else each.cpu() for each in rows(weight, numbers)
        )
        assert values is not None
        assert scales is not None
        found = reference.dequantize(values, scales, zeros, weight.group_size, made.codebook)
        assert torch.equal(found, made.wide[numbers.cpu()])


@pytest.mark.parametrize("kind", ["int4", "float8"])
def test_splits_of_the_columns_leave_no_trace(
    device: torch.device, generator: torch.Generator, kind: str
) -> None:
    """Programs that add up may run again and again, and give the same bits every time."""
    made = random_weights(generator, kind, 90, 2048, 128)
    weight, x = made.prepared(device), torch.randn(3, 2048, generator=generator).to(device)
    expected = x.cpu().double() @ made.wide.double().t()
    answers = [
        quantized_linear(x, weight, tile=Tile(16, 32, weight.depth, 5, 2, 4)) for _ in range(3)
    ]
    assert error(answers[0].cpu(), expected) < 1e-5
    assert all(torch.equal(each, answers[0]) for each in answers)


def ends(sizes: list[int]) -> list[int]:
    """Where each but the last one ends."""
    return list(accumulate(sizes))[:-1]


def groups_of(sizes: list[int], device: torch.device) -> torch.Tensor:
    """Where the rows of each begin."""
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)


@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
@pytest.mark.parametrize("sizes", [[0, 3, 0, 17, 1, 0], [70, 0, 33], [0], [7]], ids=str)
def test_experts(
    device: torch.device, generator: torch.Generator, sizes: list[int], kind: str
) -> None:
    """Each with an order of its columns; also as they are quantised. Rows behind the last one's
    disturb nothing."""
    rows, columns = 40, 96
    made = [
        random_weights(generator, kind, rows, columns, 32, ORDER, torch.bfloat16) for _ in sizes
    ]
    together = Weights.stack(made)
    x = torch.randn(sum(sizes), columns, generator=generator).bfloat16()
    parts = zip(made, x.tensor_split(ends(sizes)), strict=True)
    expected = torch.cat([one.gathered(part).double() @ one.wide.double().t()
                          for one, part in parts])  # fmt: skip
    starts = groups_of(sizes, device)
    longer = torch.cat((x, torch.full((21, columns), torch.nan).bfloat16()))
    found = quantized_linear(longer.to(device), together.prepared(device), starts=starts)[: len(x)]
    assert found.shape == expected.shape
    if len(x):
        assert error(found.cpu(), expected) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize("sizes", [None, [5, 0, 14]], ids=str)
@pytest.mark.parametrize(("kind", "group_size"), [("int8", 300), ("float8", 300), ("float8", 128)])
def test_both_of_few_bits(
    device: torch.device,
    generator: torch.Generator,
    kind: str,
    group_size: int,
    sizes: list[int] | None,
) -> None:
    """Beside the same numbers in double precision."""
    columns, count = 300, 1 if sizes is None else len(sizes)
    made = random_weights(generator, kind, 40 * count, columns, group_size)
    x = torch.randn(19, columns, generator=generator)
    if kind == "int8":
        numbers, scales = quantize_int8(x.to(device))
    else:
        numbers, scales = quantize_fp8(x.to(device), None if group_size == columns else 128)
    wide_x = reference.dequantize(numbers.cpu(), scales.cpu(), None, group_size).double()
    weight = made.prepared(device, is_plain=True)
    parts = zip(
        made.wide.double().view(count, 40, -1),
        wide_x.tensor_split(ends(sizes or [19])),
        strict=True,
    )
    expected = torch.cat([part @ own.t() for own, part in parts])
    starts = None if sizes is None else groups_of(sizes, device)
    found = quantized_linear(
        numbers, weight, x_scales=scales, starts=starts, out_dtype=torch.float32
    )
    assert error(found.cpu(), expected) < (1e-5 if kind == "int8" or not found.is_cuda else 1e-2)


def test_what_does_not_go_together_is_refused(generator: torch.Generator) -> None:
    weight = random_weights(generator, "int8", 16, 64, 64)
    x = torch.zeros(2, 64)
    for numbers, prepared, scales, message in (
        (x, weight.prepared(), torch.ones(2, 1), "x_scales: must be given with int8"),
        (x.to(torch.int8), weight.prepared(), None, "x_scales: must be given with int8"),
        (x.to(torch.int8), weight.prepared(), torch.ones(2, 1), "x: of 8 bits goes with a plain"),
        (x, weight.prepared(is_plain=True), None, "x: of 8 bits goes with a plain"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_linear(numbers, prepared, x_scales=scales)
    groups = random_weights(generator, "int8", 16, 64, 32).prepared(is_plain=True)
    with pytest.raises(ValueError, match="needs a scale per row"):
        quantized_linear(x.to(torch.int8), groups, x_scales=torch.ones(2, 2))


def test_a_symmetric_weight_has_no_zeros_to_read() -> None:
    values, scales = torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 2)
    assert prepare(values, scales, torch.full((4, 2), 8.0), group_size=8).zeros is None
    assert prepare(values, scales, torch.full((4, 2), 7.0), group_size=8).zeros is not None
