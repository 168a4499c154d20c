"""Metrics of the peer: the last rows of docs/compatibility.md."""

from __future__ import annotations

from dataclasses import dataclass, field

_T = "backend/triton/"
_METRICS = (
    f"{_T}test_triton_model.py::test_metrics_and_the_lines_of_the_log_agree_integer_for_integer"
)
_PAGE = "e2e/test_serve.py::test_metrics_page_shows_the_batch_manager"
_V1_TEST = "e2e/test_scheduling.py::test_v1_answers_in_lock_step_with_statistics_of_its_own"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A family and the values of its label; ``later``: what it is called in later versions."""

    family: str
    values: tuple[str, ...]
    tests: tuple[str, ...] = field(default=(_METRICS, _PAGE))
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
    MetricRow(_SUCCESSORS[0], ("active", "max", "scheduled", "context", "waiting")),
    MetricRow(_SUCCESSORS[1], ("cpu", "gpu", "pinned")),
    MetricRow(_SUCCESSORS[2], ("max", "free", "used", "tokens_per", "reused", "fraction")),
    MetricRow(
        _SUCCESSORS[3],
        ("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"),
    ),
    MetricRow(_SUCCESSORS[3], ("terminated_requests",), (), "v0.8 only; later paused_requests"),
    MetricRow(
        _SUCCESSORS[4],
        ("total_context_tokens", "total_generation_tokens", "empty_generation_slots"),
        (f"{_T}test_triton_model.py::test_v1_has_its_own_metrics_and_answers_whole", _V1_TEST),
    ),
    MetricRow(_SUCCESSORS[5], ("timestamp", "iteration_counter")),
    MetricRow(
        "nv_trt_llm_disaggregated_serving_metrics", ("kv_cache_transfer_ms", "request_count")
    ),
    MetricRow("nv_llm_input_token_len", ("total_input_tokens",)),
    MetricRow("nv_llm_output_token_len", ("total_output_tokens",)),
    *(
        MetricRow(
            name.replace("_metrics", "_statistics"), ("all",), (), f"v0.6 only; later `{name}`"
        )
        for name in _SUCCESSORS
    ),
)
