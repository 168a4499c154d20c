"""The server side: GptManager, the paged-attention engine and the Triton face."""

from inflight_backend.gpt_manager import GptManager
from inflight_backend.inference_request import InferenceRequest, NamedTensor
from inflight_backend.optional_params import KvCacheConfig, TrtGptModelOptionalParams
from inflight_scheduler import CapacitySchedulerPolicy, TrtGptModelType

__all__ = [
    "CapacitySchedulerPolicy",
    "GptManager",
    "InferenceRequest",
    "KvCacheConfig",
    "NamedTensor",
    "TrtGptModelOptionalParams",
    "TrtGptModelType",
]
