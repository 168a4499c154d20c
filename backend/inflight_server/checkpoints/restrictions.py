"""What a model goes without, as the engine itself says it."""

from __future__ import annotations

from typing import Any

from inflight_backend.engine.config import EngineConfig, resolve_on_device, supports_drafts
from inflight_backend.engine.memory_plan import supports_block_reuse
from inflight_backend.errors import ConfigurationError
from inflight_backend.models.config import ModelConfig

_OPTIONS: dict[str, dict[str, Any]] = {
    "kernels on a GPU": {"attention_backend": "triton"},
    "adapters": {"enable_lora": True},
    "tensor parallelism": {"tensor_parallel_size": 2},
    "pipeline parallelism": {"pipeline_parallel_size": 2},
    "deterministic_mode": {"deterministic_mode": True},
}


def restrictions_of(model: ModelConfig) -> list[str]:
    """Names of what the engine refuses for ``model``; none: it serves it with everything, on a CPU
    and on a GPU. Of a family: that of its `sample`."""
    config = EngineConfig(device="cuda")
    found = [name for name, options in _OPTIONS.items() if not _is_taken(model, **options)]
    if not supports_drafts(config, model):
        found.append("drafts")
    if not supports_block_reuse(config, model):
        found.append("KV cache reuse")
    return found


def _is_taken(model: ModelConfig, **options: Any) -> bool:
    try:
        resolve_on_device(EngineConfig(device="cuda", **options), model, has_triton=True)
    except ConfigurationError:
        return False
    return True
