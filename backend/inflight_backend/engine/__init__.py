"""The paged-attention engine: a checkpoint folder in, plans in, tokens out.

Imports torch, numpy and safetensors only; nothing here knows of Triton, requests or texts.
"""

from inflight_backend.engine.config import EngineConfig
from inflight_backend.engine.engine import Engine
from inflight_backend.engine.model_config import ModelConfig

__all__ = ["Engine", "EngineConfig", "ModelConfig"]
