"""Makes input tensors from plain values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import inflight_protocol as protocol


def make_inputs(values: dict[str, object]) -> dict[str, npt.NDArray[np.generic]]:
    """Turn plain values into input tensors with the batch dimension, keyed by name.

    A scalar becomes ``[1, 1]``, a list ``[1, n]``, strings become bytes. ``KeyError`` for a name
    that is not an input.
    """
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    for name, value in values.items():
        spec = protocol.INPUT_BY_NAME[name]
        if spec.dtype == "STRING":
            items = value if isinstance(value, list | tuple) else [value]
            encoded = [item.encode() if isinstance(item, str) else item for item in items]
            tensors[name] = np.array([encoded], dtype=np.object_).reshape(1, -1)
            continue
        array = np.asarray(value, dtype=protocol.DTYPE_TO_NUMPY[spec.dtype])
        tensors[name] = array.reshape((1, -1) if array.ndim < 2 else (1, *array.shape))
    return tensors
