"""How much memory of a GPU is free, and how much a step takes: measured, not estimated."""

from __future__ import annotations

from typing import Protocol

import torch


def reserved_bytes() -> int:
    """What torch holds of the current CUDA device, for every iteration. (`memory_reserved` sorts a
    table of all of torch's numbers first: some 50 us of Python, more than a step is planned in.)"""
    numbers = torch.cuda.memory_stats_as_nested_dict()
    return int(numbers["reserved_bytes"]["all"]["current"])


class DeviceMemory(Protocol):
    """What the size of the KV pool depends on, in bytes."""

    def free_bytes(self) -> int:
        """Free now, with everything given back that is only kept for later."""

    def start_peak(self) -> None:
        """Measure from here."""

    def peak_bytes(self) -> int:
        """The most that was in use since `start_peak`, beyond what was in use then."""


class CudaMemory:
    """The current CUDA device."""

    def __init__(self) -> None:
        self._bytes_before = 0

    def free_bytes(self) -> int:
        """What the driver says, after torch's cache has been emptied."""
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info()
        return int(free_bytes)

    def start_peak(self) -> None:
        """Waits for the device. Measured is what torch takes from it: segments, and the holes that
        steps of different sizes leave in them, not only what tensors hold."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._bytes_before = torch.cuda.memory_reserved()

    def peak_bytes(self) -> int:
        """Waits for the device."""
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_reserved()) - self._bytes_before
