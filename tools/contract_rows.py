"""What clients of the peer's models send, ask for and configure: the rows of docs/compatibility.md.

One row per input, output and parameter of `tensorrtllm_backend` v0.5 to v0.19 and later, in the
order of its configs; metrics are in `contract_metrics`. What is honoured follows from
`inflight_protocol` and `model_repository`; a row names the tests or what is in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight_protocol.aliases import LLM_API_INPUT_MAP

_B, _E, _T = "backend/", "backend/engine/", "backend/triton/"
CONTRACT, SAMPLING = "e2e/test_contract.py::test_", "e2e/test_sampling.py::test_"
_ARRIVES = f"{_B}test_sampling_validation.py::test_everything_arrives"
_ORACLE = f"{_E}test_adjustments.py::test_greedy_answers_are_those_of_transformers"
_DRAWS = f"{_E}test_engine.py::test_draws_follow_the_logits_of_transformers"
_LOGITS = f"{_B}test_request_outputs.py::test_logits_are_those_of_transformers"
_NUMBERS = f"{_B}test_request_outputs.py::test_numbers_and_times"
_ENSEMBLE = "e2e/test_serve.py::test_settings_of_the_ensemble_reach_the_model"
_MAPPED = f"{_B}test_model_repository.py::test_the_committed_configs_are_those_that_the_tables_make"
_OLDER = "e2e/test_sampling.py::test_the_older_name_of_return_perf_metrics"
_NEWER = "e2e/test_serve.py::test_newer_names_reach_the_model_through_the_ensemble"
_RELAY = "e2e/test_model_repository.py::test_the_relay_accumulates_and_passes_errors_on"
_SAME = f"{_B}test_model_repository.py::test_the_relay_has_the_tensors_of_the_ensemble"
_CALLS = "e2e/test_model_repository.py::test_tokenising_generating_and_decoding_in_three_calls"
_REACHES = f"{_B}test_compatibility.py::test_settings_reach_the_batch_manager"
_BEAMS = "e2e/test_beams.py::test_beams_whole_and_as_they_grow"
_VLLM = (
    f"{_T}test_vllm_model.py::test_tritons_openai_frontend",
    "e2e/test_model_repository.py::test_the_sample_client_of_vllms_backend",
)
_VLLM_SUMS = "e2e/test_model_repository.py::test_vllms_sums_of_log_probabilities"
_VLLM_LOG_PROBS = (
    f"{_T}test_vllm_log_probs.py::test_values_and_ranks_are_those_of_transformers",
    "e2e/test_model_repository.py::test_vllms_log_probabilities_of_tokens",
)
_TYPED = f"{_B}test_parameters.py::test_values_are_typed"

REFUSALS = {
    "input": ("backend/test_compatibility.py::test_every_refused_input_is_refused_by_name",),
    "output": ("backend/test_compatibility.py::test_every_refused_output_is_refused_by_name",),
    "parameter": (
        "backend/test_compatibility.py::test_every_refused_parameter_is_refused_by_name",
    ),
    "absent": (
        "e2e/test_model_repository.py::test_what_a_model_lacks_is_refused_by_name",
        "e2e/test_model_repository.py::test_unknown_fields_and_parameters_are_refused_by_name",
    ),
    "absent output": ("e2e/test_model_repository.py::test_what_a_model_lacks_is_refused_by_name",),
    "absent parameter": (
        "backend/test_compatibility.py::test_unknown_settings_are_refused_by_name",
    ),
}
"""Kind of what is refused -> the tests that go through all of that kind."""


@dataclass(frozen=True, slots=True)
class Row:
    """A name of the peer's; ``note``: versions it is of, or what stands in its place."""

    name: str
    tests: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class ModelRows:
    """What one model takes, answers and reads."""

    model: str
    inputs: tuple[Row, ...] = ()
    outputs: tuple[Row, ...] = ()
    parameters: tuple[Row, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class ClientRow:
    """What clients of some ``tags`` do that others do not."""

    tags: str
    needs: str
    tests: tuple[str, ...]


def rows(names: str, *tests: str, note: str = "") -> tuple[Row, ...]:
    """Rows of names divided by blanks that the same tests show."""
    return tuple(Row(name, tests, note) for name in names.split())


_V1_TEST = "e2e/test_scheduling.py::test_v1_answers_in_lock_step_with_statistics_of_its_own"

_LLM_INPUTS = (
    *rows("input_ids", f"{CONTRACT}tokens_stream_from_tensorrt_llm"),
    *rows("encoder_input_features encoder_output_lengths"),
    *rows("input_lengths", f"{_T}test_rows.py::test_each_row_gets_its_own_answer"),
    *rows(
        "request_output_len", f"{_B}test_request_validation.py::test_refused_with_field_and_bound"
    ),
    *rows("num_return_sequences", f"{_T}test_sequences.py::test_several_sequences_are_one_request"),
    *rows(
        "draft_input_ids", f"{_B}test_speculative.py::test_the_drafts_of_a_client_change_no_answer"
    ),
    *rows("decoder_input_ids decoder_input_lengths"),
    *rows("draft_logits draft_acceptance_threshold"),
    *rows(
        "end_id",
        f"{_B}test_gpt_manager.py::test_end_id_ends_the_request_and_is_not_part_of_the_answer",
    ),
    *rows("pad_id", f"{_B}test_request_validation.py::test_accepted_values_arrive"),
    *rows("stop_words_list", f"{_B}test_stop_words.py::test_requests_end_with_their_reason"),
    *rows(
        "bad_words_list", _ARRIVES, _ORACLE, f"{SAMPLING}a_bad_word_that_is_every_token_is_an_error"
    ),
    *rows(
        "embedding_bias",
        _ARRIVES,
        f"{_T}test_sequences.py::test_words_become_tokens",
        f"{_B}test_beam_search.py::test_the_beams_are_those_of_transformers_whatever_runs_beside_them",
    ),
    *rows(
        "beam_width",
        f"{_B}test_beam_search.py::test_the_beams_are_those_of_transformers_whatever_runs_beside_them",
    ),
    *rows("temperature runtime_top_k runtime_top_p", _ARRIVES, _DRAWS),
    *rows(
        "runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids",
        _ARRIVES,
        f"{_E}test_adjustments.py::test_top_p_decays_and_resets",
    ),
    *rows(
        "len_penalty early_stopping",
        f"{_B}test_beam_search.py::test_the_beams_are_those_of_transformers_whatever_runs_beside_them",
    ),
    *rows("repetition_penalty", _ARRIVES, _ORACLE),
    *rows(
        "presence_penalty frequency_penalty",
        _ARRIVES,
        f"{_E}test_adjustments.py::test_penalties_count_prompt_and_answer",
    ),
    *rows(
        "beam_search_diversity_rate",
        f"{_B}test_beam_search.py::test_a_diversity_rate_on_the_wire_changes_the_winners",
        f"{_B}test_request_validation.py::test_refused_with_field_and_bound",
    ),
    *rows("min_length", f"{CONTRACT}min_length_holds_the_end_back", note="to v0.19"),
    *rows(
        "min_tokens",
        f"{_B}test_request_validation.py::test_accepted_values_arrive",
        note="after v0.19: min_length",
    ),
    *rows(
        "random_seed",
        f"{_T}test_sampling_parameters.py::test_settings_become_tensors",
        _ENSEMBLE,
        note="to v0.19",
    ),
    *rows(
        "seed",
        f"{CONTRACT}seeded_sampling_repeats_whatever_runs_beside_it",
        note="after v0.19: random_seed",
    ),
    *rows("return_log_probs return_context_logits return_generation_logits", _LOGITS),
    *rows("return_perf_metrics", _NUMBERS),
    *rows("return_kv_cache_reuse_stats", _OLDER, note="v0.16 to v0.18: return_perf_metrics"),
    *rows("return_num_input_tokens return_num_output_tokens", _NUMBERS, note="after v0.19"),
    *rows(
        "exclude_input_in_output",
        f"{_B}test_gpt_manager.py::test_request_tensor_overrides_exclude_input_in_output",
    ),
    *rows("stop", f"{CONTRACT}stop_by_id_ends_a_stream_and_gives_its_blocks_back"),
    *rows("streaming", f"{CONTRACT}tokens_stream_from_tensorrt_llm"),
    *rows("prompt_embedding_table prompt_table_extra_ids prompt_vocab_size cross_attention_mask"),
    *rows("mrope_rotary_cos_sin mrope_position_deltas lora_task_id lora_weights lora_config"),
    *rows("context_phase_params skip_cross_attn_blocks"),
    *rows("retention_token_range_starts retention_token_range_ends"),
    *rows("retention_token_range_priorities retention_token_range_durations_ms"),
    *rows("retention_decode_priority retention_decode_duration_ms"),
    *rows(
        "guided_decoding_guide_type guided_decoding_guide", "e2e/test_guided.py::test_answers_parse"
    ),
    *rows("lookahead_window_size lookahead_ngram_size lookahead_verification_set_size"),
    *rows("no_repeat_ngram_size", _ARRIVES, _ORACLE, note="read by the C++ backend, in no config"),
    *rows("noRepeatNgramSize", _ARRIVES, note="its name in GptManager"),
    *rows(
        "runtime_top_k_min",
        note="what the C++ backend reads where the config says runtime_top_p_min",
    ),
)
_TIMES = "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"
_PERF = (
    f"kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks {_TIMES} "
    "acceptance_rate total_accepted_draft_tokens total_draft_tokens"
)
_NAMED = f"{SAMPLING}named_outputs_arrive"
_ROWS = f"{_T}test_rows.py::test_rows_and_sequences_together"
_LLM_OUTPUTS = (
    *rows("output_ids sequence_length", f"{CONTRACT}tokens_stream_from_tensorrt_llm"),
    *rows("cum_log_probs output_log_probs context_logits generation_logits", _LOGITS, _NAMED),
    *rows("batch_index sequence_index", _ROWS),
    *rows("context_phase_params"),
    *rows(_PERF, _NUMBERS, _NAMED),
    *rows("num_input_tokens num_output_tokens", _NUMBERS, note="after v0.19"),
)
_PLACE = "e2e/test_model_repository.py::test_whole_answers_with_http"
_POLICY = f"{CONTRACT}200_streams_count_without_a_gap_with_a_quarter_of_the_kv_they_need"
_FILL = f"{_B}serve/test_model_repository_command.py::test_it_writes_what_triton_loads"
_LLM_PARAMETERS = (
    *rows("triton_backend", note="always python"),
    *rows(
        "triton_max_batch_size decoupled_mode",
        f"{_B}test_model_repository.py::test_llm_is_one_decoupled_python_instance_on_the_cpu",
        _PLACE,
        note="values of the template",
    ),
    *rows("logits_datatype", note="a value of the template: always TYPE_FP32"),
    *rows(
        "encoder_input_features_data_type prompt_embedding_table_data_type",
        note="values of the template: tensors that are refused",
    ),
    *rows(
        "preferred_batch_size max_queue_delay_microseconds",
        note="nothing queues in Triton: requests are batched by the iteration",
    ),
    *rows(
        "max_queue_size",
        "e2e/test_scheduling.py::test_priorities_deadlines_and_the_limit_count_in_the_queue",
    ),
    *rows("gpt_model_type", _TYPED, _V1_TEST),
    *rows("gpt_model_path", _FILL),
    *rows("encoder_model_path"),
    *rows(
        "max_beam_width",
        f"{_B}test_parameters.py::test_bad_values_name_key_and_bound",
        _BEAMS,
    ),
    *rows(
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        f"{_B}test_model_repository.py::test_the_committed_configs_are_those_that_the_tables_make",
        note="read by Triton",
    ),
    *rows("batch_scheduler_policy", _TYPED, _POLICY, note="an unknown one stops the load"),
    *rows("max_tokens_in_paged_kv_cache", _POLICY),
    *rows("max_attention_window_size sink_token_length"),
    *rows("kv_cache_free_gpu_mem_fraction", _REACHES, _TYPED),
    *rows("cross_kv_cache_fraction kv_cache_host_memory_bytes kv_cache_onboard_blocks"),
    *rows(
        "enable_kv_cache_reuse",
        _REACHES,
        note="default true, as in v0.19",
    ),
    *rows(
        "exclude_input_in_output",
        _TYPED,
        f"{_B}test_compatibility.py::test_settings_reach_the_model",
    ),
    *rows(
        "cancellation_check_period_ms stats_check_period_ms",
        f"{_B}test_compatibility.py::test_settings_reach_the_model",
    ),
    *rows("iter_stats_max_iterations request_stats_max_iterations"),
    *rows(
        "normalize_log_probs",
        f"{_B}test_request_outputs.py::test_normalized_log_probs_are_those_of_what_could_be_drawn",
        _REACHES,
        note="default false, true in the peer's until March 2026: see above",
    ),
    *rows(
        "enable_chunked_context",
        f"{_B}test_scheduling_options.py::test_a_prompt_over_the_token_budget_runs_in_chunks",
        f"{_B}test_scheduling_options.py::"
        "test_contexts_run_in_chunks_by_default_where_a_step_may_not_hold_them",
        note="on by default where max_seq_len is above max_num_tokens",
    ),
    *rows("gpu_device_ids participant_ids num_nodes executor_worker_path"),
    *rows("worker_path", note="executor_worker_path to v0.9"),
    *rows("lora_cache_optimal_adapter_size lora_cache_max_adapter_size"),
    *rows("lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_prefetch_dir"),
    *rows("decoding_mode lookahead_window_size lookahead_ngram_size"),
    *rows("lookahead_verification_set_size medusa_choices eagle_choices"),
    *rows("gpu_weights_percent enable_context_fmha_fp32_acc multi_block_mode"),
    *rows(
        "cuda_graph_mode",
        f"{_E}test_server_parameters.py::test_kernels_and_types_are_the_ones_asked_for",
    ),
    *rows("cuda_graph_cache_size speculative_decoding_fast_logits"),
    *rows("tokenizer_dir", f"{_B}serve/test_checks.py::test_tokenizer_folder_given_must_hold_one"),
    *rows(
        "guided_decoding_backend",
        f"{_B}guided/test_answers.py::test_a_server_that_guides_nothing_says_so",
        _REACHES,
    ),
    *rows("xgrammar_tokenizer_info_path max_kv_cache_length"),
    *rows("enable_trt_overlap", note="deprecated"),
    *rows("max_num_sequences", note="v0.5 to v0.8: max_batch_size"),
)

_TEXT_INPUTS = (
    *rows("text_input max_tokens", "e2e/test_serve.py::test_text_streams_over_http"),
    *rows("decoder_text_input"),
    *rows("num_return_sequences", f"{SAMPLING}several_sequences"),
    *rows("bad_words", f"{_T}test_sequences.py::test_words_become_tokens", _MAPPED),
    *rows("stop_words", f"{SAMPLING}stop_words_over_http"),
    *rows("exclude_input_in_output", _PLACE),
    *rows(
        "end_id pad_id top_k top_p temperature length_penalty repetition_penalty",
        _MAPPED,
        _ENSEMBLE,
    ),
    *rows("min_length", "e2e/test_model_repository.py::test_genai_perf"),
    *rows("min_tokens", _MAPPED, _NEWER, note="after v0.19: min_length"),
    *rows("presence_penalty frequency_penalty random_seed", _MAPPED, _ENSEMBLE),
    *rows("seed", _MAPPED, _NEWER, note="after v0.19: random_seed"),
    *rows("return_log_probs return_context_logits return_generation_logits", _MAPPED, _NAMED),
    *rows("return_perf_metrics", _MAPPED, _NAMED),
    *rows("return_kv_cache_reuse_stats", _MAPPED, _OLDER, note="v0.16 to v0.18"),
    *rows("return_num_input_tokens return_num_output_tokens", _MAPPED, _NAMED, note="after v0.19"),
    *rows("beam_width", _MAPPED, _BEAMS),
    *rows("stream", "e2e/test_serve.py::test_text_streams_over_http"),
    *rows("prompt_embedding_table prompt_table_extra_id prompt_vocab_size"),
    *rows(
        "embedding_bias_words embedding_bias_weights",
        f"{_T}test_sequences.py::test_words_become_tokens",
    ),
    *rows("lora_task_id lora_weights lora_config"),
    *rows(
        "guided_decoding_guide_type guided_decoding_guide", "e2e/test_guided.py::test_answers_parse"
    ),
    *rows("stop", note="in no text model of the peer either; cancel the call"),
)
_TEXT_OUTPUTS = (
    *rows("text_output", "e2e/test_model_repository.py::test_whole_answers_with_http"),
    *rows("cum_log_probs output_log_probs context_logits generation_logits", _MAPPED, _NAMED),
    *rows("batch_index sequence_index", _MAPPED, f"{SAMPLING}several_sequences"),
    *rows(_PERF, _MAPPED, _NAMED),
    *rows("num_input_tokens num_output_tokens", _MAPPED, _NAMED, note="after v0.19"),
)

_WORDS = f"{_T}test_text_models.py::test_words_are_ids_and_ends"
_PADDED = f"{_T}test_text_models.py::test_rows_are_padded_to_the_longest"
_NEUTRAL = f"{_T}test_text_models.py::test_what_is_not_asked_for_is_neutral"
_OWN_IDS = f"{_T}test_text_models.py::test_ids_of_the_client_win"
_NO_TABLE = f"{_T}test_text_models.py::test_an_id_of_a_prompt_table_marks_no_token_of_a_text"
_BIAS = f"{_T}test_text_models.py::test_bias_words_weigh_on_their_tokens"
_DECODED = f"{_T}test_text_models.py::test_answers_are_decoded_up_to_their_length"
_SPECIAL = f"{_T}test_text_models.py::test_special_tokens_may_be_left_to_the_client"
_OTHER = (
    f"{_B}serve/test_model_repository_command.py::test_every_other_model_is_written_when_asked_for"
)

_PASSED = "CUM_LOG_PROBS OUTPUT_LOG_PROBS CONTEXT_LOGITS GENERATION_LOGITS BATCH_INDEX"
_PASSED_OUT = " ".join(f"OUT_{name}" for name in _PASSED.split())
_TO_V13 = "to v0.13, passed on unchanged"
_COMES_BACK = (
    f"{_T}test_text_models.py::test_what_comes_beside_the_tokens_of_older_clients_comes_back"
)

_OLD = "e2e/test_old_clients.py::test_"

CLIENT_ROWS: tuple[ClientRow, ...] = (
    ClientRow(
        "v0.5, v0.6",
        "send lengths and ids as UINT32, and a tensor has one type in Triton: `--set "
        "uint32_inputs=true`. Clients that send INT32, all later ones and ours, need another server",
        (
            f"{_OLD}the_clients_with_uint32",
            f"{_OLD}end_to_end_streaming_client",
            f"{_OLD}inflight_batcher_llm_client_streams_with_uint32",
        ),
    ),
    ClientRow(
        "v0.5",
        "name no length to `postprocessing`",
        (f"{_OLD}the_clients_with_uint32",),
    ),
    ClientRow(
        "v0.6 to v0.13",
        "read `cum_log_probs` and `output_log_probs` that they have not asked for, from v0.8 on "
        "`context_logits` and `generation_logits`, too, and hand them to `postprocessing`, which "
        "hands them back",
        (f"{_OLD}end_to_end_test", f"{_OLD}e2e_grpc_speculative_decoding_client"),
    ),
    ClientRow(
        "v0.12, v0.13",
        "read `batch_index` of every response",
        (f"{_OLD}end_to_end_grpc_client_streams", f"{_OLD}end_to_end_grpc_client"),
    ),
    ClientRow(
        "v0.6 and later",
        "draw ids up to 2147483647 (`benchmark_core_model.py token-norm-dist`, "
        "`token-from-histogram`): `--set out_of_vocabulary=fold`, else such ids are refused",
        (f"{_OLD}benchmark_core_model",),
    ),
    ClientRow(
        "any",
        "an `end_id` outside the vocabulary ends nothing; SGLang's benchmark sends 1048576",
        (f"{_OLD}an_end_id_that_no_vocabulary_has_ends_nothing",),
    ),
    ClientRow("any", "stop, stream and read ids", (f"{_OLD}inflight_batcher_llm_client_streams",)),
)

MODELS: tuple[ModelRows, ...] = (
    ModelRows("tensorrt_llm", _LLM_INPUTS, _LLM_OUTPUTS, _LLM_PARAMETERS),
    ModelRows("ensemble", _TEXT_INPUTS + rows("image_input", note="v0.12"), _TEXT_OUTPUTS),
    ModelRows(
        "preprocessing",
        (
            *rows("QUERY REQUEST_OUTPUT_LEN", _PADDED, _CALLS),
            *rows("DECODER_QUERY", _NEUTRAL),
            *rows("IMAGE IMAGE_BYTES IMAGE_URL IMAGES VIDEO_BYTES PROMPT_EMBEDDING_TABLE"),
            *rows("BAD_WORDS_DICT STOP_WORDS_DICT", _WORDS),
            *rows("EMBEDDING_BIAS_WORDS EMBEDDING_BIAS_WEIGHTS", _BIAS),
            *rows("END_ID PAD_ID", _OWN_IDS),
            *rows("PROMPT_TABLE_EXTRA_ID", _NO_TABLE),
        ),
        (
            *rows("INPUT_ID REQUEST_INPUT_LEN", _PADDED, _CALLS),
            *rows("DECODER_INPUT_ID REQUEST_DECODER_INPUT_LEN", _NEUTRAL),
            *rows("BAD_WORDS_IDS STOP_WORDS_IDS", _WORDS),
            *rows("EMBEDDING_BIAS", _BIAS),
            *rows("REQUEST_OUTPUT_LEN OUT_END_ID OUT_PAD_ID", _NEUTRAL, _CALLS),
            *rows("OUT_PROMPT_TABLE_EXTRA_IDS", _NO_TABLE, note="zeros: no text is of a table"),
            *rows("PIXEL_VALUES ASPECT_RATIO_IDS ASPECT_RATIO_MASK IMAGE_SIZES", note="of images"),
            *rows("CROSS_ATTENTION_MASK IS_VIDEO_INPUT VISION_INPUT_ID", note="of images"),
            *rows("ATTENTION_MASK IMAGE_GRID_THW OUT_PROMPT_EMBEDDING_TABLE", note="of images"),
        ),
        (
            *rows("tokenizer_dir gpt_model_path", _OTHER),
            *rows("add_special_tokens", _SPECIAL),
            *rows("multimodal_model_path visual_model_path max_num_images hf_model_path"),
            *rows("tokenizer_type"),
        ),
        "v0.5 took all words of a list as one string with commas; here each word is a string.",
    ),
    ModelRows(
        "postprocessing",
        rows("TOKENS_BATCH SEQUENCE_LENGTH", _DECODED, _CALLS)
        + rows(_PASSED, _COMES_BACK, note=_TO_V13),
        rows("OUTPUT", _DECODED, _CALLS) + rows(_PASSED_OUT, _COMES_BACK, note=_TO_V13),
        (
            *rows("tokenizer_dir", _OTHER),
            *rows("tokenizer_type"),
            *rows(
                "skip_special_tokens",
                _OTHER,
                f"{_T}test_text_models.py::test_special_tokens_may_be_shown",
            ),
        ),
    ),
    ModelRows(
        "tensorrt_llm_bls",
        (
            *(Row(row.name, (_SAME, _RELAY), row.note) for row in _TEXT_INPUTS),
            *rows("image_input image_bytes_input image_url_input video_bytes_input"),
            *rows("num_draft_tokens use_draft_logits"),
        ),
        tuple(Row(row.name, (_SAME, _RELAY), row.note) for row in _TEXT_OUTPUTS),
        (
            *rows("accumulate_tokens", _RELAY),
            *rows(
                "tensorrt_llm_model_name",
                f"{_T}test_bls_model.py::test_it_calls_the_model_that_is_named",
            ),
            *rows("tensorrt_llm_draft_model_name multimodal_encoders_name"),
        ),
    ),
    ModelRows(
        "vllm_model",
        (
            *rows("text_input stream sampling_parameters exclude_input_in_output", *_VLLM),
            *rows("return_finish_reason return_num_input_tokens return_num_output_tokens", *_VLLM),
            *rows("return_cumulative_logprob", _VLLM_SUMS),
            *rows("return_logprobs", *_VLLM_LOG_PROBS),
            *rows("image embedding_request"),
        ),
        (
            *rows("text_output finish_reason num_input_tokens num_output_tokens", *_VLLM),
            *rows("cumulative_logprob", _VLLM_SUMS),
            *rows("logprobs", *_VLLM_LOG_PROBS),
        ),
        rows("REPORT_CUSTOM_METRICS ENABLE_VLLM_HEALTH_CHECK"),
        note="vLLM's backend names its models freely; this is the name of its samples.",
    ),
    ModelRows(
        "tensorrt_llm",
        (
            *rows("text_input", f"{_T}test_triton_model.py::test_text_in_text_out"),
            *rows("streaming", f"{CONTRACT}tokens_stream_from_tensorrt_llm"),
            *rows("stop", f"{CONTRACT}stop_by_id_ends_a_stream_and_gives_its_blocks_back"),
            *rows(
                "return_finish_reason",
                f"{_T}test_triton_model.py::test_the_reason_comes_with_the_last_response_to_who_asks",
            ),
            *rows("image_url return_stop_reason sampling_param_best_of"),
            *(Row(name, note=f"here `{ours}`") for name, ours in LLM_API_INPUT_MAP.items()),
            *rows("lora_id lora_name lora_path lora_ckpt_source"),
        ),
        (
            *rows("text_output", f"{_T}test_triton_model.py::test_text_in_text_out"),
            *rows("finish_reason", f"{SAMPLING}stop_words_over_http"),
            *rows("stop_reason cumulative_logprob kv_cache_reused_block kv_cache_missed_block"),
            *rows("kv_cache_hit_rate"),
            *rows(_PERF.replace("kv_cache_reused_blocks ", ""), _NUMBERS, _NAMED),
        ),
        note="The model of that name in TensorRT-LLM's LLM API (2025 and later). Most of what it "
        "takes has another name here; a request under the old one is told the new one.",
    ),
)
