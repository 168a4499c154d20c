"""Whether a tritonserver can run us: what is known to fail later, or to crash it, said at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from inflight_backend.errors import ConfigurationError

_OWN_STUB = Path("/proc/self/exe")
# Named by pybind11 from 2.12 on, the first one that knows numpy 2 (python_backend#384).
_KNOWS_NUMPY_2 = b"NumpyVersion"
_NEEDED = (
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "InferenceResponse",
    "Logger",
    "MetricFamily.HISTOGRAM",
    "Tensor",
    "TritonError.ALREADY_EXISTS",
    "TritonError.INVALID_ARG",
    "TritonError.UNAVAILABLE",
    "TritonError.UNSUPPORTED",
)


def check_own_stub(pb_utils: Any) -> None:
    """`ConfigurationError` unless the stub of Triton's that we run in can do what we need."""
    for name in _NEEDED:
        owner = pb_utils
        for part in name.split("."):
            owner = getattr(owner, part, None)
        if owner is None:
            raise ConfigurationError(
                f"this tritonserver is too old: its Python backend has no {name}; use 24.10 or "
                "newer"
            )
    check_numpy(np.__version__, _OWN_STUB)


def check_numpy(version: str, stub: Path) -> None:
    """`ConfigurationError` for a numpy that ``stub``, the program of a model process, cannot work
    with."""
    if int(version.split(".")[0]) >= 2 and _KNOWS_NUMPY_2 not in stub.read_bytes():
        raise ConfigurationError(
            f"numpy {version} is too new for this tritonserver: text inputs would crash it; "
            "install a version below 2 with: pip install 'numpy<2'"
        )
