"""The files of a checkpoint folder: every one that is read is found here.

Links: a file may be a link inside the folder, and, as hub caches lay out a snapshot
(``models--*/snapshots/<revision>``), a link into the ``blobs`` folder beside ``snapshots``. Any
other link that leaves the folder is refused, so a checkpoint cannot make us read foreign files, nor
tell clients what is in them.
"""

from __future__ import annotations

from pathlib import Path

from inflight_backend.errors import CheckpointError


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
        raise CheckpointError(f"{name}: no such file") from None
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise CheckpointError(f"{name}: is a link that leaves the checkpoint folder")
    return path if target.is_file() else None
