"""Metrics of the peer: the last rows of docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A family and the values of its ``label``, each with the key of the statistics JSON that it
    is set from, "" for none. ``later``: what it is called in later versions."""

    family: str
    label: str
    values: Mapping[str, str]
    later: str = ""


_SUCCESSORS = [
    "nv_trt_llm_request_metrics",
    "nv_trt_llm_runtime_memory_metrics",
    "nv_trt_llm_kv_cache_block_metrics",
    "nv_trt_llm_inflight_batcher_metrics",
    "nv_trt_llm_v1_metrics",
    "nv_trt_llm_general_metrics",
]

METRIC_ROWS: tuple[MetricRow, ...] = (
    MetricRow(
        _SUCCESSORS[0],
        "request_type",
        {
            "active": "Active Request Count",
            "max": "Max Request Count",
            "scheduled": "Scheduled Requests",
            "context": "Context Requests",
            "waiting": "Waiting Requests",
        },
    ),
    MetricRow(
        _SUCCESSORS[1],
        "memory_type",
        {
            "cpu": "Runtime CPU Memory Usage",
            "gpu": "Runtime GPU Memory Usage",
            "pinned": "Runtime Pinned Memory Usage",
        },
    ),
    MetricRow(
        _SUCCESSORS[2],
        "kv_cache_block_type",
        {
            "max": "Max KV cache blocks",
            "free": "Free KV cache blocks",
            "used": "Used KV cache blocks",
            "tokens_per": "Tokens per KV cache block",
            "reused": "Reused KV cache blocks",
            "fraction": "Fraction used KV cache blocks",
        },
    ),
    MetricRow(
        _SUCCESSORS[3],
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": "Total Context Tokens",
            "generation_requests": "Generation Requests",
            "micro_batch_id": "MicroBatch ID",
            "paused_requests": "Paused Requests",
        },
    ),
    MetricRow(
        _SUCCESSORS[3],
        "inflight_batcher_specific_metric",
        {"terminated_requests": "Terminated Requests"},
        "v0.8 only; later paused_requests",
    ),
    MetricRow(
        _SUCCESSORS[4],
        "v1_specific_metric",
        {
            "total_context_tokens": "Total Context Tokens",
            "total_generation_tokens": "Total Generation Tokens",
            "empty_generation_slots": "Empty Generation Slots",
        },
    ),
    MetricRow(
        _SUCCESSORS[5],
        "general_type",
        {"timestamp": "Timestamp", "iteration_counter": "Iteration Counter"},
    ),
    MetricRow(
        "nv_trt_llm_disaggregated_serving_metrics",
        "disaggregated_serving_type",
        {"kv_cache_transfer_ms": "", "request_count": ""},
    ),
    MetricRow("nv_llm_input_token_len", "response_metric_type", {"total_input_tokens": ""}),
    MetricRow("nv_llm_output_token_len", "response_metric_type", {"total_output_tokens": ""}),
    *(
        MetricRow(
            name.replace("_metrics", "_statistics"),
            "",
            {"all": ""},
            f"v0.6 only; later `{name}`",
        )
        for name in _SUCCESSORS
    ),
)
