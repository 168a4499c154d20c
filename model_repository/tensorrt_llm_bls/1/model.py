"""What Triton loads; the model itself is in the package."""

from inflight_backend.triton_models.bls import TritonPythonModel

__all__ = ["TritonPythonModel"]
