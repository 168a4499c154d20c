"""Triton custom metrics under the peer's names, set from the statistics JSON.

Families and labels: `tensorrtllm_backend`, `custom_metrics_reporter`. In-flight batching and
V1 each have a family of their own, and only one of the two is there.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

REQUEST_METRICS = {
    "active": "Active Request Count",
    "max": "Max Request Count",
    "scheduled": "Scheduled Requests",
    "context": "Context Requests",
    "waiting": "Waiting Requests",
}
MEMORY_METRICS = {
    "cpu": "Runtime CPU Memory Usage",
    "gpu": "Runtime GPU Memory Usage",
    "pinned": "Runtime Pinned Memory Usage",
}
KV_BLOCK_METRICS = {
    "max": "Max KV cache blocks",
    "free": "Free KV cache blocks",
    "used": "Used KV cache blocks",
    "tokens_per": "Tokens per KV cache block",
    "fraction": "Fraction used KV cache blocks",
    "reused": "Reused KV cache blocks",  # this and the next stay 0 without block reuse
    "hit_rate": "KV cache hit rate",  # ours
}
BATCHER_METRICS = {
    "total_context_tokens": "Total Context Tokens",
    "generation_requests": "Generation Requests",
    "micro_batch_id": "MicroBatch ID",
    "paused_requests": "Paused Requests",
}
V1_METRICS = {
    "total_context_tokens": "Total Context Tokens",
    "total_generation_tokens": "Total Generation Tokens",
    "empty_generation_slots": "Empty Generation Slots",
}
GENERAL_METRICS = {"timestamp": "Timestamp", "iteration_counter": "Iteration Counter"}

# family, label, label value -> key of the statistics, help text
FAMILIES: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("nv_trt_llm_request_metrics", "request_type", REQUEST_METRICS, "Requests by state"),
    ("nv_trt_llm_runtime_memory_metrics", "memory_type", MEMORY_METRICS, "Memory in bytes"),
    (
        "nv_trt_llm_kv_cache_block_metrics",
        "kv_cache_block_type",
        KV_BLOCK_METRICS,
        "Blocks of the KV cache",
    ),
    (
        "nv_trt_llm_inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        BATCHER_METRICS,
        "The last iteration of the in-flight batcher",
    ),
    ("nv_trt_llm_general_metrics", "general_type", GENERAL_METRICS, "Time and iteration"),
)

_V1_FAMILY = (
    "nv_trt_llm_v1_metrics",
    "v1_specific_metric",
    V1_METRICS,
    "The last iteration of the V1 batcher",
)
V1_FAMILIES = tuple(_V1_FAMILY if family[2] is BATCHER_METRICS else family for family in FAMILIES)


class TritonMetrics:
    """Gauges on Triton's metrics port. Each set is a round trip to the server (about 40 us)."""

    def __init__(self, pb_utils: Any, model: str, version: str, *, is_v1: bool = False) -> None:
        self._gauges: list[tuple[str, Any]] = []
        self._families = []  # a metric lives as long as its family does
        self._last_values: dict[str, float] = {}
        for name, label, value_to_key, help_text in V1_FAMILIES if is_v1 else FAMILIES:
            family = pb_utils.MetricFamily(
                name=name, description=help_text, kind=pb_utils.MetricFamily.GAUGE
            )
            self._families.append(family)
            for value, key in value_to_key.items():
                labels = {"model": model, "version": version, label: value}
                self._gauges.append((key, family.Metric(labels=labels)))

    def update(self, stats_json: str) -> None:
        """Set every gauge whose value changed since the last call."""
        stats = json.loads(stats_json)
        for key, gauge in self._gauges:
            value = _to_number(stats.get(key, 0))
            if self._last_values.get(key) != value:
                gauge.set(value)
                self._last_values[key] = value


def _to_number(value: object) -> float:
    """A gauge holds a number; the time stamp becomes seconds since the epoch."""
    if isinstance(value, str):
        return datetime.strptime(value, "%m-%d-%Y %H:%M:%S").timestamp()
    assert isinstance(value, int | float)
    return float(value)
