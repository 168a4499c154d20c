"""Compilations that wait until a test lets them go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.guided_answers import HeldCompiler

from inflight_backend.guided import compiler


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCompiler]:
    """All guides of the test; the test sets ``go_on``."""
    made = HeldCompiler()
    monkeypatch.setattr(compiler, "to_grammar", made.to_grammar)
    yield made
    made.go_on.set()
