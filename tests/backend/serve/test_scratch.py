"""Only the folder of the own server is taken away: another server would crash without its."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from inflight_server.serve import workspace as module
from inflight_server.serve.workspace import BackendTmp, remove_backend_tmp


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /tmp, with the folder of a server that runs already."""
    folder = tmp_path / "parent"
    folder.mkdir()
    (folder / "python_env_other").mkdir()
    monkeypatch.setattr(module, "PARENT", folder)
    return folder


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return tmp_path / "note"


def is_locked(parent: Path) -> bool:
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_new_folder_is_noted_and_the_lock_given_back(parent: Path, note: Path) -> None:
    with BackendTmp(note) as scratch:
        scratch.look()
        assert is_locked(parent)
        (parent / "python_env_mine").mkdir()
        scratch.look()
        assert note.read_text() == str(parent / "python_env_mine")
        assert not is_locked(parent)
        (parent / "python_env_later").mkdir()
        scratch.look()
    assert note.read_text() == str(parent / "python_env_mine")


def test_folder_made_just_before_the_end_is_noted(parent: Path, note: Path) -> None:
    with BackendTmp(note):
        (parent / "python_env_mine").mkdir()
    assert note.read_text() == str(parent / "python_env_mine")
    assert not is_locked(parent)


@pytest.mark.case(119)
def test_a_note_without_room_on_the_disk_is_written_later(parent: Path, note: Path) -> None:
    """A start after a failure, which must not end because of the note."""
    note.symlink_to("/dev/full")
    with BackendTmp(note) as scratch:
        (parent / "python_env_mine").mkdir()
        scratch.look()
        assert not is_locked(parent)
        note.unlink()  # now there is room
        (parent / "python_env_later").mkdir()
        scratch.look()
        assert note.read_text() == str(parent / "python_env_mine")


def test_two_new_folders_are_both_left_alone(parent: Path, note: Path) -> None:
    with BackendTmp(note) as scratch:
        (parent / "python_env_a").mkdir()
        (parent / "python_env_b").mkdir()
        scratch.look()
    assert not note.exists()


def test_without_the_lock_no_folder_is_claimed(
    parent: Path, note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.1)
    with BackendTmp(note.with_name("first")), BackendTmp(note) as second:
        (parent / "python_env_a").mkdir()
        second.look()
    assert not note.exists()


def test_removal_is_limited_to_empty_scratch_folders(parent: Path) -> None:
    for name in ("python_env_empty", "python_env_used/file", "precious"):
        (parent / name).mkdir(parents=True)
    for path in (*parent.iterdir(), parent / "python_env_used" / "file", parent / "missing"):
        if path.name != "python_env_other":
            remove_backend_tmp(path)
    assert sorted(entry.name for entry in parent.iterdir()) == [
        "precious",
        "python_env_other",
        "python_env_used",
    ]
    assert (parent / "python_env_used" / "file").is_dir()
