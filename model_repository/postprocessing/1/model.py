"""What Triton loads; the model itself is in the package."""

from inflight_backend.triton_models.postprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
