"""Copy cache blocks: copy-on-write inside a cache, and gathering or scattering for a pause.

    destination[l, destination_blocks[i]] = source[l, source_blocks[i]]       for every layer l

Source and destination are the caches of all layers, [num_layers, num_blocks, ...], or one of them
a staging buffer of that shape; they may be one tensor. Pairs with a negative id are skipped, so a
captured graph can hold a fixed number of pairs. All copies happen at once, in no order: a block
that is written must be neither read nor written by another pair of the same call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_BLOCK = 2048
# Copied as integers of the same size: no dtype is refused and no number changed.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize_on_alignment=["destination_blocks_ptr", "source_blocks_ptr"])
def _copy_blocks_kernel(
    destination_ptr,
    source_ptr,
    destination_blocks_ptr,  # [num_pairs]
    source_blocks_ptr,  # [num_pairs]
    stride_destination_layer: tl.int64,  # whatever their size: one compiled kernel for any pool
    stride_destination_block: tl.int64,
    stride_source_layer: tl.int64,
    stride_source_block: tl.int64,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    to = tl.load(destination_blocks_ptr + pair).to(tl.int64)
    origin = tl.load(source_blocks_ptr + pair).to(tl.int64)
    if (to < 0) | (origin < 0):
        return
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    source_ptr += layer * stride_source_layer + origin * stride_source_block
    destination_ptr += layer * stride_destination_layer + to * stride_destination_block
    tl.store(destination_ptr + offs, tl.load(source_ptr + offs, mask=mask), mask=mask)


def copy_blocks(
    source: torch.Tensor,  # [num_layers, num_source_blocks, ...], each block contiguous
    destination: torch.Tensor,  # [num_layers, num_destination_blocks, ...], same dtype
    source_blocks: torch.Tensor,  # [num_pairs] int32 or int64; negative: skip
    destination_blocks: torch.Tensor,  # [num_pairs], same dtype
) -> None:
    """Copy pairs of blocks in every layer. Ids are not checked against the number of blocks: they
    live on the device. Raises ValueError naming the argument that does not fit."""
    _check(source, destination, source_blocks, destination_blocks)
    num_layers, num_pairs = source.shape[0], source_blocks.shape[0]
    size = source[:1, :1].numel()
    if num_layers == 0 or num_pairs == 0 or size == 0:
        return
    bits = _BITS[source.element_size()]
    _copy_blocks_kernel[(launch.cdiv(size, _BLOCK), num_pairs, num_layers)](
        destination.view(bits),
        source.view(bits),
        destination_blocks,
        source_blocks,
        destination.stride(0),
        destination.stride(1),
        source.stride(0),
        source.stride(1),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch.LAUNCH_OPTIONS,
    )


def _check(
    source: torch.Tensor,
    destination: torch.Tensor,
    source_blocks: torch.Tensor,
    destination_blocks: torch.Tensor,
) -> None:
    """Raise ValueError, naming the argument, unless all fit one another."""
    if source.dim() < 3:
        raise ValueError(f"source: shape must be [*, *, ...], got {list(source.shape)}")
    num_layers, _, *sizes = source.shape
    dtypes = (*launch.CACHE_DTYPES, torch.uint8)
    shape: tuple[int | str, ...] = (num_layers, "B", *sizes)
    other_shape: tuple[int | str, ...] = (num_layers, "D", *sizes)
    launch.check_arguments(
        Argument("source", source, shape, dtypes, _check_blocks),
        Argument("destination", destination, other_shape, (source.dtype,), _check_blocks),
        Argument("source_blocks", source_blocks, ("P",), (torch.int32, torch.int64)),
        Argument("destination_blocks", destination_blocks, ("P",), (source_blocks.dtype,)),
    )


def _check_blocks(name: str, cache: torch.Tensor) -> None:
    if not cache[:1, :1].flatten(0, 1).is_contiguous():
        raise ValueError(f"{name}: each block must be contiguous")
