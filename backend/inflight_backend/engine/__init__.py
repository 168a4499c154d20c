"""The paged-attention engine: a checkpoint folder in, plans in, tokens out.

Imports torch, numpy and safetensors only; nothing here knows of Triton, requests or texts. The
names below are imported on first use: what reads only a checkpoint's configuration needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inflight_backend.engine.config import EngineConfig
    from inflight_backend.engine.engine import Engine

_NAME_TO_MODULE = {"EngineConfig": "config", "Engine": "engine"}

__all__ = ["Engine", "EngineConfig"]


def __getattr__(name: str) -> object:
    if name not in _NAME_TO_MODULE:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_NAME_TO_MODULE[name]}"), name)
