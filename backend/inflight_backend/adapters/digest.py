"""Digests of weights: equal adapters have equal ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SIZE = 16


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Of tensors with their names, shapes and dtypes."""
    digest = hashlib.blake2b(digest_size=_SIZE)
    for name, tensor in tensors:
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def digest_of_arrays(*arrays: npt.NDArray[np.generic]) -> bytes:
    """The same of arrays as a client sends them."""
    digest = hashlib.blake2b(digest_size=_SIZE)
    for array in arrays:
        digest.update(f"{list(array.shape)} {array.dtype} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
