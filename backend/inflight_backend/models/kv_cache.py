"""The memory of all KV blocks, and what its size depends on."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Protocol, TypeAlias

import psutil
import torch
from torch import Tensor

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.config import CacheLayout, DeltaConfig, state_shapes
from inflight_scheduler import ScheduledBatch


def allocator_bytes() -> int:
    """What torch holds of the current CUDA device, for every iteration. (`memory_reserved` sorts a
    table of all of torch's numbers first: some 50 us of Python, more than a step is planned in.)"""
    numbers = torch.cuda.memory_stats_as_nested_dict()
    return int(numbers["reserved_bytes"]["all"]["current"])


_RESIDENT_SECONDS = 0.2


class ResidentMemory:
    """Resident memory of this process, for every iteration."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._num_bytes = 0
        self._read_again_at = -math.inf

    def num_bytes(self) -> int:
        """As of the last 0.2 s: the kernel takes some 30 us to tell it."""
        if (now := time.monotonic()) >= self._read_again_at:
            self._read_again_at = now + _RESIDENT_SECONDS
            self._num_bytes = self._process.memory_info().rss
        return self._num_bytes


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


_FP8_NAN = 0x7F  # of e4m3fn, beside a sign
CopyBlocks: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Source and destination [num_layers, num_blocks, ...], and the ids of pairs of blocks: see
`inflight_kernels.ops.attention.copy_blocks`."""


class RecurrentStates:
    """What layers with a recurrence know of the text of each slot, and of the padding slot: the
    last inputs of the convolution [num_rows, channels, conv_size - 1], and a matrix for each
    head [num_rows, heads, key_dim, value_dim] float32. Behind the rows of the slots are those of
    the snapshots (`StateSnapshots`).
    """

    def __init__(
        self,
        deltas: Mapping[int, DeltaConfig],
        num_slots: int,
        dtype: torch.dtype,
        device: str,
        num_snapshots: int = 0,
    ) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._first_snapshot = num_slots + 1
        num_rows = num_slots + 1 + num_snapshots
        for index, delta in deltas.items():
            try:
                self._layers[index] = tuple(  # type: ignore[assignment]
                    torch.zeros((num_rows, *shape), dtype=kind, device=device)
                    for shape, kind in zip(state_shapes(delta), (dtype, torch.float32), strict=True)
                )
            except (RuntimeError, MemoryError):
                raise ConfigurationError(
                    f"no memory on {device} for the states of {num_slots} slots and "
                    f"{num_snapshots} snapshots; lower max_batch_size or max_state_snapshots"
                ) from None
        self._cuts: Sequence[Sequence[tuple[int, int]]] = ()

    def begin(self, batch: ScheduledBatch) -> None:
        """Copy what ``batch`` has restored and saved before it runs; its chunks are next."""
        pairs = [(self._first_snapshot + each.snapshot, each.slot) for each in batch.restored]
        pairs += [(each.slot, self._first_snapshot + each.snapshot) for each in batch.saved]
        for source, destination in pairs:
            for tensors in self._layers.values():
                for tensor in tensors:
                    tensor[destination].copy_(tensor[source])
        self._cuts = [
            [
                (num_tokens - run.start, self._first_snapshot + snapshot)
                for num_tokens, snapshot in run.snapshots
            ]
            for run in batch.runs
        ]

    def cuts(self, chunk: int) -> Sequence[tuple[int, int]]:
        """After how many of its tokens the state of the slot of this chunk is put into which row,
        in ascending order."""
        return self._cuts[chunk] if self._cuts else ()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs of the convolution, and matrices, of a layer."""
        return self._layers[index]

    def move(self, slots: Tensor, parents: Tensor) -> None:
        """``slots`` [n] get what ``parents`` [n] know; all are read before any is written."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[slots] = tensor[parents]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """On a CPU the system gives pages as they are first written: clearing gigabytes would take more
    of a start than the weights of a small model."""
    num_bytes = prod(shape) * dtype.itemsize
    if device != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class KvPool:
    """Keys and values of all layers, in the regions of a `CacheLayout`: for the regions of one size
    one tensor [num_regions, num_blocks, tokens_per_block, size].

    It starts as zeros, and engines keep NaN out of blocks they hand on (`clean`).
    """

    def __init__(
        self,
        layout: CacheLayout,
        heads: Sequence[tuple[int, int]],
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: str,
        copy_blocks: CopyBlocks | None = None,
    ) -> None:
        """``heads``: (num_kv_heads, head_dim) of each layer. Blocks are copied by
        ``copy_blocks``; None: by torch, which takes tens of launches where a tensor has more than
        2^31 numbers."""
        self.layout = layout
        self._copy_blocks = copy_blocks
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._tensors: list[Tensor] = []
        self.dtype, self.device = dtype, torch.device(device)
        sizes, regions = layout.region_sizes, dict[int, Tensor]()
        for size in dict.fromkeys(sizes):
            shape = (sizes.count(size), num_blocks, tokens_per_block, size)
            try:
                memory = _zeros(shape, dtype, device)
            except (RuntimeError, MemoryError, OSError):
                raise ConfigurationError(
                    f"no memory on {device} for {num_blocks} KV blocks; "
                    "lower max_tokens_in_paged_kv_cache"
                ) from None
            self._tensors.append(memory)
            own = [number for number, each in enumerate(sizes) if each == size]
            regions |= zip(own, memory, strict=True)
        self._layers = [
            [
                torch.unflatten(regions[region][..., column : column + prod(shape)], -1, shape)
                for region, column in places
            ]
            for places, shape in zip(layout.places, heads, strict=True)
        ]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [num_blocks, tokens_per_block, KVH, head_dim]."""
        keys, values = self._layers[index]
        return keys, values

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Blocks ``destinations`` [n] int32 get what ``sources`` [n] hold; all are read before any
        is written."""
        for tensor in self._tensors:
            # FP8 travels as bytes: torch has few operations on it.
            memory = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            if self._copy_blocks is None:
                memory.index_copy_(1, destinations.long(), memory.index_select(1, sources.long()))
                continue
            staging = memory.new_empty((len(memory), len(sources), *memory.shape[2:]))
            places = torch.arange(len(sources), dtype=sources.dtype, device=sources.device)
            self._copy_blocks(memory, staging, sources, places)
            self._copy_blocks(staging, memory, places, destinations)

    def clean(self, block_ids: Sequence[int]) -> None:
        """Replace NaN and infinities in these blocks by numbers; all else stays."""
        if block_ids:
            for memory in self._tensors:
                ids = torch.tensor(block_ids, device=memory.device)
                if memory.dtype == torch.int8:  # has none
                    continue
                if memory.dtype == torch.float8_e4m3fn:
                    blocks = memory.view(torch.uint8).index_select(1, ids)
                    blocks.masked_fill_(blocks & _FP8_NAN == _FP8_NAN, 0)
                    memory.view(torch.uint8).index_copy_(1, ids, blocks)
                    continue
                blocks = memory.index_select(1, ids)
                memory.index_copy_(1, ids, blocks.nan_to_num_())
