"""What other models call an input of ``tensorrt_llm``, for those who send it under that name."""

from __future__ import annotations

from inflight_client.protocol.ensemble import ENSEMBLE_INPUT_MAP

LLM_API_INPUT_MAP: dict[str, str] = {
    "return_cumulative_logprob": "return_log_probs",
    "sampling_param_temperature": "temperature",
    "sampling_param_top_k": "runtime_top_k",
    "sampling_param_top_p": "runtime_top_p",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "sampling_param_presence_penalty": "presence_penalty",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_stop": "stop_words",
    "sampling_param_seed": "seed",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
    "sampling_param_return_perf_metrics": "return_perf_metrics",
    "sampling_param_logits_post_processor_name": "logits_post_processor_name",
}
"""Input of the model of TensorRT-LLM's LLM API -> input of ``tensorrt_llm`` that asks for it."""

_TO_ENSEMBLE = {inner: outer for outer, inner in ENSEMBLE_INPUT_MAP.items()}


def names_of(name: str) -> tuple[str, str] | None:
    """What ``tensorrt_llm`` and ``ensemble`` call the input that another model calls ``name``.

    None for what is no input of any, and for what is called the same everywhere.
    """
    inner = LLM_API_INPUT_MAP.get(name) or ENSEMBLE_INPUT_MAP.get(name, name)
    if inner not in _TO_ENSEMBLE or name == inner == _TO_ENSEMBLE[inner]:
        return None
    return inner, _TO_ENSEMBLE[inner]
