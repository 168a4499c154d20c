"""The row types of the tables of tensors and parameters, and short forms to write rows in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

EMPTY = "empty"
"""Neutral value of a list tensor: no elements."""
ONLY_ZEROS = "only zeros"
"""Neutral value of a list that is zero wherever nothing is asked for; it may be empty."""

DTYPE_TO_NUMPY: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "STRING": np.object_,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model.

    ``dims`` are without the batch dimension. ``is_scalar``: one value per row. ``neutral`` is the
    value that may be sent although the tensor is not honoured; None means that sending it at all is
    refused.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    meaning: str
    is_scalar: bool = False
    is_ragged: bool = False
    is_honoured: bool = True
    neutral: float | int | bool | str | None = None


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One key of the model's ``parameters`` block. ``default`` "" means not set."""

    name: str
    kind: str  # "int" | "float" | "bool" | "choice" | "str"
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    is_honoured: bool = True


def scalar(name: str, dtype: str, meaning: str) -> TensorSpec:
    """One value per row."""
    return TensorSpec(name, dtype, (1,), meaning, is_scalar=True)


def ragged(name: str, dtype: str, dims: tuple[int, ...], meaning: str) -> TensorSpec:
    """A list whose length may differ from request to request."""
    return TensorSpec(name, dtype, dims, meaning, is_ragged=True)


def refused(spec: TensorSpec, neutral: float | int | bool | str | None = None) -> TensorSpec:
    """The row of a tensor that is refused, unless its value is ``neutral``."""
    return replace(spec, is_honoured=False, neutral=neutral)
