"""The files of a checkpoint folder: every one that is read is found here.

What people give instead of one (a name on the Hub, its cache, a single file) is an error that says
what to give.

Links: a file may be a link inside the folder, and, as hub caches lay out a snapshot
(``models--*/snapshots/<revision>``), a link into the ``blobs`` folder beside ``snapshots``. Any
other link that leaves the folder is refused, so a checkpoint cannot make us read foreign files, nor
tell clients what is in them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from inflight_backend.errors import CheckpointError

_DOWNLOAD = "hf download NAME --local-dir FOLDER"
_LFS_POINTER = b"version https://git-lfs"


def find_file(folder: Path, name: str) -> Path | None:
    """The path of the file ``name`` in ``folder``; None if it has no such file.

    `CheckpointError` for a link that leaves the folder or leads nowhere.
    """
    path = folder / name
    if not path.is_symlink() and not path.is_file():
        return None
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # nothing there, or a circle
        raise CheckpointError(f"{name}: no such file{_hint_of_link(path)}") from None
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise CheckpointError(f"{name}: is a link that leaves the checkpoint folder")
    return path if target.is_file() else None


def is_lfs_pointer(path: Path) -> bool:
    """True for what a clone without Git LFS has in the place of a large file."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    return False


def find_config(folder: Path) -> Path:
    """The path of config.json; `CheckpointError` says what to give if ``folder`` has none."""
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; give the checkpoint folder it is in")
    if not folder.is_dir():
        raise CheckpointError(
            f"the model folder {folder} does not exist; nothing is fetched by name: {_DOWNLOAD}"
        )
    path = find_file(folder, "config.json")
    if path is None:
        raise CheckpointError(f"{folder} has no config.json: {_hint_of_folder(folder)}")
    return path


def _hint_of_folder(folder: Path) -> str:
    snapshot = next(folder.glob("snapshots/*/config.json"), None)
    if snapshot is not None:
        return f"give {snapshot.parent}"
    if (folder / "adapter_config.json").is_file():
        return "it is an adapter (LoRA), which is not supported; merge it into its model"
    return "it is not a Hugging Face checkpoint"


def _hint_of_link(path: Path) -> str:
    """A snapshot of the Hub's cache that was copied or mounted by itself is links to nothing."""
    if not path.is_symlink() or "blobs" not in path.readlink().parts:
        return ""
    return f" behind this link into the Hub's cache; give a folder with the files: {_DOWNLOAD}"
