"""The folder of compiled kernels belongs to this user alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.backends import make_ops

triton = pytest.importorskip("triton")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels would be cached by a process that compiles some."""
    folder = tmp_path / "home" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    return folder


@pytest.mark.case(110)
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
def test_a_folder_that_others_can_write_is_refused(cache: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    with pytest.raises(ConfigurationError, match="others can write to the folder of compiled"):
        make_ops("triton", "none")
    cache.chmod(0o755)
    make_ops("triton", "none")


@pytest.mark.case(110)
def test_the_folder_of_another_user_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    if os.getuid() == 0:
        os.chown(cache, 12345, -1)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(ConfigurationError, match="others can write"):
        make_ops("triton", "none")


def test_a_folder_is_made_private_where_kernels_are_compiled(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        make_ops("triton", "none")
        assert not cache.exists()
    before = os.umask(0)
    try:
        make_ops("triton", "none")
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_file_in_its_place_is_named(cache: Path) -> None:
    cache.parent.mkdir()
    cache.touch()
    with pytest.raises(ConfigurationError, match="TRITON_CACHE_DIR"):
        make_ops("triton", "none")
