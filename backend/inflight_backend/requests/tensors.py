"""Small numpy tensors of a response.

They are made for every token of every stream, nearly always one number, and an empty array that is
filled takes half the time of `numpy.array`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_scheduler import FinishReason

INT32 = np.dtype(np.int32)  # numpy takes a type's name in place of its dtype, but slowly
INT64 = np.dtype(np.int64)
FLOAT32 = np.dtype(np.float32)
OBJECT = np.dtype(np.object_)


def scalar(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """[[value]]."""
    tensor = np.empty((1, 1), dtype)
    tensor[0, 0] = value
    return tensor


def row(values: Sequence[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """[[values]]: of one beam, one for each token."""
    if len(values) != 1:
        return np.array(values, dtype)[None, None]
    tensor = np.empty((1, 1, 1), dtype)
    tensor[0, 0, 0] = values[0]
    return tensor


@lru_cache
def finish_reason_tensor(reason: FinishReason) -> npt.NDArray[np.object_]:
    """[[reason]] in lower case; read-only."""
    tensor = scalar(reason.name.lower().encode(), OBJECT)
    tensor.flags.writeable = False
    return tensor


@lru_cache(maxsize=64)
def length_tensor(length: int) -> npt.NDArray[np.int32]:
    """[[length]], made once: a stream sends the same one with every token."""
    tensor = scalar(length, INT32)
    tensor.flags.writeable = False
    return tensor
