"""How long the fuzzers run: briefly in every test run, for hours with ``FUZZ_EXAMPLES=1000000``."""

from __future__ import annotations

import os
import re

from hypothesis import HealthCheck, settings

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "80"))

fuzzing = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
"""Decorator of every fuzzer."""

# A path with two parts, an address, a traceback, a module of ours or of Python.
_INTERNAL = re.compile(r"/\w+/\w+|0x[0-9a-f]{6,}|Traceback|\.py\b|<class|<built-in|object at ")


def assert_tells_nothing_internal(message: str) -> None:
    """Fail if an error for a client holds a path, an address or a piece of a traceback."""
    assert not _INTERNAL.search(message), message
