"""Kernels compiled beside one another before they are measured.

A kernel takes one core for seconds, and an engine has some twenty: one after another they would
take a fifth of all the time there is. Here each engine has a process, and one layer, which launches
what forty layers launch; it answers requests with steps of every kind. The kernels of K1 to K3 and
of the tiles are shared out: the rows are made without memory, and of those that need the same
kernel one compiles it. Triton keeps what it compiled in its cache folder, where the parts behind
this one find it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from gpu_parts import kernel_rows
from gpu_parts.common import Row, Setting, make_engine, start_row
from gpu_parts.offline import DRY, RAGGED, engines
from gpu_parts.report import shorten
from gpu_parts.whole_requests import warm_up

_Call = Callable[[], object]


def rows(setting: Setting) -> Iterator[Row]:
    """A row per engine, then one per kernel; a quick run has one engine and the kernels of K1."""
    made = list(engines(setting))
    works: list[str | tuple[str, _Call]] = [*(made[:1] if setting.is_quick else made)]
    works += [] if setting.is_dry else kernel_calls(setting, kernel_rows.timed_ops(setting))
    for work in setting.own(works):
        yield (
            start_engine(setting, work) if isinstance(work, str) else compile_kernel(setting, *work)
        )


def tiles(setting: Setting) -> Iterator[Row]:
    """A row per kernel that the part `tiles` runs; a dry run has no compiler."""
    calls = [] if setting.is_dry else kernel_calls(setting, kernel_rows.TILED_OPS, has_sweep=True)
    for work in setting.own(calls):
        yield compile_kernel(setting, *work)


def quantized(setting: Setting) -> Iterator[Row]:
    """A row per kernel that the parts `K4` and `K4/tiles` run."""
    calls = []
    if not setting.is_dry:
        for has_sweep in (False, True):
            calls += kernel_calls(setting, kernel_rows.QUANTIZED_OPS, has_sweep=has_sweep)
    for work in setting.own(calls):
        yield compile_kernel(setting, *work)


def start_engine(setting: Setting, name: str) -> Row:
    """Start an engine of one layer and have it answer; a fault is a row, and its frames are told in
    the row `stderr`: the kernels behind it can still be compiled."""
    try:
        return _started(setting, name)
    except Exception as error:  # what breaks one must leave the others alone
        traceback.print_exc()
        fault = shorten(f"{type(error).__name__}: {error}", 300)
        return {"model": name, "what": "start", "error": fault}


def _started(setting: Setting, name: str) -> Row:
    start = time.monotonic()
    model, config = engines(setting)[name]
    if not setting.is_dry:
        model = replace(model, layers=model.layers[:1])
        config = replace(config, max_tokens_in_paged_kv_cache=2**16)
    engine = make_engine(setting, model, config)
    work = DRY[-1] if setting.is_dry else RAGGED
    warm_up(engine, *work.draw(engine.vocab_size))
    row = start_row(setting, name, engine, time.monotonic() - start)
    return {**row, "memory": "shared with the others: what it measured of it says nothing"}


def compile_kernel(setting: Setting, op: str, call: _Call) -> Row:
    """Compile what a call launches, without running it."""
    start = time.monotonic()
    try:
        with _compiling_only():
            call()
    except Exception as error:  # the part that would run it says so as well
        return {"op": op, "error": shorten(f"{type(error).__name__}: {error}", 300)}
    return {"op": op, **setting.figures(seconds=time.monotonic() - start)}


def kernel_calls(
    setting: Setting, ops: Iterable[str], *, has_sweep: bool = False
) -> list[tuple[str, _Call]]:
    """(op, call) for every kernel that Triton would compile; in the same order in all processes."""
    without_memory = replace(setting, device=torch.device("meta"))
    calls: list[tuple[str, _Call]] = []
    keys: set[Any] = set()
    with _compiling_only():
        for op in ops:
            rows_ = kernel_rows.made_rows(
                without_memory, op, only_targets=True, has_sweep=has_sweep
            )
            for row in rows_:
                before = len(keys)
                with _noting(keys):
                    row.call()
                if len(keys) > before:
                    calls.append((op, row.call))
    return calls


@contextmanager
def _noting(keys: set[Any]) -> Iterator[None]:
    """Add to ``keys`` what Triton would compile, and have it not compile."""
    from triton import knobs

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        keys.add((fn.name, key))
        return True

    knobs.runtime.jit_cache_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = None


@contextmanager
def _compiling_only() -> Iterator[None]:
    """Compile what is launched, and run nothing: tensors need no memory."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
