"""What Triton loads; the model itself is in the package."""

from inflight_backend.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
