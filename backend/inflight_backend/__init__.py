"""The server side: GptManager, the paged-attention engine and the Triton face.

The names below are imported on first use: the command line loads this package for `inflight serve`
and should not wait for numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inflight_backend.guided.compiler import GuidedDecodingConfig
    from inflight_backend.manager.gpt_manager import GptManager
    from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
    from inflight_backend.requests.inference_request import InferenceRequest, NamedTensor
    from inflight_scheduler import CapacitySchedulerPolicy, TrtGptModelType

_NAME_TO_MODULE = {
    "CapacitySchedulerPolicy": "inflight_scheduler",
    "GptManager": "inflight_backend.manager.gpt_manager",
    "GuidedDecodingConfig": "inflight_backend.guided.compiler",
    "InferenceRequest": "inflight_backend.requests.inference_request",
    "KvCacheConfig": "inflight_backend.manager.parameters",
    "NamedTensor": "inflight_backend.requests.inference_request",
    "TrtGptModelOptionalParams": "inflight_backend.manager.parameters",
    "TrtGptModelType": "inflight_scheduler",
}

__all__ = [
    "CapacitySchedulerPolicy",
    "GptManager",
    "GuidedDecodingConfig",
    "InferenceRequest",
    "KvCacheConfig",
    "NamedTensor",
    "TrtGptModelOptionalParams",
    "TrtGptModelType",
]


def __getattr__(name: str) -> object:
    if name not in _NAME_TO_MODULE:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_NAME_TO_MODULE[name]), name)
