"""Where the kernels of this folder run: on the CUDA device if there is one, else interpreted.

Triton decides whether to interpret when it decorates a function, its own library included, so the
switch must be set before the first ``import triton`` of the process and holds until its end.
Tests that compile for a GPU which is not here therefore do so in a process of their own
(`test_compile.py`).
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(
            "triton was imported before TRITON_INTERPRET was set; set TRITON_INTERPRET=1 in the "
            "environment, or at the top of tests/conftest.py"
        )
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where test tensors live."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator() -> torch.Generator:
    """Random numbers, the same in every run (drawn on the CPU)."""
    return torch.Generator().manual_seed(20)
