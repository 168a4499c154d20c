"""What fuzzers share: values, and how long they run: briefly in every test run, for hours with
``FUZZ_EXAMPLES=1000000 pytest -m fuzz --timeout 0``. What one has found is its ``@example``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_Test = TypeVar("_Test", bound=Callable[..., Any])

_SETTINGS = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def fuzzing(test: _Test) -> _Test:
    """Decorator of every fuzzer."""
    fuzzer: _Test = pytest.mark.fuzz(_SETTINGS(test))
    return fuzzer


DTYPES = ["bool", "uint8", "int8", "int32", "int64", "uint64", "float16", "float32", "float64"]
INTERESTING = [0, 1, -1, 2, 7, 255, 256, 999, 1000, 2**31 - 1, -(2**31), 2**63 - 1, 0.5, 1e38]
ODD = [float("nan"), float("inf"), -float("inf")]
TEXTS = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(str.encode),
    st.sampled_from([b'{"n": 1, "stop": ["x"]}', b'{"max_tokens": 2, "max_tokens": 4}']),
    st.sampled_from([b"", b"\0", b"\xed\xa0\x80", b"1 2 3", b"\x1b[2J", b"{" * 2000, b"9" * 5000]),
)


@st.composite
def arrays_of(
    draw: st.DrawFn, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Values that might break something; texts for ``dtype`` object."""
    size = int(np.prod(shape))
    if dtype.kind == "O":
        array = np.empty(size, dtype=np.object_)
        array[:] = draw(st.lists(TEXTS, min_size=size, max_size=size))
        return array.reshape(shape)
    known = st.sampled_from([*INTERESTING, *(ODD if dtype.kind == "f" else [])])
    numbers = draw(st.lists(known, min_size=size, max_size=size))
    with np.errstate(all="ignore"):
        if dtype.kind == "f":
            return np.array(numbers, dtype=np.float64).astype(dtype).reshape(shape)
        wrapped = [int(value) & (2 ** (8 * dtype.itemsize) - 1) for value in numbers]
        unsigned = np.array(wrapped, dtype=f"u{dtype.itemsize}")
        return (unsigned != 0 if dtype.kind == "b" else unsigned.view(dtype)).reshape(shape)


# A path with two parts, an address, a traceback, a module of ours or of Python.
_INTERNAL = re.compile(r"/\w+/\w+|0x[0-9a-f]{6,}|Traceback|\.py\b|<class|<built-in|object at ")


def assert_tells_nothing_internal(message: str) -> None:
    """Fail if an error for a client holds a path, an address or a piece of a traceback."""
    assert not _INTERNAL.search(message), message
