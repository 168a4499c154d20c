"""Runs compiled functions on the threads that torch has, all at once.

Torch's operators run on GNU OpenMP's threads, which spin for a moment between two of them. Other
threads beside them would share the cores with that spinning; so a kernel here is a C function that
is handed to the same library: ``GOMP_parallel`` calls it on every thread, and each takes the next
piece of work from a counter that all share. A thread that is late then takes less.

What follows from one kernel's answer can run without all of that in between: see `program`.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


@cache
def is_available() -> bool:
    """True if kernels can be compiled and run here."""
    return (
        platform.machine() == "x86_64" and find_spec("numba") is not None and parallel() is not None
    )


@cache
def parallel() -> Any:
    """``GOMP_parallel`` of the OpenMP library that torch has loaded; None if it is another one."""
    folder = Path(torch.__file__).parent
    for file in (*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")):
        try:
            function = ctypes.CDLL(str(file)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        return function
    return None


@cache
def _cache_folder() -> Path | None:
    """Where compiled functions are kept, by the sources of this package; None where nobody but this
    user may be kept from writing."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()[:16]
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "inflight" / f"cpu-kernels-{digest}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return None
    return folder if found.st_uid == os.getuid() and not found.st_mode & 0o022 else None


def compile_function(function: Callable[[Any], int]) -> Any:
    """Compiled, or read from the cache. It is one of a module: a closure would have another name
    in the cache in each process."""
    import numba

    folder = _cache_folder()
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
    decorate = numba.cfunc(numba.types.int64(numba.types.voidptr), cache=folder is not None)
    with _without_garbage_collection():  # a tenth of the time, and for nothing
        return decorate(function)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Kernel:
    """A compiled function of one pointer, to numbers of 64 bits: the first two count the pieces of
    work that are taken and those that are done, behind them are those that the kernel is called
    with. It returns the number of pieces."""

    __slots__ = ("_call", "_local", "_sizes", "address")

    def __init__(
        self, function: Callable[[Any], int], num_integers: int, num_floats: int = 0
    ) -> None:
        """``function``: see `compile_function`."""
        compiled = compile_function(function)
        self.address: int = compiled.address
        self._call: Callable[[int], None] = compiled.ctypes
        self._sizes = (2 + num_integers, num_floats)
        self._local = threading.local()  # threads may run steps beside one another

    def __call__(
        self, *integers: int, floats: tuple[float, ...] = (), is_small: bool = False
    ) -> None:
        """Run it on all threads, or on this one alone."""
        try:
            pointer, own_integers, own_floats = self._local.numbers
        except AttributeError:
            pointer, own_integers, own_floats = self._local.numbers = self._allocate()
        own_integers[:] = (0, 0, *integers)
        if floats:
            own_floats[:] = floats
        if is_small:
            self._call(pointer)
        else:
            parallel()(self.address, pointer, torch.get_num_threads(), 0)

    def _allocate(self) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        num_integers, num_floats = self._sizes
        numbers = np.zeros(num_integers + num_floats, dtype=np.int64)
        floats = numbers[num_integers:].view(np.float64)
        return numbers.ctypes.data, numbers[:num_integers], floats


class Stage(NamedTuple):
    """A kernel and what it is called with. The first of the integers is the number of rows."""

    kernel: Kernel
    integers: tuple[int, ...]
    floats: tuple[float, ...] = ()

    def run(self, *, is_small: bool = False) -> None:
        """Alone: see `Kernel.__call__`."""
        self.kernel(*self.integers, floats=self.floats, is_small=is_small)
