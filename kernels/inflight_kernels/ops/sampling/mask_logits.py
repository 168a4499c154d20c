"""Forbids the tokens a grammar does not allow, in place, in the rows that have a grammar.

The rule is that of ``reference.mask_logits``. One program per mask and chunk of the vocabulary, so
rows without a mask cost nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_MAX_CHUNK = 4096


@triton.jit(do_not_specialize_on_alignment=["masks_ptr"])
def _mask_logits_kernel(
    logits_ptr,  # [N, V] float32
    masks_ptr,  # [M, 2 + words] int32
    vocabulary,
    stride_logits,
    stride_masks,
    CHUNK: tl.constexpr,
):
    mask_ptr = masks_ptr + tl.program_id(1).to(tl.int64) * stride_masks
    row = tl.load(mask_ptr).to(tl.int64)
    forced = tl.load(mask_ptr + 1)
    offs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_token = offs < vocabulary
    words = tl.load(mask_ptr + 2 + offs // 32, mask=is_token, other=0)
    is_allowed = ((words >> (offs % 32)) & 1) != 0
    x_ptr = logits_ptr + row * stride_logits + offs
    x = tl.load(x_ptr, mask=is_token & is_allowed, other=-float("inf"))
    if forced >= 0:
        x = tl.where(offs == forced, 0.0, -float("inf"))
    tl.store(x_ptr, x, mask=is_token)


def mask_logits(
    logits: torch.Tensor,  # [N, V] float32, changed in place
    masks: torch.Tensor,  # [M, 2 + ceil(V / 32)] int32: row, forced token or -1, bits
) -> None:
    """Keep what the masks allow; see ``reference.mask_logits``.

    Raises ValueError naming the argument that does not fit.
    """
    launch.check_arguments(
        Argument("logits", logits, ("N", "V"), (torch.float32,), launch.check_rows),
        Argument("masks", masks, ("M", "W"), (torch.int32,), launch.check_rows),
    )
    vocabulary = logits.shape[1]
    launch.check_shape("masks", masks, (None, 2 + launch.cdiv(vocabulary, 32)))
    if len(masks) == 0:
        return
    chunk = min(launch.next_power_of_2(vocabulary), _MAX_CHUNK)
    _mask_logits_kernel[(launch.cdiv(vocabulary, chunk), len(masks))](
        logits,
        masks,
        vocabulary,
        logits.stride(0),
        masks.stride(0),
        CHUNK=chunk,
        num_warps=8,
        **launch.LAUNCH_OPTIONS,
    )
