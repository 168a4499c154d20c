"""Set up before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Triton reads this when it is first imported, whoever does that: without a GPU, kernels run on the
# CPU in the tests.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(optionalhook=True)  # a GPU machine may lack pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config) -> Any:
    """With ``-n``: who runs which tests."""
    from distribution import Distribution

    return Distribution(config)
