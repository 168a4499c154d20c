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


_constants: dict[int, npt.NDArray[Any]] = {}  # by id, and kept, so that none has it after them


def _constant(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    tensor = scalar(value, dtype)
    tensor.flags.writeable = False
    _constants[id(tensor)] = tensor
    return tensor


def is_constant(tensor: npt.NDArray[Any]) -> bool:
    """True for the few read-only tensors of this module that are made once: what is made of one of
    them can be kept, by its id."""
    return id(tensor) in _constants


@lru_cache
def finish_reason_tensor(reason: FinishReason) -> npt.NDArray[np.object_]:
    """[[reason]] in lower case; read-only."""
    return _constant(reason.name.lower().encode(), OBJECT)


_SMALL = [_constant(number, INT32) for number in range(64)]


def number_tensor(number: int) -> npt.NDArray[np.int32]:
    """[[number]], of 0 or more. A stream sends the same length and place with every token: small
    ones are made once."""
    return _SMALL[number] if number < len(_SMALL) else scalar(number, INT32)
