"""Requirements on tritonserver: a clear error at the start if one is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.triton_harness import Server
from support.triton_stub import CountingEngine, FakeMetricFamily, FakePbUtils, FakeTritonError

from inflight_backend.errors import ConfigurationError
from inflight_backend.triton import model as stub_checks
from inflight_backend.triton import model as triton_model
from inflight_backend.triton.model import check_numpy, check_own_stub
from inflight_server.serve.tritonserver import locate

NEW_STUB = b"...numpy.lib\0NumpyVersion\0major\0numpy._core\0"


def without(name: str) -> Any:
    """`FakePbUtils` of a Triton that lacks ``name``."""
    owner, _, part = name.rpartition(".")
    pb_utils: dict[str, Any] = {
        **vars(FakePbUtils),
        "TritonError": SimpleNamespace(**vars(FakeTritonError)),
        "MetricFamily": SimpleNamespace(**vars(FakeMetricFamily)),
    }
    found = vars(pb_utils[owner]) if owner else pb_utils
    del found[part]
    return SimpleNamespace(**pb_utils)


@pytest.mark.case(108)
@pytest.mark.parametrize("version", ["2.0.0", "2.3.1", "10.0"])
def test_numpy_too_new_for_the_stub_is_refused(version: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"numpy {version} is too new.*'numpy<2'"):
        check_numpy(version, locate().stub)


@pytest.mark.parametrize("version", ["1.24.0", "1.26.4"])
def test_numpy_of_the_stub_is_accepted(version: str) -> None:
    check_numpy(version, locate().stub)


def test_stub_with_numpy_2_accepts_it(tmp_path: Path) -> None:
    (tmp_path / "stub").write_bytes(NEW_STUB)
    check_numpy("2.3.1", tmp_path / "stub")


@pytest.mark.case(108)
def test_server_that_we_did_not_start_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model checks the program that runs it: here Python, which has no numpy 2."""
    monkeypatch.setattr(triton_model, "exit_with_parent", lambda model: None)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    monkeypatch.setattr("numpy.__version__", "2.1.0")
    with pytest.raises(FakePbUtils.TritonModelException, match=r"numpy 2\.1\.0 is too new"):
        Server(tmp_path, CountingEngine())


@pytest.mark.case(108)
@pytest.mark.parametrize("name", stub_checks._NEEDED)
def test_triton_that_is_too_old_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"too old: its Python backend has no {name};"):
        check_own_stub(without(name))
    check_own_stub(FakePbUtils)
