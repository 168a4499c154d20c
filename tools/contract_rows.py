"""What clients of the peer's models send, ask for and configure: the rows of docs/compatibility.md.

One row per input, output and parameter of `tensorrtllm_backend` v0.5 to v0.19 and later, in the
order of its configs; metrics are in `contract_metrics`. What is honoured follows from
`inflight_protocol` and `model_repository`; tests name the rows that they show:
``@pytest.mark.contract("tensorrt_llm input", "temperature")``.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight_protocol.aliases import LLM_API_INPUT_MAP


@dataclass(frozen=True, slots=True)
class Row:
    """A name of the peer's; ``note``: versions it is of, or what stands in its place."""

    name: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ModelRows:
    """What one model takes, answers and reads."""

    model: str
    inputs: tuple[Row, ...] = ()
    outputs: tuple[Row, ...] = ()
    parameters: tuple[Row, ...] = ()
    note: str = ""
    is_llm_api: bool = False

    @property
    def title(self) -> str:
        """The model's name; two interfaces of the peer have the same."""
        return f"{self.model} of the LLM API" if self.is_llm_api else self.model


@dataclass(frozen=True, slots=True)
class ClientRow:
    """What clients of some ``tags`` do that others do not; ``name``: for tests."""

    name: str
    tags: str
    needs: str


def rows(names: str, *, note: str = "") -> tuple[Row, ...]:
    """Rows of names divided by blanks."""
    return tuple(Row(name, note) for name in names.split())


_LLM_INPUTS = (
    *rows(
        "input_ids encoder_input_features encoder_output_lengths input_lengths "
        "request_output_len num_return_sequences draft_input_ids decoder_input_ids "
        "decoder_input_lengths draft_logits draft_acceptance_threshold end_id pad_id "
        "stop_words_list bad_words_list embedding_bias beam_width temperature runtime_top_k "
        "runtime_top_p runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids "
        "len_penalty early_stopping repetition_penalty presence_penalty frequency_penalty "
        "beam_search_diversity_rate",
    ),
    *rows(
        "min_length",
        note="to v0.19",
    ),
    *rows(
        "min_tokens",
        note="after v0.19: min_length",
    ),
    *rows(
        "random_seed",
        note="to v0.19",
    ),
    *rows(
        "seed",
        note="after v0.19: random_seed",
    ),
    *rows(
        "return_log_probs return_context_logits return_generation_logits return_perf_metrics",
    ),
    *rows(
        "return_kv_cache_reuse_stats",
        note="v0.16 to v0.18: return_perf_metrics",
    ),
    *rows(
        "return_num_input_tokens return_num_output_tokens",
        note="after v0.19",
    ),
    *rows(
        "exclude_input_in_output stop streaming prompt_embedding_table prompt_table_extra_ids "
        "prompt_vocab_size cross_attention_mask mrope_rotary_cos_sin mrope_position_deltas "
        "lora_task_id lora_weights lora_config context_phase_params skip_cross_attn_blocks "
        "retention_token_range_starts retention_token_range_ends "
        "retention_token_range_priorities retention_token_range_durations_ms "
        "retention_decode_priority retention_decode_duration_ms guided_decoding_guide_type "
        "guided_decoding_guide lookahead_window_size lookahead_ngram_size "
        "lookahead_verification_set_size",
    ),
    *rows(
        "no_repeat_ngram_size",
        note="read by the C++ backend, in no config",
    ),
    *rows(
        "noRepeatNgramSize",
        note="its name in GptManager",
    ),
    *rows(
        "runtime_top_k_min",
        note="what the C++ backend reads where the config says runtime_top_p_min",
    ),
)
_LLM_OUTPUTS = (
    *rows(
        "output_ids sequence_length cum_log_probs output_log_probs context_logits "
        "generation_logits batch_index sequence_index context_phase_params "
        "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks "
        "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns "
        "acceptance_rate total_accepted_draft_tokens total_draft_tokens",
    ),
    *rows(
        "num_input_tokens num_output_tokens",
        note="after v0.19",
    ),
)
_LLM_PARAMETERS = (
    *rows(
        "triton_backend",
        note="always python",
    ),
    *rows(
        "triton_max_batch_size decoupled_mode",
        note="values of the template",
    ),
    *rows(
        "logits_datatype",
        note="a value of the template: always TYPE_FP32",
    ),
    *rows(
        "encoder_input_features_data_type prompt_embedding_table_data_type",
        note="values of the template: tensors that are refused",
    ),
    *rows(
        "preferred_batch_size max_queue_delay_microseconds",
        note="nothing queues in Triton: requests are batched by the iteration",
    ),
    *rows(
        "max_queue_size gpt_model_type gpt_model_path encoder_model_path max_beam_width",
    ),
    *rows(
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        note="read by Triton",
    ),
    *rows(
        "batch_scheduler_policy",
        note="an unknown one stops the load",
    ),
    *rows(
        "max_tokens_in_paged_kv_cache max_attention_window_size sink_token_length "
        "kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction kv_cache_host_memory_bytes "
        "kv_cache_onboard_blocks",
    ),
    *rows(
        "enable_kv_cache_reuse",
        note="default true, as in v0.19",
    ),
    *rows(
        "exclude_input_in_output cancellation_check_period_ms stats_check_period_ms "
        "iter_stats_max_iterations request_stats_max_iterations",
    ),
    *rows(
        "normalize_log_probs",
        note="default false, true in the peer's until March 2026: see above",
    ),
    *rows(
        "enable_chunked_context",
        note="on by default where max_seq_len is above max_num_tokens",
    ),
    *rows(
        "gpu_device_ids participant_ids num_nodes executor_worker_path",
    ),
    *rows(
        "worker_path",
        note="executor_worker_path to v0.9",
    ),
    *rows(
        "lora_cache_optimal_adapter_size lora_cache_max_adapter_size "
        "lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_prefetch_dir "
        "decoding_mode lookahead_window_size lookahead_ngram_size "
        "lookahead_verification_set_size medusa_choices eagle_choices gpu_weights_percent "
        "enable_context_fmha_fp32_acc multi_block_mode cuda_graph_mode cuda_graph_cache_size "
        "speculative_decoding_fast_logits tokenizer_dir guided_decoding_backend "
        "xgrammar_tokenizer_info_path max_kv_cache_length",
    ),
    *rows(
        "enable_trt_overlap",
        note="deprecated",
    ),
    *rows(
        "max_num_sequences",
        note="v0.5 to v0.8: max_batch_size",
    ),
)

_TEXT_INPUTS = (
    *rows(
        "text_input max_tokens decoder_text_input num_return_sequences bad_words stop_words "
        "exclude_input_in_output end_id pad_id top_k top_p temperature length_penalty "
        "repetition_penalty min_length",
    ),
    *rows(
        "min_tokens",
        note="after v0.19: min_length",
    ),
    *rows(
        "presence_penalty frequency_penalty random_seed",
    ),
    *rows(
        "seed",
        note="after v0.19: random_seed",
    ),
    *rows(
        "return_log_probs return_context_logits return_generation_logits return_perf_metrics",
    ),
    *rows(
        "return_kv_cache_reuse_stats",
        note="v0.16 to v0.18",
    ),
    *rows(
        "return_num_input_tokens return_num_output_tokens",
        note="after v0.19",
    ),
    *rows(
        "beam_width stream prompt_embedding_table prompt_table_extra_id prompt_vocab_size "
        "embedding_bias_words embedding_bias_weights lora_task_id lora_weights lora_config "
        "guided_decoding_guide_type guided_decoding_guide",
    ),
    *rows(
        "stop",
        note="in no text model of the peer either; cancel the call",
    ),
)
_TEXT_OUTPUTS = (
    *rows(
        "text_output cum_log_probs output_log_probs context_logits generation_logits "
        "batch_index sequence_index kv_cache_alloc_new_blocks kv_cache_reused_blocks "
        "kv_cache_alloc_total_blocks arrival_time_ns first_scheduled_time_ns "
        "first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens "
        "total_draft_tokens",
    ),
    *rows(
        "num_input_tokens num_output_tokens",
        note="after v0.19",
    ),
)

CLIENT_ROWS: tuple[ClientRow, ...] = (
    ClientRow(
        "uint32",
        "v0.5, v0.6",
        "send lengths and ids as UINT32, and a tensor has one type in Triton: `--set "
        "uint32_inputs=true`. Clients that send INT32, all later ones and ours, need another "
        "server",
    ),
    ClientRow(
        "lengths",
        "v0.5",
        "name no length to `postprocessing`",
    ),
    ClientRow(
        "unasked-outputs",
        "v0.6 to v0.13",
        "read `cum_log_probs` and `output_log_probs` that they have not asked for, from v0.8 "
        "on `context_logits` and `generation_logits`, too, and hand them to `postprocessing`, "
        "which hands them back",
    ),
    ClientRow(
        "batch-index",
        "v0.12, v0.13",
        "read `batch_index` of every response",
    ),
    ClientRow(
        "folded-ids",
        "v0.6 and later",
        "draw ids up to 2147483647 (`benchmark_core_model.py token-norm-dist`, `"
        "token-from-histogram`): `--set out_of_vocabulary=fold`, else such ids are refused",
    ),
    ClientRow(
        "end-id",
        "any",
        "an `end_id` outside the vocabulary ends nothing; SGLang's benchmark sends 1048576",
    ),
    ClientRow(
        "stop-and-stream",
        "any",
        "stop, stream and read ids",
    ),
)

MODELS: tuple[ModelRows, ...] = (
    ModelRows("tensorrt_llm", _LLM_INPUTS, _LLM_OUTPUTS, _LLM_PARAMETERS),
    ModelRows("ensemble", _TEXT_INPUTS + rows("image_input", note="v0.12"), _TEXT_OUTPUTS),
    ModelRows(
        "preprocessing",
        inputs=(
            *rows(
                "QUERY REQUEST_OUTPUT_LEN DECODER_QUERY IMAGE IMAGE_BYTES IMAGE_URL IMAGES "
                "VIDEO_BYTES PROMPT_EMBEDDING_TABLE BAD_WORDS_DICT STOP_WORDS_DICT "
                "EMBEDDING_BIAS_WORDS EMBEDDING_BIAS_WEIGHTS END_ID PAD_ID PROMPT_TABLE_EXTRA_ID",
            ),
        ),
        outputs=(
            *rows(
                "INPUT_ID REQUEST_INPUT_LEN DECODER_INPUT_ID REQUEST_DECODER_INPUT_LEN BAD_WORDS_IDS "
                "STOP_WORDS_IDS EMBEDDING_BIAS REQUEST_OUTPUT_LEN OUT_END_ID OUT_PAD_ID",
            ),
            *rows(
                "OUT_PROMPT_TABLE_EXTRA_IDS",
                note="zeros: no text is of a table",
            ),
            *rows(
                "PIXEL_VALUES ASPECT_RATIO_IDS ASPECT_RATIO_MASK IMAGE_SIZES CROSS_ATTENTION_MASK "
                "IS_VIDEO_INPUT VISION_INPUT_ID ATTENTION_MASK IMAGE_GRID_THW "
                "OUT_PROMPT_EMBEDDING_TABLE",
                note="of images",
            ),
        ),
        parameters=(
            *rows(
                "tokenizer_dir gpt_model_path add_special_tokens multimodal_model_path "
                "visual_model_path max_num_images hf_model_path tokenizer_type",
            ),
        ),
        note="v0.5 took all words of a list as one string with commas; here each word is a string.",
    ),
    ModelRows(
        "postprocessing",
        inputs=(
            *rows(
                "TOKENS_BATCH SEQUENCE_LENGTH",
            ),
            *rows(
                "CUM_LOG_PROBS OUTPUT_LOG_PROBS CONTEXT_LOGITS GENERATION_LOGITS BATCH_INDEX",
                note="to v0.13, passed on unchanged",
            ),
        ),
        outputs=(
            *rows(
                "OUTPUT",
            ),
            *rows(
                "OUT_CUM_LOG_PROBS OUT_OUTPUT_LOG_PROBS OUT_CONTEXT_LOGITS OUT_GENERATION_LOGITS "
                "OUT_BATCH_INDEX",
                note="to v0.13, passed on unchanged",
            ),
        ),
        parameters=(
            *rows(
                "tokenizer_dir tokenizer_type skip_special_tokens",
            ),
        ),
    ),
    ModelRows(
        "tensorrt_llm_bls",
        inputs=(
            *_TEXT_INPUTS,
            *rows(
                "image_input image_bytes_input image_url_input video_bytes_input num_draft_tokens "
                "use_draft_logits"
            ),
        ),
        outputs=_TEXT_OUTPUTS,
        parameters=(
            *rows(
                "accumulate_tokens tensorrt_llm_model_name tensorrt_llm_draft_model_name "
                "multimodal_encoders_name",
            ),
        ),
    ),
    ModelRows(
        "vllm_model",
        inputs=(
            *rows(
                "text_input stream sampling_parameters exclude_input_in_output return_finish_reason "
                "return_num_input_tokens return_num_output_tokens return_cumulative_logprob "
                "return_logprobs image embedding_request",
            ),
        ),
        outputs=(
            *rows(
                "text_output finish_reason num_input_tokens num_output_tokens cumulative_logprob "
                "logprobs",
            ),
        ),
        parameters=(
            *rows(
                "REPORT_CUSTOM_METRICS ENABLE_VLLM_HEALTH_CHECK",
            ),
        ),
        note="vLLM's backend names its models freely; this is the name of its samples.",
    ),
    ModelRows(
        "tensorrt_llm",
        inputs=(
            *rows(
                "text_input streaming stop return_finish_reason image_url return_stop_reason "
                "sampling_param_best_of",
            ),
            *(Row(name, f"here `{ours}`") for name, ours in LLM_API_INPUT_MAP.items()),
            *rows(
                "lora_id lora_name lora_path lora_ckpt_source",
            ),
        ),
        outputs=(
            *rows(
                "text_output finish_reason stop_reason cumulative_logprob kv_cache_reused_block "
                "kv_cache_missed_block kv_cache_hit_rate kv_cache_alloc_new_blocks "
                "kv_cache_alloc_total_blocks arrival_time_ns first_scheduled_time_ns "
                "first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens "
                "total_draft_tokens",
            ),
        ),
        note="The model of that name in TensorRT-LLM's LLM API (2025 and later). Most of what "
        "it takes has another name here; a request under the old one is told the new one.",
        is_llm_api=True,
    ),
)
