"""The memory of all KV blocks, and what its size depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.config import DeltaConfig, state_shapes


def allocator_bytes() -> int:
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


CopyBlocks: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Source and destination [num_layers, num_blocks, ...], and the ids of pairs of blocks: see
`inflight_kernels.ops.copy_blocks`."""


class RecurrentStates:
    """What layers with a recurrence know of the text of each slot, and of the padding slot: the
    last inputs of the convolution [num_slots + 1, channels, conv_size - 1], and a matrix for each
    head [num_slots + 1, heads, key_dim, value_dim] float32."""

    def __init__(
        self, deltas: Mapping[int, DeltaConfig], num_slots: int, dtype: torch.dtype, device: str
    ) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for index, delta in deltas.items():
            try:
                self._layers[index] = tuple(  # type: ignore[assignment]
                    torch.zeros((num_slots + 1, *shape), dtype=kind, device=device)
                    for shape, kind in zip(state_shapes(delta), (dtype, torch.float32), strict=True)
                )
            except (RuntimeError, MemoryError):
                raise ConfigurationError(
                    f"no memory on {device} for the states of {num_slots} slots; lower "
                    "max_batch_size"
                ) from None

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs of the convolution, and matrices, of a layer."""
        return self._layers[index]

    def move(self, slots: Tensor, parents: Tensor) -> None:
        """``slots`` [n] get what ``parents`` [n] know; all are read before any is written."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[slots] = tensor[parents]


class KvPool:
    """Keys and values of all layers: for the layers of one shape one tensor [num_layers, 2 (1 where
    the keys are the values), num_blocks, tokens_per_block, num_kv_heads, head_dim].

    It starts as zeros, and engines keep NaN out of blocks they hand on (`clean`).
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int] | int],
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: str,
        copy_blocks: CopyBlocks | None = None,
    ) -> None:
        """``shapes``: (tensors, num_kv_heads, head_dim) of each layer, or the number of an earlier
        layer whose memory it reads. Blocks are copied by
        ``copy_blocks``; None: by torch, which takes tens of launches where a tensor has more than
        2^31 numbers."""
        self._copy_blocks = copy_blocks
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._tensors: list[Tensor] = []
        self._layers: list[tuple[Tensor, Tensor]] = [None] * len(shapes)  # type: ignore[list-item]
        self.dtype, self.device = dtype, torch.device(device)
        for shape in dict.fromkeys(each for each in shapes if not isinstance(each, int)):
            if shape[0] == 0:  # layers that keep no tokens
                continue
            layers = [index for index, each in enumerate(shapes) if each == shape]
            size = (len(layers), shape[0], num_blocks, tokens_per_block, *shape[1:])
            try:
                memory = torch.zeros(size, dtype=dtype, device=device)
            except (RuntimeError, MemoryError):
                raise ConfigurationError(
                    f"no memory on {device} for {num_blocks} KV blocks; "
                    "lower max_tokens_in_paged_kv_cache"
                ) from None
            self._tensors.append(memory)
            for index, layer in zip(layers, memory, strict=True):
                self._layers[index] = (layer[0], layer[-1])
        for index, source in enumerate(shapes):
            if isinstance(source, int):
                self._layers[index] = self._layers[source]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [num_blocks, tokens_per_block, KVH, head_dim]."""
        return self._layers[index]

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Blocks ``destinations`` [n] int32 get what ``sources`` [n] hold; all are read before any
        is written."""
        for tensor in self._tensors:
            # FP8 travels as bytes: torch has few operations on it.
            memory = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            if self._copy_blocks is None:
                memory.index_copy_(2, destinations.long(), memory.index_select(2, sources.long()))
                continue
            memory = memory.flatten(0, 1)
            staging = memory.new_empty((len(memory), len(sources), *memory.shape[2:]))
            places = torch.arange(len(sources), dtype=sources.dtype, device=sources.device)
            self._copy_blocks(memory, staging, sources, places)
            self._copy_blocks(staging, memory, places, destinations)

    def clean(self, block_ids: Sequence[int]) -> None:
        """Replace NaN and infinities in these blocks by numbers; all else stays."""
        if block_ids:
            for memory in self._tensors:
                ids = torch.tensor(block_ids, device=memory.device)
                blocks = memory.index_select(2, ids)
                memory.index_copy_(2, ids, blocks.nan_to_num_())
