"""The folder of compiled kernels: what lies in it is run, so nobody else may write there. Importing
this needs triton."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from triton import knobs

from inflight_backend.errors import ConfigurationError

_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_kernel_cache() -> None:
    """Make the folder private where it is not there yet; `ConfigurationError` if others may write
    to it, or it is somebody else's. The interpreter compiles nothing."""
    if knobs.runtime.interpret:
        return
    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(_PRIVATE, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(
            f"the folder of compiled kernels {folder} cannot be used ({error.strerror}); name "
            "another one in TRITON_CACHE_DIR"
        ) from None
    if status.st_mode & _OTHERS_WRITE or status.st_uid not in (os.getuid(), 0):
        raise ConfigurationError(
            f"others can write to the folder of compiled kernels {folder}, and what lies there is "
            "run: make it private (chmod 700), or name another one in TRITON_CACHE_DIR"
        )
