"""A checkpoint and adapters of each kind over it, which tests only read."""

from __future__ import annotations

import pytest
from support.adapters import World, write_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return write_world(tmp_path_factory.mktemp("adapters"))
