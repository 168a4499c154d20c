"""What the tests do to Triton's interpreter (`interpreter`) leaves no trace in the language."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction


@InterpretedFunction  # also where there is a GPU
def _double(row):  # type: ignore[no-untyped-def]
    return row + row


@InterpretedFunction  # type: ignore[untyped-decorator]
def _quadruple(x, out, FAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.static_assert(not FAIL, "asked for")
    tl.store(out + places, _double(_double(tl.load(x + places))))


def test_members_are_replaced_once_for_a_launch_and_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_times = 0
    replace = interpreter._patch_builtin

    def count(*args: object) -> None:
        nonlocal num_times
        num_times += args[0] is tl.math
        replace(*args)

    monkeypatch.setattr(interpreter, "_patch_builtin", count)
    modules = (tl, tl.core, tl.math)
    before = [{**vars(each)} for each in modules]
    x, out = torch.arange(12.0), torch.empty(12)
    for launch in (1, 2):
        _quadruple[(3,)](x, out, False)
        assert out.tolist() == (4 * x).tolist()
        assert [{**vars(each)} for each in modules] == before
        assert num_times == launch, "not once more for every call"
    with pytest.raises(interpreter.InterpreterError, match="asked for"):
        _quadruple[(3,)](x, out, True)
    assert [{**vars(each)} for each in modules] == before
    _quadruple[(3,)](x, out, False)
