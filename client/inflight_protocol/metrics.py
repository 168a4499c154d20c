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
    for none. Without a ``label`` there is one series, of the value "". ``kind``: gauge, counter or
    histogram (with the upper bounds ``buckets``).
    """

    name: str
    label: str
    values: Mapping[str, str]
    meaning: str
    kind: str = "gauge"
    buckets: tuple[int, ...] = ()
    model_label: str = "model"


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
    {"pause": "", "kv_events_dropped": ""},
    "Requests that lost their blocks and are computed again; batches of KV events never sent",
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

LORA = MetricFamilySpec(
    "inflight_lora",
    "lora_type",
    {
        "host_adapters": "LoRA adapters on the host",
        "host_bytes": "LoRA host cache bytes",
        "host_evictions": "LoRA host cache evictions",
        "device_adapters": "LoRA adapters on the device",
        "device_loads": "LoRA adapter loads",
        "device_evictions": "LoRA adapter evictions",
        "device_load_seconds": "LoRA adapter load time",
        "waiting_requests": "LoRA requests waiting",
        "wait_seconds": "LoRA adapter wait time",
        "used_pages": "Used LoRA pages",
        "max_pages": "Max LoRA pages",
    },
    "Adapters in memory, requests that wait for pages of theirs, and since the start loads and "
    "evictions; 0 until there is an adapter",
)
"""Ours."""

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
    LORA,
)
"""Of an in-flight batcher."""

V1_METRICS: tuple[MetricFamilySpec, ...] = tuple(
    _V1 if family is _INFLIGHT else family for family in METRICS
)
"""Of a V1 batcher."""


# vLLM's names, so that its published dashboards work. Its histograms are counters here: Triton
# takes one observation at a time, and a server makes thousands of tokens in a second.

_MODEL_NAME = "model_name"
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# vLLM's begin with 10 ms here, and with 0.3 s below: a small model has passed these long before.
_GAP_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    """A histogram of requests that have ended, or of their tokens; ``buckets``: upper bounds."""

    name: str
    buckets: tuple[float, ...]
    meaning: str

    @property
    def families(self) -> tuple[MetricFamilySpec, ...]:
        """Its series as Prometheus has them: by upper bound, the sum and the number."""
        bounds = {**{f"{each:g}": "" for each in self.buckets}, "+Inf": ""}
        return (
            _counter(f"{self.name}_bucket", self.meaning, "le", bounds),
            _counter(f"{self.name}_sum", self.meaning),
            _counter(f"{self.name}_count", self.meaning),
        )


def _counter(
    name: str, meaning: str, label: str = "", values: Mapping[str, str] | None = None
) -> MetricFamilySpec:
    return MetricFamilySpec(
        name, label, values or {"": ""}, meaning, "counter", model_label=_MODEL_NAME
    )


def _gauge(name: str, key: str, meaning: str) -> MetricFamilySpec:
    return MetricFamilySpec(name, "", {"": key}, meaning, model_label=_MODEL_NAME)


HISTOGRAMS = (
    HistogramSpec(
        "vllm:time_to_first_token_seconds", _FIRST_TOKEN_SECONDS, "From arrival to the first token"
    ),
    HistogramSpec(
        "vllm:inter_token_latency_seconds", _GAP_SECONDS, "Between two tokens of a request"
    ),
    HistogramSpec(
        "vllm:request_queue_time_seconds", _REQUEST_SECONDS, "From arrival to the first step"
    ),
    HistogramSpec("vllm:e2e_request_latency_seconds", _REQUEST_SECONDS, "From arrival to the end"),
    HistogramSpec("vllm:request_prompt_tokens", _TOKENS, "Tokens of a prompt"),
    HistogramSpec("vllm:request_generation_tokens", _TOKENS, "Tokens of an answer"),
    HistogramSpec(
        "vllm:request_prefill_time_seconds",
        _REQUEST_SECONDS,
        "From the first step to the first token",
    ),
    HistogramSpec(
        "vllm:request_decode_time_seconds", _REQUEST_SECONDS, "From the first token to the last one"
    ),
    HistogramSpec(
        "vllm:request_inference_time_seconds", _REQUEST_SECONDS, "From the first step to the end"
    ),
)
OLDER_NAMES = {
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "vllm:request_generation_tokens": "vllm:request_max_num_generation_tokens",
}
"""Of a histogram -> the name that dashboards of earlier versions know; on the metrics page of
OpenAI's side."""
SUCCESSES = _counter(
    "vllm:request_success_total",
    "Requests that have ended without an error, by what ended them",
    "finished_reason",
    {"stop": "", "length": "", "abort": ""},
)
PREEMPTIONS = _counter("vllm:num_preemptions_total", "Requests that lost their blocks")
PROMPT_TOKENS = _counter("vllm:prompt_tokens_total", "Tokens of prompts of requests that ended")
PREFIX_QUERIES = _counter("vllm:prefix_cache_queries_total", "Tokens looked for in the cache")
PREFIX_HITS = _counter("vllm:prefix_cache_hits_total", "Tokens of these found there")
GENERATION_TOKENS = _counter("vllm:generation_tokens_total", "Tokens of answers")

VLLM_METRICS: tuple[MetricFamilySpec, ...] = (
    _gauge("vllm:num_requests_running", "Scheduled Requests", "Requests in the last step"),
    _gauge("vllm:num_requests_waiting", "Waiting Requests", "Requests that wait"),
    _gauge("vllm:kv_cache_usage_perc", "Fraction used KV cache blocks", "Share of blocks in use"),
    _gauge("vllm:gpu_cache_usage_perc", "Fraction used KV cache blocks", "Its older name"),
    SUCCESSES,
    PREEMPTIONS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    PREFIX_QUERIES,
    PREFIX_HITS,
    *(family for each in HISTOGRAMS for family in each.families),
)

LORA_REQUESTS = "vllm:lora_requests_info"
"""A gauge that is the time, in seconds since 1970. The labels ``running_lora_adapters`` and
``waiting_lora_adapters`` are names, with commas between, and ``max_lora`` is how many a step may
have: endpoint pickers of the Gateway API read it. It is on the page of OpenAI's side only: a model
cannot take a series off Triton's, and each combination of names would be one."""

CACHE_CONFIG = "vllm:cache_config_info"
"""A gauge that is 1, whose labels ``block_size`` and ``num_gpu_blocks`` gateways read."""
