"""The private folder, and that nothing of a run stays and nothing of another is removed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from inflight_backend.status import stop_file_of
from inflight_server.serve import workspace as module
from inflight_server.serve.log_file import before
from inflight_server.serve.workspace import (
    BackendTmp,
    Workspace,
    clean_stale,
    remove_backend_tmp,
)

KILLED = """
import os
from inflight_server.serve.workspace import Workspace
workspace = Workspace()
print(workspace.path, flush=True)
os.kill(os.getpid(), 9)
"""
NEIGHBOUR = """
import sys
from pathlib import Path
from inflight_server.serve.workspace import Workspace
with Workspace() as workspace:
    (Path("/dev/shm") / f"{workspace.shm_prefix}abc").touch()
    print(workspace.path, flush=True)
    sys.stdin.read(1)
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def shared_memory(workspace: Workspace) -> Path:
    """A region named as the Python backend names them."""
    return Path("/dev/shm") / f"{workspace.shm_prefix}2e0b-76c3"


def test_folder_is_private_and_goes_with_its_shared_memory(temporary_folder: Path) -> None:
    """When a run fails, too."""

    def fail(workspace: Workspace) -> None:
        with workspace:
            assert workspace.path.parent == temporary_folder
            assert workspace.path.stat().st_mode & 0o777 == 0o700
            workspace.models.mkdir()
            shared_memory(workspace).touch()
            raise RuntimeError

    workspace = Workspace()
    with pytest.raises(RuntimeError):
        fail(workspace)
    assert list(temporary_folder.iterdir()) == []
    assert not shared_memory(workspace).exists()


def test_a_folder_that_cannot_be_locked_does_not_stay(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that has room for a folder and for no file in it."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="No space left"):
        Workspace()
    assert list(temporary_folder.iterdir()) == []


def test_a_file_of_another_user_that_cannot_be_removed_keeps_nothing_else(
    temporary_folder: Path,
) -> None:
    """Under a name of ours, which they can see: the next server starts all the same."""
    workspace = Workspace()
    foreign = Path("/dev/shm") / f"{workspace.shm_prefix}0"
    foreign.mkdir()
    try:
        with workspace:
            shared_memory(workspace).touch()
            workspace.clear_run()
            assert not shared_memory(workspace).exists()
            shared_memory(workspace).touch()
    finally:
        foreign.rmdir()
    assert not shared_memory(workspace).exists()
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.case(124)
def test_next_run_removes_the_files_of_a_killed_one() -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    folder = Path(killed.stdout.strip())
    region = Path("/dev/shm") / f"{folder.name}abc"
    region.touch()
    assert folder.is_dir()
    with Workspace():
        assert not folder.exists()
        assert not region.exists()


@pytest.mark.case(124)
@pytest.mark.parametrize("state", ["left", "young", "mapped", "of another program"])
def test_regions_whose_folder_has_gone_before_them(state: str) -> None:
    """As when the folder was below a TMPDIR that is no more."""
    prefix = "another-serve-" if state == "of another program" else "inflight-serve-"
    region = Path("/dev/shm") / f"{prefix}a_b0c1d22e0b-76c3-{os.getpid()}"
    region.write_bytes(b"x" * mmap.PAGESIZE)
    age = 60 if state == "young" else 7200
    try:
        with region.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            if state != "mapped":
                mapping.close()
            # Not before: a server that another test starts would remove it.
            os.utime(region, (time.time() - age, time.time() - age))
            clean_stale()
            assert region.exists() == (state != "left")
    finally:
        region.unlink(missing_ok=True)


@pytest.mark.case(109)
@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_two_launchers_side_by_side_touch_nothing_of_each_other(end: str) -> None:
    """The second one comes, goes or is killed and swept up while the first one runs."""
    with Workspace() as first:
        shared_memory(first).touch()
        with subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as second:
            assert second.stdout is not None
            folder = Path(second.stdout.readline().decode().strip())
            region = Path("/dev/shm") / f"{folder.name}abc"
            assert region.exists()
            assert not folder.name.startswith(first.shm_prefix)
            assert not first.shm_prefix.startswith(folder.name)
            with Workspace():  # a third one sweeps and goes
                assert folder.is_dir()
                assert region.exists()
            if end == "leaves":
                second.communicate(b".")
            else:
                second.kill()
                second.wait()
                clean_stale()
        assert not folder.exists()
        assert not region.exists()
        assert first.path.is_dir()
        assert shared_memory(first).exists()
    assert not shared_memory(first).exists()


def test_folder_that_is_being_made_is_left_alone(temporary_folder: Path) -> None:
    made = temporary_folder / "inflight-serve-abc"
    made.mkdir()
    clean_stale()
    assert made.is_dir()


def test_an_empty_file_each_says_which_kind_of_stop() -> None:
    """Empty, since there is room for that on a full disk."""
    with Workspace() as workspace:
        stop_file = stop_file_of(workspace.drain_file)
        workspace.ask_to_drain()
        assert (workspace.drain_file.exists(), stop_file.exists()) == (True, False)
        workspace.ask_to_drain(stop_all=True)
        assert [file.stat().st_size for file in (workspace.drain_file, stop_file)] == [0, 0]
        workspace.clear_run()
        assert (workspace.drain_file.exists(), stop_file.exists()) == (False, False)


def test_the_logs_of_a_failed_server_are_kept_and_are_not_those_of_the_next_one() -> None:
    with Workspace() as workspace:
        kept = workspace.log_file.with_name("server.old")
        logs = workspace.log_file, before(workspace.log_file)
        for number, has_been_cut in enumerate((True, False)):
            logs[0].write_text(f"late {number}")
            if has_been_cut:
                logs[1].write_text(f"early {number}")
            workspace.clear_run()
            assert [log.exists() for log in logs] == [False, False]
            assert kept.read_text() == f"late {number}"
            assert before(kept).exists() == has_been_cut


def test_cleaners_of_temporary_files_pass_over_the_folder_of_a_living_run() -> None:
    """systemd-tmpfiles asks for a shared lock on each folder: tmpfiles.d(5), the note on aging."""
    num_open = len(os.listdir("/proc/self/fd"))
    with Workspace() as workspace:
        assert is_locked(workspace.path)
    assert len(os.listdir("/proc/self/fd")) == num_open


def is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /tmp, with the folder of a server that runs already: that would crash without
    its folder."""
    folder = tmp_path / "parent"
    (folder / "python_env_other").mkdir(parents=True)
    monkeypatch.setattr(module, "PARENT", folder)
    return folder


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return tmp_path / "note"


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
    assert note.read_text() == str(parent / "python_env_mine")


@pytest.mark.parametrize(
    ("names", "has_lock", "is_noted"),
    [
        (["python_env_mine"], True, True),
        (["python_env_a", "python_env_b"], True, False),
        (["python_env_mine"], False, False),
    ],
)
def test_a_folder_made_just_before_the_end_is_noted_if_it_must_be_ours(
    parent: Path,
    note: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    has_lock: bool,
    is_noted: bool,
) -> None:
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.1)
    other = BackendTmp(note.with_name("first"))
    if has_lock:
        other.release()
    with BackendTmp(note):
        for name in names:
            (parent / name).mkdir()
    other.release()
    assert note.exists() == is_noted
    assert not is_locked(parent)


def test_removal_is_limited_to_empty_scratch_folders(parent: Path) -> None:
    for name in ("python_env_empty", "python_env_used/file", "precious"):
        (parent / name).mkdir(parents=True)
    for path in (*parent.iterdir(), parent / "python_env_used" / "file", parent / "missing"):
        remove_backend_tmp(path)
    assert sorted(entry.name for entry in parent.iterdir()) == ["precious", "python_env_used"]
    assert (parent / "python_env_used" / "file").is_dir()
