"""How long the fuzzers run: briefly in every test run, for hours with
``FUZZ_EXAMPLES=1000000 pytest -m fuzz --timeout 0``. What one has found is its ``@example``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

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


# A path with two parts, an address, a traceback, a module of ours or of Python.
_INTERNAL = re.compile(r"/\w+/\w+|0x[0-9a-f]{6,}|Traceback|\.py\b|<class|<built-in|object at ")


def assert_tells_nothing_internal(message: str) -> None:
    """Fail if an error for a client holds a path, an address or a piece of a traceback."""
    assert not _INTERNAL.search(message), message
