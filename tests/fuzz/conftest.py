"""A loaded model for the fuzzers of requests."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.triton_harness import Server, write_number_tokenizer
from support.triton_stub import CountingEngine, FakePbUtils

from inflight_backend.manager import gpt_manager
from inflight_backend.triton import model as triton_model


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A loaded model that answers text and tokens."""
    engine = CountingEngine(max_seq_len=64)
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(triton_model, "exit_with_parent"),
        mock.patch.object(gpt_manager, "load_engine", return_value=engine),
        mock.patch.dict(sys.modules, {"triton_python_backend_utils": FakePbUtils}),
    ):
        write_number_tokenizer(Path(name))
        server = Server(Path(name), engine, model_name="counting")
        yield server
        server.model.finalize()
