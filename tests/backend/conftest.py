"""Fixtures of several folders: a checkpoint, and compilations that wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.guided_answers import HeldCompiler


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint."""
    import torch
    from support.checkpoints import write_checkpoint

    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCompiler]:
    """All guides of the test wait to be compiled until it sets ``go_on``."""
    from support.guided_answers import HeldCompiler

    from inflight_backend.guided import compiler

    made = HeldCompiler()
    monkeypatch.setattr(compiler, "to_grammar", made.to_grammar)
    yield made
    made.go_on.set()
