"""A loaded model for the fuzzers of requests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.triton_harness import Server, write_number_tokenizer
from support.triton_stub import CountingEngine, fake_pb_utils

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
        fake_pb_utils(),
    ):
        write_number_tokenizer(Path(name))
        server = Server(Path(name), engine, model_name="counting")
        yield server
        server.model.finalize()
