"""A CUDA device where there is none: engines take it for one, and their tensors stay on the CPU.

While an engine runs (`Engine.load`, `submit` and what these call, on any thread) every tensor knows
where it would lie: on the device, in page-locked or in other memory of the host. So all branches of
the engine for a device run, with the kernels interpreted and `Rerun` for graphs. A step fails that
mixes tensors of device and host, that waits for the device (a number that is read, a shape that
depends on numbers, a copy from or to pageable memory), or that writes to page-locked memory while a
copy may still read it. Copies to the host arrive when an event behind them has been waited for.

It cannot show anything of compiled kernels, of real graphs (memory that is reused between them), of
streams, indices out of bounds, what third-party code beside torch does, and bytes: the numbers for
memory are invented. Where there is a GPU nothing is faked: the tests then run on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.graph_replay import Rerun
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import InterpretedFunction

from inflight_backend.engine import Engine
from inflight_backend.engine import engine as engine_module

on_both_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", id="fake-cuda")], indirect=True
)
"""Run a test of the engine on the CPU and on the device of this file."""

FREE_BYTES, STEP_BYTES, RESERVED_BYTES = 2**26, 2**20, 3 * 2**20
"""Invented: of the device, of the largest step, and what is reported as in use."""

_DEVICE, _PINNED, _PAGEABLE = "device", "page-locked memory", "pageable memory"
_READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
_HAS_UNKNOWN_SHAPE = {"nonzero", "masked_select", "unique"}
_VIEWS = {"__getitem__", "view", "narrow", "reshape", "split", "unbind", "detach"}
_NONSENSE = -123_456


class FakeCuda:
    """The device. Engines of one device may be used by one test after the other."""

    def __init__(self) -> None:
        self._running = threading.local()
        self._to_host: list[_Download] = []
        self._from_host: list[_Upload] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Be there until ``patch`` is undone."""
        self._to_host, self._from_host = [], []
        calls = {"__init__": False, "memory_usage": False, "enqueue": True, "submit": True}
        for name, is_step in calls.items():
            patch.setattr(Engine, name, self.inside(getattr(Engine, name), is_step))
        load = Engine.load.__func__  # type: ignore[attr-defined]
        patch.setattr(Engine, "load", classmethod(self.inside(load, False)))
        patch.setattr(engine_module, "CudaCapture", Rerun)
        # The others are for the compiler, and interpreted they take seconds (test_warmup.py).
        patch.setattr(engine_module, "warm_up", Engine.enqueue)
        patch.setattr(InterpretedFunction, "run", _without_mode(InterpretedFunction.run))
        numbers = {
            "mem_get_info": (FREE_BYTES, 2 * FREE_BYTES),
            "memory_reserved": 0,
            "max_memory_reserved": STEP_BYTES,
            "memory_stats_as_nested_dict": {"reserved_bytes": {"all": {"current": RESERVED_BYTES}}},
            "get_device_name": "Fake GPU",
            "get_device_properties": SimpleNamespace(multi_processor_count=132),
            "get_device_capability": (9, 0),
            "current_stream": SimpleNamespace(cuda_stream=0),
            "empty_cache": None,
            "reset_peak_memory_stats": None,
        }
        for name, value in numbers.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value: value)
        patch.setattr(torch.cuda, "is_available", lambda: self._is_running)
        patch.setattr(torch.cuda, "Event", partial(_Event, self))
        patch.setattr(torch.cuda, "synchronize", lambda: self.wait_for(*self.copies()))

    def copies(self) -> tuple[list[_Download], list[_Upload]]:
        """All that were asked for and not waited for."""
        return list(self._to_host), list(self._from_host)

    def wait_for(self, to_host: Sequence[_Download], from_host: Sequence[_Upload]) -> None:
        """These copies have ended."""
        for download in [each for each in self._to_host if each in to_host]:
            download.arrive()
            self._to_host.remove(download)
        self._check_sources()
        self._from_host = [each for each in self._from_host if each not in from_host]

    def send(self, source: Tensor) -> None:
        """A copy from page-locked memory that may go on reading it."""
        self._check_sources()
        self._from_host.append(_Upload(source))

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """A copy to page-locked memory that arrives later."""
        self._to_host.append(_Download(target, source))

    def _check_sources(self) -> None:
        for upload in self._from_host:
            assert upload.is_as_it_was, "page-locked memory was changed while a copy may read it"

    @property
    def _is_running(self) -> bool:
        return getattr(self._running, "is_inside", False)

    def inside(self, function: Callable[..., Any], is_step: bool) -> Callable[..., Any]:
        """``function`` as it runs where the device is."""

        @wraps(function)
        def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return function(engine, *args, **kwargs)
            # On a device attention in torch is an oracle, which may take its time.
            may_wait = not is_step or engine.config.attention_backend == "torch"
            self._running.is_inside = True
            try:
                with _Places(self, may_wait=may_wait):
                    return function(engine, *args, **kwargs)
            finally:
                self._running.is_inside = False

        return run


class _Download:
    """Numbers on their way to ``target``, where nonsense lies until they arrive."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._numbers = target, source.clone()
        target.fill_(_NONSENSE)

    @torch.inference_mode()
    def arrive(self) -> None:
        self._target.copy_(self._numbers)


class _Upload:
    """Numbers that are read from ``source`` for a while."""

    def __init__(self, source: Tensor) -> None:
        self._source, self._numbers = source, source.clone()

    @property
    def is_as_it_was(self) -> bool:
        return torch.equal(self._source, self._numbers)


class _Event:
    """``torch.cuda.Event``: stands behind the copies that were asked for before it."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self._behind: tuple[list[_Download], list[_Upload]] = ([], [])

    def record(self) -> None:
        self._behind = self._device.copies()

    def synchronize(self) -> None:
        self._device.wait_for(*self._behind)


class _Places(TorchFunctionMode):
    """Sees every call of torch, and where its tensors would lie."""

    def __init__(self, device: FakeCuda, *, may_wait: bool) -> None:
        super().__init__()
        self._device = device
        self._may_wait = may_wait  # while an engine is made

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        tensors = list(_tensors((args, kwargs)))
        places = {_place(tensor) for tensor in tensors if tensor.dim()}
        if name in _ANSWERS:
            return _ANSWERS[name](args[0], func, args)
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if name == "pin_memory":
            return _put(args[0].clone(), _PINNED)
        if name == "to" and (moved := self._move(args, kwargs)) is not None:
            return moved
        is_on_device = any(_place(tensor) == _DEVICE for tensor in tensors)
        if is_on_device:
            assert len(places) < 2, f"{name} of tensors on the device and on the host"
            self._check_wait(name, args, kwargs)
        place = _PINNED if kwargs.pop("pin_memory", False) else _PAGEABLE
        if name in _VIEWS:
            place = _place(args[0])
        if _is_cuda(kwargs.get("device", "cuda" if is_on_device else "cpu")):
            place = _DEVICE
            if name in ("tensor", "as_tensor"):
                self._wait(f"{name} of numbers of the host")
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return _put(func(*args, **kwargs), place)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        way = (_place(source), _place(target))
        if _DEVICE not in way or way == (_DEVICE, _DEVICE):
            return target.copy_(source)
        if not (non_blocking and _PINNED in way):
            self._wait(f"a copy from {way[0]} to {way[1]}")
            return target.copy_(source)
        if way[0] == _PINNED:
            self._device.send(source)
            return target.copy_(source)
        self._device.fetch(target, source)
        return target

    def _move(self, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """``tensor.to(device)`` where that is another one; None for all else that ``to`` does."""
        source: Tensor = args[0]
        asked = kwargs.get("device", args[1] if len(args) > 1 else None)
        if not isinstance(asked, str | torch.device):
            return None
        to = _DEVICE if _is_cuda(asked) else _PAGEABLE
        place = _place(source)
        if (place == _DEVICE) != (to == _DEVICE):
            if place == _PINNED and kwargs.get("non_blocking"):
                self._device.send(source)
            else:
                self._wait(f"a copy from {place} to {to}")
        else:
            to = place
        dtype = kwargs.get("dtype", source.dtype)
        moved: Tensor = _put(source.to(dtype=dtype, copy=to != place), to)
        return moved

    def _check_wait(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse what needs a number of the device on the host."""
        if name in _READS | _HAS_UNKNOWN_SHAPE:
            self._wait(name)
        if name == "repeat_interleave" and "output_size" not in kwargs:
            self._wait(f"{name} without output_size")
        if name in ("__getitem__", "__setitem__"):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(index, list) for index in indices):
                self._wait(f"{name} with a list, which is copied from {_PAGEABLE},")
            if any(index.dtype == torch.bool for index in _tensors(indices)):
                self._wait(f"{name} with a mask")
            if name == "__setitem__" and list(_tensors(indices)) and not _is_on_device(args[2]):
                self._wait(f"{name} at a tensor copies a number of the host, and")  # inside torch

    def _wait(self, what: str) -> None:
        assert self._may_wait, f"{what} waits for the device"


def _without_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter of kernels reads the device's memory: that is what a device would do."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _place(tensor: Tensor) -> str:
    place: str = getattr(tensor, "_fake_cuda_place", _PAGEABLE)
    return place


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and _place(value) == _DEVICE


def _put(result: Any, place: str) -> Any:
    if place != _PAGEABLE:
        for tensor in _tensors(result):
            tensor._fake_cuda_place = place  # type: ignore[attr-defined]
    return result


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda")


def _device_of(tensor: Tensor, func: Any, args: Any) -> torch.device:
    return torch.device("cuda") if _place(tensor) == _DEVICE else func(*args)


_ANSWERS: dict[str, Callable[[Tensor, Any, Any], Any]] = {
    "device": _device_of,
    "is_cuda": lambda tensor, *_: _place(tensor) == _DEVICE,
    "is_pinned": lambda tensor, *_: _place(tensor) == _PINNED,
}
