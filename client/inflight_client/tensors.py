"""Input tensors from plain values, by the table of the wire."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inflight_client import protocol


def make_inputs(values: dict[str, object]) -> dict[str, npt.NDArray[np.generic]]:
    """Turn plain values into input tensors with the batch dimension, keyed by name.

    A scalar becomes ``[1, 1]``, a list ``[1, n]``, a string ``[1, 1]`` of bytes. ``KeyError``
    for a name that is not an input.
    """
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    for name, value in values.items():
        spec = protocol.INPUT_BY_NAME[name]
        if spec.dtype == "STRING":
            encoded = value.encode() if isinstance(value, str) else value
            tensors[name] = np.array([[encoded]], dtype=np.object_)
            continue
        array = np.asarray(value, dtype=protocol.DTYPE_TO_NUMPY[spec.dtype])
        tensors[name] = array.reshape((1, -1) if array.ndim < 2 else (1, *array.shape))
    return tensors
