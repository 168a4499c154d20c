"""Every family of metrics on Triton's metrics port, under the names of `tensorrtllm_backend`.

Families and labels: its `custom_metrics_reporter`. In-flight batching and V1 each have a family of
their own, and only one of the two is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricFamilySpec:
    """One family. ``values``: value of ``label`` -> key of the statistics JSON it is set from, ""
    for none. ``kind``: gauge, counter or histogram (with the upper bounds ``buckets``).
    """

    name: str
    label: str
    values: Mapping[str, str]
    meaning: str
    kind: str = "gauge"
    buckets: tuple[int, ...] = ()


_REQUESTS = MetricFamilySpec(
    "nv_trt_llm_request_metrics",
    "request_type",
    {
        "active": "Active Request Count",
        "max": "Max Request Count",
        "scheduled": "Scheduled Requests",
        "context": "Context Requests",
        "waiting": "Waiting Requests",
    },
    "Requests by state",
)
_MEMORY = MetricFamilySpec(
    "nv_trt_llm_runtime_memory_metrics",
    "memory_type",
    {
        "cpu": "Runtime CPU Memory Usage",
        "gpu": "Runtime GPU Memory Usage",
        "pinned": "Runtime Pinned Memory Usage",
    },
    "Memory in bytes",
)
_BLOCKS = MetricFamilySpec(
    "nv_trt_llm_kv_cache_block_metrics",
    "kv_cache_block_type",
    {
        "max": "Max KV cache blocks",
        "free": "Free KV cache blocks",
        "used": "Used KV cache blocks",
        "tokens_per": "Tokens per KV cache block",
        "fraction": "Fraction used KV cache blocks",
        "reused": "Reused KV cache blocks",  # stays 0 without block reuse
    },
    "Blocks of the KV cache",
)
_INFLIGHT = MetricFamilySpec(
    "nv_trt_llm_inflight_batcher_metrics",
    "inflight_batcher_specific_metric",
    {
        "total_context_tokens": "Total Context Tokens",
        "generation_requests": "Generation Requests",
        "micro_batch_id": "MicroBatch ID",
        "paused_requests": "Paused Requests",
    },
    "The last iteration of the in-flight batcher",
)
_V1 = MetricFamilySpec(
    "nv_trt_llm_v1_metrics",
    "v1_specific_metric",
    {
        "total_context_tokens": "Total Context Tokens",
        "total_generation_tokens": "Total Generation Tokens",
        "empty_generation_slots": "Empty Generation Slots",
    },
    "The last iteration of the V1 batcher",
)
_GENERAL = MetricFamilySpec(
    "nv_trt_llm_general_metrics",
    "general_type",
    {"timestamp": "Timestamp", "iteration_counter": "Iteration Counter"},
    "Time in seconds since 1970, and iterations",
)
_TRANSFER = MetricFamilySpec(
    "nv_trt_llm_disaggregated_serving_metrics",
    "disaggregated_serving_type",
    {"kv_cache_transfer_ms": "", "request_count": ""},
    "Transfers of KV between servers: there are none here, so both stay 0",
    "counter",
)
_LENGTHS = (10, 50, 100, 500, 1000)
INPUT_LENGTHS = MetricFamilySpec(
    "nv_llm_input_token_len",
    "response_metric_type",
    {"total_input_tokens": ""},
    "Tokens of the prompts of requests that have ended",
    "histogram",
    _LENGTHS,
)
OUTPUT_LENGTHS = MetricFamilySpec(
    "nv_llm_output_token_len",
    "response_metric_type",
    {"total_output_tokens": ""},
    "Tokens of their answers, of all beams",
    "histogram",
    _LENGTHS,
)

ERRORS = MetricFamilySpec(
    "inflight_request_errors_total",
    "code",
    {
        "ALREADY_EXISTS": "",
        "INTERNAL": "",
        "INVALID_ARG": "",
        "UNAVAILABLE": "",
        "UNSUPPORTED": "",
    },
    "Requests that ended with an error; those refused before they reached the model are not known",
    "counter",
)
"""Ours: Triton counts a request of a decoupled model as a success whatever it is answered."""

EVENTS = MetricFamilySpec(
    "inflight_scheduler_events_total",
    "event",
    {"pause": ""},
    "Requests that lost their blocks and are computed again",
    "counter",
)
"""Ours: a gauge of the last iteration would almost always be sampled as 0."""

REUSE = MetricFamilySpec(
    "inflight_kv_cache_reuse",
    "kv_cache_reuse_type",
    {"hit_rate": "KV cache hit rate"},
    "Share of the blocks of prompts that were found in the cache; 0 without block reuse",
)
"""Ours: tests of the peer know every series whose name begins as theirs do."""

METRICS: tuple[MetricFamilySpec, ...] = (
    _REQUESTS,
    _MEMORY,
    _BLOCKS,
    _INFLIGHT,
    _GENERAL,
    _TRANSFER,
    INPUT_LENGTHS,
    OUTPUT_LENGTHS,
    ERRORS,
    EVENTS,
    REUSE,
)
"""Of an in-flight batcher."""

V1_METRICS: tuple[MetricFamilySpec, ...] = tuple(
    _V1 if family is _INFLIGHT else family for family in METRICS
)
"""Of a V1 batcher."""
