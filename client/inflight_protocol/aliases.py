"""Names that other Triton backends and OpenAI's clients use for our inputs and settings.

Presence and frequency penalties of OpenAI and vLLM also differ in meaning: theirs count the tokens
of the answer and are subtracted before the temperature divides; those of the wire (TensorRT-LLM's)
count the prompt as well and are subtracted after it. `to_wire` converts them.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight_protocol.ensemble import ENSEMBLE_INPUT_MAP

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


_NO_QUEUE = "requests are batched in every iteration and wait in no queue of Triton's: leave it out"
_NO_IMAGES = "no model of images is served: leave it out"
_ONE_INSTANCE = "there is one instance of every model: leave it out"
_NO_TENSOR = "the tensors of that type are not supported: leave it out"

TEMPLATE_HINTS: dict[str, str] = {
    "engine_dir": "it is called gpt_model_path, and --model sets it",
    "encoder_engine_dir": "an encoder is part of its checkpoint: leave it out",
    "batching_strategy": "it is called gpt_model_type",
    "decoupled_mode": "--decoupled and --no-decoupled say it",
    "triton_backend": "it is always python: leave it out",
    "triton_max_batch_size": (
        "one request may have up to 64 rows: leave it out; "
        "how many requests run together is max_batch_size"
    ),
    "logits_datatype": "it is always TYPE_FP32: leave it out",
    "encoder_input_features_data_type": _NO_TENSOR,
    "prompt_embedding_table_data_type": _NO_TENSOR,
    "preferred_batch_size": _NO_QUEUE,
    "max_queue_delay_microseconds": _NO_QUEUE,
    "preprocessing_instance_count": _ONE_INSTANCE,
    "postprocessing_instance_count": _ONE_INSTANCE,
    "bls_instance_count": _ONE_INSTANCE,
    "tokenizer_type": "tokenizer.json says it: leave it out",
    "multimodal_model_path": _NO_IMAGES,
    "visual_model_path": _NO_IMAGES,
    "max_kv_cache_length": "attention is always over the whole text: leave it out",
    "multimodal_encoders_name": _NO_IMAGES,
    "hf_model_path": _NO_IMAGES,
    "max_num_images": _NO_IMAGES,
    "REPORT_CUSTOM_METRICS": "metrics of inflight's own are always reported: leave it out",
    "ENABLE_VLLM_HEALTH_CHECK": "tensorrt_llm always says whether it takes requests: leave it out",
}
"""What fills templates of ``tensorrtllm_backend`` or stands in configs of ``vllm_backend``, and is
no setting here -> why."""


NAMES = ("presence_penalty", "frequency_penalty")

_WHOLE_PROMPT = 2**31 - 1
_GREEDY = 1e-5  # no draw: vLLM's bound. A penalty divided by less is more than the wire takes


def to_wire(values: Mapping[str, float]) -> dict[str, float]:
    """The tensors that stand for the penalties among ``values``, and for what else they change.

    ``values`` by tensor name; of the others ``temperature`` is looked at (1 if it is missing).
    Nothing without penalties.
    """
    penalties = {name: values[name] for name in NAMES if values.get(name)}
    if not penalties:
        return {}
    temperature = values.get("temperature", 1.0)
    if 0.0 <= temperature < _GREEDY:
        return {**penalties, "temperature": 0.0, "prompt_ignore_length": _WHOLE_PROMPT}
    scaled = {name: penalty / temperature for name, penalty in penalties.items()}
    return {**scaled, "prompt_ignore_length": _WHOLE_PROMPT}
