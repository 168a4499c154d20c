"""The tensors of the ``ensemble`` model, mapped to those of ``tensorrt_llm``."""

from __future__ import annotations

from inflight_protocol.outputs import OUTPUTS
from inflight_protocol.specs import scalar
from inflight_scheduler.sampling import SETTINGS

_INPUTS = {
    "text_input": "text_input",
    "max_tokens": "max_tokens",
    "num_return_sequences": "num_return_sequences",
    "bad_words": "bad_words",
    "stop_words": "stop_words",
    "exclude_input_in_output": "exclude_input_in_output",
    "end_id": "end_id",
    "pad_id": "pad_id",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "length_penalty": "len_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_length": "min_length",
    "min_tokens": "min_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "random_seed": "random_seed",
    "seed": "seed",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "return_kv_cache_reuse_stats": "return_kv_cache_reuse_stats",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
    "return_num_cached_tokens": "return_num_cached_tokens",
    "beam_width": "beam_width",
    "stream": "stream",
    "prompt_embedding_table": "prompt_embedding_table",
    "prompt_vocab_size": "prompt_vocab_size",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
    "embedding_bias_words": "embedding_bias_words",
    "embedding_bias_weights": "embedding_bias_weights",
    "min_p": "min_p",
    "return_finish_reason": "return_finish_reason",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
    "logits_post_processor_name": "logits_post_processor_name",
    "num_top_log_probs": "num_top_log_probs",
    "return_log_prob_ranks": "return_log_prob_ranks",
    "stop_token_ids": "stop_token_ids",
    "priority": "priority",
    "cache_salt": "cache_salt",
    "max_queue_time_ms": "max_queue_time_ms",
    "allotted_time_ms": "allotted_time_ms",
}

ENSEMBLE_INPUT_MAP: dict[str, str] = _INPUTS | {
    setting.ensemble: setting.tensor for setting in SETTINGS.values() if setting.ensemble
}
"""Input of the ``ensemble`` model -> input of ``tensorrt_llm``."""

DRAFT_INPUTS = (
    scalar("num_draft_tokens", "INT32", "tokens that the draft model guesses in a round"),
    scalar("use_draft_logits", "BOOL", "no difference: the answer is exact without them"),
)
"""Inputs that ``tensorrt_llm_bls`` has beside those of the ``ensemble`` model."""

_NOT_IN_ENSEMBLE = frozenset(
    [
        "output_ids",
        "sequence_length",
        "context_phase_params",
        "stats",
        "description",
        "why",
        "recording",
        "live",
        "shared",
    ]
)

ENSEMBLE_OUTPUT_MAP: dict[str, str] = {"text_output": "text_output"} | {
    spec.name: spec.name for spec in OUTPUTS if spec.name not in _NOT_IN_ENSEMBLE
}
"""Output of the ``ensemble`` model -> output of ``tensorrt_llm``."""
