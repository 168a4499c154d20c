"""Checks that the layers of a step would repeat are made once."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import launch

Checked = list[tuple[torch.Tensor, float | None]]


@pytest.fixture
def checked() -> Checked:
    return []


@pytest.fixture
def check(checked: Checked) -> object:
    @launch.once_in_a_row
    def check(tensor: torch.Tensor, number: float | None) -> None:
        checked.append((tensor, number))
        launch.check_shape("tensor", tensor, (None, 4))
        launch.check_rows("tensor", tensor)
        launch.check_positive("number", number)

    return check


def test_other_numbers_in_other_memory_are_not_checked_again(checked, check) -> None:  # type: ignore[no-untyped-def]
    for _ in range(3):
        check(torch.randn(2, 4), 1.0)
    assert len(checked) == 1


@pytest.mark.parametrize(
    ("tensor", "number"),
    [
        (torch.zeros(3, 4), 1.0),
        (torch.zeros(2, 8)[:, :4], 1.0),
        (torch.zeros(2, 4).half(), 1.0),
        (torch.zeros(2, 4, device="meta"), 1.0),
        (torch.zeros(2, 4), 2.0),
        (torch.zeros(2, 4), None),
    ],
)
def test_what_differs_is_checked(checked, check, tensor, number) -> None:  # type: ignore[no-untyped-def]
    check(torch.zeros(2, 4), 1.0)
    check(tensor, number)
    assert len(checked) == 2


def test_a_few_kinds_may_take_turns(checked, check) -> None:  # type: ignore[no-untyped-def]
    for _ in range(3):
        for rows in (1, 2, 3, 4):
            check(torch.zeros(rows, 4), None)
    assert len(checked) == 4
    for rows in range(9):
        check(torch.zeros(rows, 4), None)
    check(torch.zeros(0, 4), None)
    assert len(checked) == 4 + 9 + 1, "and more are forgotten"


def test_what_was_refused_is_refused_again(checked, check) -> None:  # type: ignore[no-untyped-def]
    for tensor in (torch.zeros(2, 5), torch.zeros(4, 2).t()):
        for _ in range(2):
            with pytest.raises(ValueError, match="tensor: "):
                check(tensor, 1.0)
    assert len(checked) == 4
