"""Small tensors of the host on their way to the device, in the middle of a step."""

from __future__ import annotations

from torch import Tensor


def to_device(values: Tensor, device: str) -> Tensor:
    """``values``, which lie on the host, on ``device``; nobody waits.

    On CUDA they go through page-locked memory: a copy of other memory waits for everything that was
    asked of the device before. On a CPU they are the tensor itself.
    """
    if device == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
