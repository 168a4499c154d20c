"""Compiles what the ops launch for a GPU that is not here, and reads what came out.

``record`` calls an op as the engine does, with CPU tensors, under a driver that claims to be the
wanted GPU; every kernel the op would launch is compiled for it with the very arguments, grid and
tile the host side chose, and none is run. ``record_keys`` only asks Triton which of them it would
have to compile. Both need a process in which Triton does not interpret.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from support.machine_code import disassemble, loop_lengths, overwritten_inputs
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from inflight_kernels import launch

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


Report = dict[str, Any]
"""What a gate looks at in one compiled kernel; `_read` names its fields."""


class _AbsentGpu:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels are cached per device: one per capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _pretend(capability: int) -> Iterator[None]:
    driver.set_active(_AbsentGpu(capability))
    launch.capability.cache_clear()
    try:
        yield
    finally:
        launch.capability.cache_clear()


@contextmanager
def record_keys(capability: int) -> Iterator[set[tuple[str, str]]]:
    """Yields the set of what Triton would compile from now on, as (kernel, key). Nothing is
    compiled or run: answers are what their memory was made as."""
    keys: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        keys.add((fn.name, key))
        return True  # do not compile

    with _pretend(capability), mock.patch.object(knobs.runtime, "jit_cache_hook", note):
        yield keys


def record(capability: int, call: Callable[[], object]) -> list[Report]:
    """Compile the kernels that ``call`` launches, in order."""
    launched = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        # What is not asked for changes with the release (`launch.LAUNCH_OPTIONS`).
        assert kwargs.get("enable_fp_fusion"), f"{self.fn.__name__} leaves fusion to the compiler"
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launched.append(kernel)
        return kernel

    with _pretend(capability), mock.patch.object(JITFunction, "run", compile_only):
        call()
    return [_read(kernel, capability) for kernel in launched]


def _read(kernel: Any, capability: int) -> Report:
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [str(_CUOBJDUMP), "--dump-resource-usage", cubin.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        code = disassemble(Path(cubin.name))
    num_inputs, overwritten = overwritten_inputs(code)
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    return {
        "name": kernel.metadata.name,
        "capability": capability,
        "registers": numbers["REG"],  # per thread
        "stack_bytes": numbers["STACK"],  # per thread: spilled registers live here
        "shared_bytes": kernel.metadata.shared + numbers["SHARED"],  # per program
        "num_threads": 32 * kernel.metadata.num_warps,
        "num_instructions": len(re.findall(r";[ \t]*(?://.*)?$", ptx, re.MULTILINE)),
        "num_wgmma": ptx.count("wgmma.mma_async"),
        "num_mma": ptx.count("mma.sync"),
        "num_async_copies_16": len(re.findall(r"cp\.async\.cg\.shared\.global.*, 0x10,", ptx)),
        "num_loads_16": len(re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx)),
        "num_stores_16": len(re.findall(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64", ptx)),
        "num_narrow_copies": len(re.findall(r"cp\.async\.ca\.shared\.global", ptx)),  # 4 or 8 bytes
        "num_byte_reads": len(re.findall(r"ld\.shared\S*\.[bsu]8\b", ptx)),
        # Products of a warp group that read registers, and those that lose what they read.
        "num_register_inputs": num_inputs,
        "overwritten_inputs": overwritten,
        "loop_lengths": loop_lengths(code),
    }
