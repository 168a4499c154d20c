"""The wire in one table: every tensor and parameter, with type, shape and what we do with it.

Everything that names a tensor or a parameter reads it from here: request validation, the
``config.pbtxt`` (a test compares), the clients and the docs. Names, types and order follow
``tensorrtllm_backend`` v0.19 (its `config.pbtxt` files), with the names that
were changed later beside the old ones.

A tensor that is not honoured yet is *refused by name* unless it carries its neutral value (the one
that asks for nothing), because existing clients send those by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

LLM_MODEL_NAME = "tensorrt_llm"
ENSEMBLE_MODEL_NAME = "ensemble"

EMPTY = "empty"
"""Neutral value of a list tensor: no elements."""

DTYPE_TO_NUMPY: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "STRING": np.object_,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model.

    ``dims`` are without the batch dimension. ``is_scalar``: the model sees one value per row
    (``reshape: {shape: []}`` in the config). ``neutral`` is the value that may be sent although the
    tensor is not honoured; None means that sending it at all is refused.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    meaning: str
    is_scalar: bool = False
    is_ragged: bool = False
    is_honoured: bool = False
    neutral: float | int | bool | str | None = None


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One key of the model's ``parameters`` block. ``default`` "" means not set."""

    name: str
    kind: str  # "int" | "float" | "bool" | "choice" | "str"
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    is_honoured: bool = True


def _scalar(
    name: str, dtype: str, meaning: str, neutral: float | int | bool | str | None = None
) -> TensorSpec:
    return TensorSpec(name, dtype, (1,), meaning, is_scalar=True, neutral=neutral)


def _ragged(name: str, dtype: str, dims: tuple[int, ...], meaning: str) -> TensorSpec:
    return TensorSpec(name, dtype, dims, meaning, is_ragged=True, neutral=EMPTY)


def _honoured(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(
        spec.name, spec.dtype, spec.dims, spec.meaning, spec.is_scalar, spec.is_ragged, True
    )


INPUTS: tuple[TensorSpec, ...] = (
    _honoured(_ragged("input_ids", "INT32", (-1,), "prompt as token ids")),
    _ragged("encoder_input_features", "FP16", (-1, -1), "features for an encoder"),
    _scalar("encoder_output_lengths", "INT32", "encoder output length"),
    _honoured(_scalar("input_lengths", "INT32", "number of ids of the prompt that count")),
    _honoured(_scalar("request_output_len", "INT32", "maximum number of new tokens")),
    _scalar("num_return_sequences", "INT32", "sequences to return for the prompt", 1),
    _ragged("draft_input_ids", "INT32", (-1,), "draft tokens for speculative decoding"),
    _ragged("decoder_input_ids", "INT32", (-1,), "decoder prompt of an encoder-decoder model"),
    _scalar("decoder_input_lengths", "INT32", "length of decoder_input_ids"),
    _ragged("draft_logits", "FP16", (-1, -1), "logits of the draft tokens"),
    _scalar("draft_acceptance_threshold", "FP32", "acceptance threshold of drafts"),
    _honoured(_scalar("end_id", "INT32", "token that ends the answer; -1 = none")),
    _honoured(_scalar("pad_id", "INT32", "token that pads beams of unequal length")),
    _ragged("stop_words_list", "INT32", (2, -1), "stop words as token ids and end offsets"),
    _ragged("bad_words_list", "INT32", (2, -1), "forbidden words as token ids and end offsets"),
    _ragged("embedding_bias", "FP32", (-1,), "bias added to the logits"),
    _scalar("beam_width", "INT32", "number of beams", 1),
    _honoured(_scalar("temperature", "FP32", "divides the logits; 0 = greedy")),
    _honoured(_scalar("runtime_top_k", "INT32", "draw among the k most likely; 0 = off")),
    _honoured(_scalar("runtime_top_p", "FP32", "draw within probability mass p; 0 = off")),
    _scalar("runtime_top_p_min", "FP32", "lower bound of a decaying top_p", 1e-6),
    _scalar("runtime_top_p_decay", "FP32", "decay of top_p per token", 1.0),
    _scalar("runtime_top_p_reset_ids", "INT32", "token that resets a decaying top_p", -1),
    _scalar("len_penalty", "FP32", "beam search: length penalty", 1.0),
    _scalar("early_stopping", "BOOL", "beam search: stop early", False),
    _scalar("repetition_penalty", "FP32", "multiplicative penalty of tokens seen", 1.0),
    _scalar("presence_penalty", "FP32", "additive penalty of tokens generated", 0.0),
    _scalar("frequency_penalty", "FP32", "additive penalty by count of tokens generated", 0.0),
    _scalar("beam_search_diversity_rate", "FP32", "beam search: diversity", 0.0),
    _honoured(_scalar("min_length", "INT32", "minimum number of new tokens")),
    _honoured(_scalar("min_tokens", "INT32", "newer name of min_length")),
    _honoured(_scalar("random_seed", "UINT64", "seed of the draw")),
    _honoured(_scalar("seed", "UINT64", "newer name of random_seed")),
    _scalar("return_log_probs", "BOOL", "return log probabilities", False),
    _scalar("return_context_logits", "BOOL", "return the logits of the prompt", False),
    _scalar("return_generation_logits", "BOOL", "return the logits of new tokens", False),
    _scalar("return_perf_metrics", "BOOL", "return times and cache use of the request", False),
    _scalar("return_num_input_tokens", "BOOL", "return num_input_tokens", False),
    _scalar("return_num_output_tokens", "BOOL", "return num_output_tokens", False),
    _honoured(_scalar("exclude_input_in_output", "BOOL", "leave the prompt out of the answer")),
    _honoured(_scalar("stop", "BOOL", "end the running request that has this request id")),
    _honoured(_scalar("streaming", "BOOL", "one response per step instead of one at the end")),
    _ragged("prompt_embedding_table", "FP16", (-1, -1), "p-tuning table"),
    _ragged("prompt_table_extra_ids", "UINT64", (-1,), "ids of prompt table rows"),
    _scalar("prompt_vocab_size", "INT32", "rows of the p-tuning table", 0),
    _ragged("cross_attention_mask", "BOOL", (-1, -1), "mask over the encoder output"),
    TensorSpec("mrope_rotary_cos_sin", "FP32", (-1,), "multimodal rope", neutral=EMPTY),
    TensorSpec("mrope_position_deltas", "INT64", (1,), "multimodal rope"),
    _scalar("lora_task_id", "UINT64", "adapter id", 0),
    _ragged("lora_weights", "FP16", (-1, -1), "adapter weights"),
    _ragged("lora_config", "INT32", (-1, 3), "adapter modules, layers and ranks"),
    _ragged("context_phase_params", "UINT8", (-1,), "state of a disaggregated context phase"),
    TensorSpec(
        "skip_cross_attn_blocks",
        "BOOL",
        (1,),
        "skip cross attention",
        is_ragged=True,
        neutral=False,
    ),
    _ragged("retention_token_range_starts", "INT32", (-1,), "cache retention: range starts"),
    _ragged("retention_token_range_ends", "INT32", (-1,), "cache retention: range ends"),
    _ragged("retention_token_range_priorities", "INT32", (-1,), "cache retention: priorities"),
    _ragged("retention_token_range_durations_ms", "INT32", (-1,), "cache retention: durations"),
    TensorSpec(
        "retention_decode_priority",
        "INT32",
        (1,),
        "cache retention: priority of generated blocks",
        is_ragged=True,
    ),
    TensorSpec(
        "retention_decode_duration_ms",
        "INT32",
        (1,),
        "cache retention: duration of generated blocks",
        is_ragged=True,
    ),
    TensorSpec(
        "guided_decoding_guide_type",
        "STRING",
        (1,),
        "kind of grammar that guides the answer",
        is_ragged=True,
    ),
    TensorSpec(
        "guided_decoding_guide",
        "STRING",
        (1,),
        "grammar that guides the answer",
        is_ragged=True,
    ),
    TensorSpec("lookahead_window_size", "INT32", (1,), "lookahead decoding", is_ragged=True),
    TensorSpec("lookahead_ngram_size", "INT32", (1,), "lookahead decoding", is_ragged=True),
    TensorSpec(
        "lookahead_verification_set_size", "INT32", (1,), "lookahead decoding", is_ragged=True
    ),
    # Ours: text in and out of the same model, and the live feed of statistics.
    TensorSpec("text_input", "STRING", (1,), "prompt as text", is_honoured=True),
    TensorSpec("max_tokens", "INT32", (1,), "request_output_len of text clients", is_honoured=True),
    TensorSpec("stream", "BOOL", (1,), "streaming of text clients", is_honoured=True),
    TensorSpec(
        "stats", "BOOL", (1,), "stream the statistics of every iteration instead", is_honoured=True
    ),
    TensorSpec("why", "BOOL", (1,), "say why the request of this id waits", is_honoured=True),
    TensorSpec("recording", "BOOL", (1,), "send the recorded decisions", is_honoured=True),
    # Ours: when a request runs, and with whom it shares cached text. Names as in the Executor API
    # (priority, allottedTimeMs); its cacheSaltID is a number, ours a string: tenants have names.
    _honoured(_scalar("priority", "FP32", "0 to 1, the higher the earlier; default 0.5")),
    _honoured(_scalar("cache_salt", "STRING", "cached text is shared among equal salts only")),
    _honoured(_scalar("max_queue_time_ms", "INT32", "error unless started so soon after arrival")),
    _honoured(_scalar("allotted_time_ms", "INT32", "ends so long after arrival, as far as it is")),
)

OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("output_ids", "INT32", (-1, -1), "token ids [beam, length]", is_honoured=True),
    TensorSpec("sequence_length", "INT32", (-1,), "tokens per beam", is_honoured=True),
    TensorSpec("cum_log_probs", "FP32", (-1,), "sum of log probabilities per beam"),
    TensorSpec("output_log_probs", "FP32", (-1, -1), "log probability of each new token"),
    TensorSpec("context_logits", "FP32", (-1, -1), "logits of the prompt"),
    TensorSpec("generation_logits", "FP32", (-1, -1, -1), "logits of the new tokens"),
    TensorSpec("batch_index", "INT32", (1,), "row of the request this response belongs to"),
    TensorSpec("sequence_index", "INT32", (1,), "which of num_return_sequences"),
    TensorSpec("context_phase_params", "UINT8", (-1,), "disaggregated context phase"),
    TensorSpec("kv_cache_alloc_new_blocks", "INT32", (1,), "blocks newly allocated"),
    TensorSpec("kv_cache_reused_blocks", "INT32", (1,), "blocks reused"),
    TensorSpec("kv_cache_alloc_total_blocks", "INT32", (1,), "blocks allocated in all"),
    TensorSpec("arrival_time_ns", "INT64", (1,), "time of arrival"),
    TensorSpec("first_scheduled_time_ns", "INT64", (1,), "time first scheduled"),
    TensorSpec("first_token_time_ns", "INT64", (1,), "time of the first token"),
    TensorSpec("last_token_time_ns", "INT64", (1,), "time of the last token"),
    TensorSpec("acceptance_rate", "FP32", (1,), "share of draft tokens accepted"),
    TensorSpec("total_accepted_draft_tokens", "INT32", (1,), "draft tokens accepted"),
    TensorSpec("total_draft_tokens", "INT32", (1,), "draft tokens"),
    TensorSpec("num_input_tokens", "INT32", (1,), "tokens of the prompt"),
    TensorSpec("num_output_tokens", "INT32", (1,), "tokens generated"),
    TensorSpec("text_output", "STRING", (-1,), "text of each beam", is_honoured=True),
    TensorSpec("stats", "STRING", (-1,), "statistics, one JSON per iteration", is_honoured=True),
    TensorSpec("why", "STRING", (-1,), "why a request waits, as JSON", is_honoured=True),
    TensorSpec("recording", "STRING", (-1,), "decisions as JSON lines", is_honoured=True),
)

INPUT_BY_NAME: dict[str, TensorSpec] = {spec.name: spec for spec in INPUTS}
OUTPUT_BY_NAME: dict[str, TensorSpec] = {spec.name: spec for spec in OUTPUTS}

RENAMED_INPUTS: dict[str, str] = {
    "min_tokens": "min_length",
    "seed": "random_seed",
    "max_tokens": "request_output_len",
    "stream": "streaming",
}
"""Another name of an input -> the name used inside. Sending both is an error."""

CONTROL_INPUTS: frozenset[str] = frozenset(
    {"stop", "stream", "streaming", "stats", "why", "recording", "text_input"}
)
"""Consumed by the Triton model; not tensors of an `InferenceRequest`."""


ENSEMBLE_INPUT_MAP: dict[str, str] = {
    "text_input": "text_input",
    "max_tokens": "max_tokens",
    "num_return_sequences": "num_return_sequences",
    "exclude_input_in_output": "exclude_input_in_output",
    "end_id": "end_id",
    "pad_id": "pad_id",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "length_penalty": "len_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_length": "min_length",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "random_seed": "random_seed",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "beam_width": "beam_width",
    "stream": "stream",
    "prompt_embedding_table": "prompt_embedding_table",
    "prompt_vocab_size": "prompt_vocab_size",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
    "priority": "priority",
    "cache_salt": "cache_salt",
    "max_queue_time_ms": "max_queue_time_ms",
    "allotted_time_ms": "allotted_time_ms",
}
"""Input of the ``ensemble`` model -> input of ``tensorrt_llm``."""

_NOT_IN_ENSEMBLE = frozenset(
    [
        "output_ids",
        "sequence_length",
        "context_phase_params",
        "num_input_tokens",
        "num_output_tokens",
        "stats",
        "why",
        "recording",
    ]
)

ENSEMBLE_OUTPUT_MAP: dict[str, str] = {"text_output": "text_output"} | {
    spec.name: spec.name for spec in OUTPUTS if spec.name not in _NOT_IN_ENSEMBLE
}
"""Output of the ``ensemble`` model -> output of ``tensorrt_llm``."""


PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec(
        "gpt_model_type",
        "choice",
        "inflight_fused_batching",
        "how requests are batched",
        ("V1", "v1", "inflight_batching", "inflight_fused_batching"),
    ),
    ParameterSpec("gpt_model_path", "str", "", "Hugging Face checkpoint folder"),
    ParameterSpec("tokenizer_dir", "str", "", "folder of tokenizer.json; default: the checkpoint"),
    ParameterSpec(
        "batch_scheduler_policy",
        "choice",
        "guaranteed_no_evict",
        "capacity policy; static_batch is an addition of ours",
        ("guaranteed_no_evict", "max_utilization", "static_batch"),
    ),
    ParameterSpec(
        "scheduler_class", "str", "", "your own RequestScheduler, as package.module:ClassName"
    ),
    ParameterSpec("max_beam_width", "int", "1", "largest beam_width", minimum=1, maximum=1),
    ParameterSpec("max_batch_size", "int", "256", "requests in flight", minimum=1, maximum=65536),
    ParameterSpec(
        "max_num_tokens",
        "int",
        "",
        "tokens per iteration; default: max(8192, max_seq_len)",
        minimum=1,
        maximum=2**20,
    ),
    ParameterSpec(
        "max_seq_len",
        "int",
        "",
        "prompt plus new tokens; default: the checkpoint's limit",
        minimum=2,
        maximum=2**24,
    ),
    ParameterSpec(
        "max_input_len",
        "int",
        "",
        "prompt tokens; default: max_seq_len - 1",
        minimum=1,
        maximum=2**24,
    ),
    ParameterSpec(
        "max_queue_size",
        "int",
        "4096",
        "requests that may wait for a place",
        minimum=1,
        maximum=10**7,
    ),
    ParameterSpec("tokens_per_block", "int", "32", "tokens of a KV block", minimum=1, maximum=1024),
    ParameterSpec(
        "max_tokens_in_paged_kv_cache",
        "int",
        "",
        "tokens of the KV pool",
        minimum=1,
        maximum=2**40,
    ),
    ParameterSpec(
        "kv_cache_free_gpu_mem_fraction",
        "float",
        "0.9",
        "share of free GPU memory for KV",
        minimum=0.01,
        maximum=0.99,
    ),
    ParameterSpec("exclude_input_in_output", "bool", "false", "default of the tensor of that name"),
    ParameterSpec(
        "cancellation_check_period_ms",
        "int",
        "100",
        "how often cancellation is looked for",
        minimum=1,
        maximum=60_000,
    ),
    ParameterSpec(
        "stats_check_period_ms",
        "int",
        "100",
        "how often metrics are updated",
        minimum=1,
        maximum=60_000,
    ),
    ParameterSpec("device", "choice", "auto", "where the model runs", ("auto", "cpu", "cuda")),
    ParameterSpec(
        "dtype",
        "choice",
        "auto",
        "type of weights and KV; auto: the checkpoint's on a GPU, float32 on a CPU",
        ("auto", "float32", "bfloat16", "float16"),
    ),
    ParameterSpec("status_file", "str", "", "file in which the model reports loading and state"),
    ParameterSpec("drain_file", "str", "", "file whose appearance makes the model drain"),
    ParameterSpec("record_file", "str", "", "file in which all scheduling is recorded"),
    ParameterSpec(
        "enable_chunked_context", "bool", "false", "a prompt may be computed in several iterations"
    ),
    ParameterSpec(
        "context_chunking_policy",
        "choice",
        "first_come_first_served",
        "who gets how much of the token budget, with chunked context",
        ("first_come_first_served", "equal_progress", "force_chunk"),
    ),
    ParameterSpec(
        "context_chunk_unit",
        "int",
        "",
        "chunks are multiples of so many tokens; default: tokens_per_block",
        minimum=1,
        maximum=2**20,
    ),
    ParameterSpec(
        "priority_span",
        "float",
        "1000",
        "later requests of priority 1 that may pass one of priority 0",
        minimum=0,
        maximum=1e9,
    ),
    ParameterSpec(
        "max_queue_seconds",
        "float",
        "",
        "upper bound, and default, of max_queue_time_ms; default: none",
        minimum=0.001,
        maximum=1e9,
    ),
    ParameterSpec(
        "max_run_seconds",
        "float",
        "",
        "upper bound, and default, of allotted_time_ms; default: none",
        minimum=0.001,
        maximum=1e9,
    ),
    ParameterSpec(
        "enable_kv_cache_reuse", "bool", "false", "share KV blocks with requests that begin alike"
    ),
    # Keys of tensorrtllm_backend that ask for something else than we do: refused unless neutral.
    ParameterSpec("enable_trt_overlap", "bool", "false", "deprecated", is_honoured=False),
    ParameterSpec("normalize_log_probs", "bool", "true", "log probabilities", is_honoured=False),
    ParameterSpec("encoder_model_path", "str", "", "encoder of T5-like models", is_honoured=False),
    ParameterSpec("max_attention_window_size", "str", "", "attention window", is_honoured=False),
    ParameterSpec("sink_token_length", "str", "", "StreamingLLM", is_honoured=False),
    ParameterSpec("cross_kv_cache_fraction", "str", "", "encoder-decoder", is_honoured=False),
    ParameterSpec("kv_cache_host_memory_bytes", "int", "0", "KV offload", is_honoured=False),
    ParameterSpec("kv_cache_onboard_blocks", "bool", "true", "KV offload", is_honoured=False),
    ParameterSpec("iter_stats_max_iterations", "int", "1000", "executor", is_honoured=False),
    ParameterSpec("request_stats_max_iterations", "int", "0", "executor", is_honoured=False),
    ParameterSpec("gpu_device_ids", "str", "", "multi-GPU", is_honoured=False),
    ParameterSpec("participant_ids", "str", "", "multi-GPU", is_honoured=False),
    ParameterSpec("num_nodes", "int", "1", "multi-GPU", is_honoured=False),
    ParameterSpec("executor_worker_path", "str", "", "multi-GPU", is_honoured=False),
    ParameterSpec("worker_path", "str", "", "multi-GPU", is_honoured=False),
    ParameterSpec("lora_cache_optimal_adapter_size", "int", "8", "LoRA", is_honoured=False),
    ParameterSpec("lora_cache_max_adapter_size", "int", "64", "LoRA", is_honoured=False),
    ParameterSpec("lora_cache_gpu_memory_fraction", "float", "0.05", "LoRA", is_honoured=False),
    ParameterSpec("lora_cache_host_memory_bytes", "int", "1073741824", "LoRA", is_honoured=False),
    ParameterSpec("lora_prefetch_dir", "str", "", "LoRA", is_honoured=False),
    ParameterSpec("decoding_mode", "str", "", "kind of decoding", is_honoured=False),
    ParameterSpec("lookahead_window_size", "str", "", "lookahead", is_honoured=False),
    ParameterSpec("lookahead_ngram_size", "str", "", "lookahead", is_honoured=False),
    ParameterSpec("lookahead_verification_set_size", "str", "", "lookahead", is_honoured=False),
    ParameterSpec("medusa_choices", "str", "", "Medusa", is_honoured=False),
    ParameterSpec("eagle_choices", "str", "", "EAGLE", is_honoured=False),
    ParameterSpec("gpu_weights_percent", "float", "1.0", "weight offload", is_honoured=False),
    ParameterSpec("enable_context_fmha_fp32_acc", "bool", "false", "kernels", is_honoured=False),
    ParameterSpec("multi_block_mode", "bool", "true", "kernels", is_honoured=False),
    ParameterSpec("cuda_graph_mode", "bool", "false", "kernels", is_honoured=False),
    ParameterSpec("cuda_graph_cache_size", "int", "0", "kernels", is_honoured=False),
    ParameterSpec(
        "speculative_decoding_fast_logits", "bool", "false", "speculation", is_honoured=False
    ),
    ParameterSpec("guided_decoding_backend", "str", "", "guided decoding", is_honoured=False),
    ParameterSpec("xgrammar_tokenizer_info_path", "str", "", "guided decoding", is_honoured=False),
    ParameterSpec(
        "max_num_sequences", "int", "", "v0.5-v0.8 name of max_batch_size", is_honoured=False
    ),
)

PARAMETER_BY_NAME: dict[str, ParameterSpec] = {spec.name: spec for spec in PARAMETERS}

TRITON_PARAMETERS: frozenset[str] = frozenset(
    {"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"}
)
"""Keys that the Python backend itself reads; passed over."""


def names(specs: Iterable[TensorSpec | ParameterSpec]) -> list[str]:
    """The names of some rows of the table, in order."""
    return [spec.name for spec in specs]
