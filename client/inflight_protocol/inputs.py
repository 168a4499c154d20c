"""Every input tensor of the model, in the order of `config.pbtxt`."""

from __future__ import annotations

from inflight_protocol.sampling import SAMPLING_INPUTS
from inflight_protocol.specs import (
    EMPTY,
    ONLY_ZEROS,
    TensorSpec,
    ragged,
    refused,
    scalar,
)

_ROWS: tuple[TensorSpec | str, ...] = (
    # A name stands for a row of the table of sampling settings, here only for the order.
    ragged("input_ids", "INT32", (-1,), "prompt as token ids"),
    refused(ragged("encoder_input_features", "FP16", (-1, -1), "features for an encoder"), EMPTY),
    refused(scalar("encoder_output_lengths", "INT32", "encoder output length")),
    scalar("input_lengths", "INT32", "number of ids of the prompt that count"),
    scalar("request_output_len", "INT32", "maximum number of new tokens"),
    scalar("num_return_sequences", "INT32", "sequences to return for the prompt"),
    ragged("draft_input_ids", "INT32", (-1,), "guesses at how the answer begins"),
    ragged(
        "decoder_input_ids",
        "INT32",
        (-1,),
        "how the answer starts, where an encoder reads the prompt; default: as the checkpoint says",
    ),
    scalar("decoder_input_lengths", "INT32", "number of these ids that count"),
    refused(ragged("draft_logits", "FP16", (-1, -1), "logits of the draft tokens"), EMPTY),
    refused(scalar("draft_acceptance_threshold", "FP32", "acceptance threshold of drafts")),
    scalar(
        "end_id", "INT32", "token that ends the answer; -1, or one outside the vocabulary = none"
    ),
    scalar("pad_id", "INT32", "token that pads beams of unequal length"),
    ragged("stop_words_list", "INT32", (2, -1), "stop words as token ids and end offsets"),
    ragged("bad_words_list", "INT32", (2, -1), "forbidden words as token ids and end offsets"),
    ragged("embedding_bias", "FP32", (-1,), "bias added to the logits"),
    scalar("beam_width", "INT32", "number of beams; default 1: no search"),
    "temperature",
    "runtime_top_k",
    "runtime_top_p",
    "runtime_top_p_min",
    "runtime_top_p_decay",
    "runtime_top_p_reset_ids",
    scalar("len_penalty", "FP32", "scores of beams are divided by length ** this; default 0"),
    scalar("early_stopping", "BOOL", "end with as many answers as beams; default true"),
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    scalar("beam_search_diversity_rate", "FP32", "added to a beam's score times its rank"),
    "min_length",
    scalar("min_tokens", "INT32", "newer name of min_length"),
    "random_seed",
    scalar("seed", "UINT64", "newer name of random_seed"),
    scalar("return_log_probs", "BOOL", "return log probabilities"),
    scalar("return_context_logits", "BOOL", "return the logits of the prompt"),
    scalar("return_generation_logits", "BOOL", "return the logits of new tokens"),
    scalar("return_perf_metrics", "BOOL", "return times and cache use of the request"),
    scalar("return_kv_cache_reuse_stats", "BOOL", "older name of return_perf_metrics"),
    scalar("return_num_input_tokens", "BOOL", "return num_input_tokens"),
    scalar("return_num_output_tokens", "BOOL", "return num_output_tokens"),
    scalar("return_num_cached_tokens", "BOOL", "return num_cached_tokens"),
    scalar("exclude_input_in_output", "BOOL", "leave the prompt out of the answer"),
    scalar("stop", "BOOL", "end the running request that has this request id"),
    scalar("streaming", "BOOL", "a response whenever there are new tokens, not one at the end"),
    refused(ragged("prompt_embedding_table", "FP16", (-1, -1), "p-tuning table"), EMPTY),
    refused(
        ragged("prompt_table_extra_ids", "UINT64", (-1,), "ids of prompt table rows"), ONLY_ZEROS
    ),
    refused(scalar("prompt_vocab_size", "INT32", "rows of the p-tuning table"), 0),
    refused(
        ragged("cross_attention_mask", "BOOL", (-1, -1), "mask over the encoder output"), EMPTY
    ),
    refused(TensorSpec("mrope_rotary_cos_sin", "FP32", (-1,), "multimodal rope"), EMPTY),
    refused(TensorSpec("mrope_position_deltas", "INT64", (1,), "multimodal rope")),
    scalar("lora_task_id", "UINT64", "adapter id: its weights need to come with the first request"),
    ragged("lora_weights", "FP16", (-1, -1), "adapter weights, a row for each module of a layer"),
    ragged("lora_config", "INT32", (-1, -1), "modules, layers and ranks of these rows"),
    refused(
        ragged("context_phase_params", "UINT8", (-1,), "state of a disaggregated context phase"),
        EMPTY,
    ),
    refused(ragged("skip_cross_attn_blocks", "BOOL", (1,), "skip cross attention"), False),
    refused(
        ragged("retention_token_range_starts", "INT32", (-1,), "cache retention: range starts"),
        EMPTY,
    ),
    refused(
        ragged("retention_token_range_ends", "INT32", (-1,), "cache retention: range ends"), EMPTY
    ),
    refused(
        ragged("retention_token_range_priorities", "INT32", (-1,), "cache retention: priorities"),
        EMPTY,
    ),
    refused(
        ragged("retention_token_range_durations_ms", "INT32", (-1,), "cache retention: durations"),
        EMPTY,
    ),
    refused(
        ragged(
            "retention_decode_priority",
            "INT32",
            (1,),
            "cache retention: priority of generated blocks",
        )
    ),
    refused(
        ragged(
            "retention_decode_duration_ms",
            "INT32",
            (1,),
            "cache retention: duration of generated blocks",
        )
    ),
    ragged(
        "guided_decoding_guide_type",
        "STRING",
        (1,),
        "json, json_schema, regex, ebnf_grammar or structural_tag: what the answer must be",
    ),
    ragged(
        "guided_decoding_guide", "STRING", (1,), "the JSON schema, regex or grammar (not for json)"
    ),
    refused(ragged("lookahead_window_size", "INT32", (1,), "lookahead decoding")),
    refused(ragged("lookahead_ngram_size", "INT32", (1,), "lookahead decoding")),
    refused(ragged("lookahead_verification_set_size", "INT32", (1,), "lookahead decoding")),
    # Ours, or read by the peer without being in its config.
    "min_p",
    "no_repeat_ngram_size",
    scalar("noRepeatNgramSize", "INT32", "name of no_repeat_ngram_size in GptManager"),
    "prompt_ignore_length",
    scalar("logits_post_processor_name", "STRING", "which of `logits_processors` to apply"),
    scalar("num_top_log_probs", "INT32", "likeliest tokens to tell for each new one; up to 20"),
    scalar(
        "return_log_prob_ranks", "BOOL", "tell of each new token how many are at least as likely"
    ),
    scalar(
        "return_context_log_probs",
        "BOOL",
        "return the log probability of each token of the prompt but the first",
    ),
    ragged("stop_token_ids", "INT32", (-1,), "tokens that end the answer as end_id does"),
    ragged("lora_name", "STRING", (1,), "an adapter that the server knows by this name"),
    ragged(
        "encoder_input_ids",
        "INT32",
        (-1,),
        "what the encoder reads, if input_ids is how the answer starts (as in the Executor API)",
    ),
    # Ours: text in and out of the same model, and the live feed of statistics.
    TensorSpec("text_input", "STRING", (1,), "prompt as text"),
    TensorSpec("return_finish_reason", "BOOL", (1,), "send finish_reason at the end"),
    TensorSpec("stop_words", "STRING", (-1,), "texts that end the answer"),
    TensorSpec(
        "include_stop_str_in_output",
        "BOOL",
        (1,),
        "the stop word that ends the answer is part of its text",
    ),
    TensorSpec("skip_special_tokens", "BOOL", (1,), "special tokens have no text; default true"),
    TensorSpec("bad_words", "STRING", (-1,), "texts that are not generated"),
    TensorSpec("embedding_bias_words", "STRING", (-1,), "texts whose tokens get a bias"),
    TensorSpec("embedding_bias_weights", "FP32", (-1,), "bias of each of these texts"),
    TensorSpec("max_tokens", "INT32", (1,), "request_output_len of text clients"),
    TensorSpec("stream", "BOOL", (1,), "streaming of text clients"),
    TensorSpec(
        "sampling_parameters",
        "STRING",
        (1,),
        "settings of vLLM's clients, a JSON object of up to 64 KiB",
    ),
    TensorSpec("stats", "BOOL", (1,), "stream the statistics of every iteration instead"),
    TensorSpec("describe", "BOOL", (1,), "say what is served: limits, tokenizer"),
    TensorSpec("ready", "BOOL", (1,), "error unless requests will be served now"),
    TensorSpec("why", "BOOL", (1,), "say why the request of this id waits"),
    TensorSpec("recording", "BOOL", (1,), "send the recorded decisions"),
    TensorSpec(
        "lora_adapters",
        "BOOL",
        (1,),
        "name the adapters, after loading lora_name from lora_path, or unloading it without one",
    ),
    TensorSpec("lora_path", "STRING", (1,), "folder below the server's lora_root, to be loaded"),
    TensorSpec("live", "BOOL", (1,), "say what is in flight and what has happened lately"),
    TensorSpec("live_since", "STRING", (1,), "the cursor of the live answer before"),
    TensorSpec("live_blocks", "BOOL", (1,), "say in it which request holds which block"),
    TensorSpec("shared", "BOOL", (1,), "stream the answers of requests that name this one"),
    # Ours: when a request runs, and with whom it shares cached text. Names as in the Executor API
    # (priority, allottedTimeMs); its cacheSaltID is a number, ours a string: tenants have names.
    scalar("priority", "FP32", "0 to 1, the higher the earlier; default 0.5"),
    scalar("cache_salt", "STRING", "cached text is shared among equal salts only"),
    scalar("max_queue_time_ms", "INT32", "error unless started so soon after arrival"),
    scalar("allotted_time_ms", "INT32", "ends so long after arrival, as far as it is"),
)

_ORDERED = [SAMPLING_INPUTS[row] if isinstance(row, str) else row for row in _ROWS]

INPUTS: tuple[TensorSpec, ...] = (
    *_ORDERED,
    *(spec for spec in SAMPLING_INPUTS.values() if spec not in _ORDERED),
)
"""All inputs; a new sampling setting comes last."""

INPUT_BY_NAME: dict[str, TensorSpec] = {spec.name: spec for spec in INPUTS}

RENAMED_INPUTS: dict[str, str] = {
    "min_tokens": "min_length",
    "seed": "random_seed",
    "max_tokens": "request_output_len",
    "stream": "streaming",
    "return_kv_cache_reuse_stats": "return_perf_metrics",
    "noRepeatNgramSize": "no_repeat_ngram_size",
}
"""Another name of an input -> the name used inside. Sending both is an error."""

CONTROL_INPUTS: frozenset[str] = frozenset(
    {
        "sampling_parameters",
        "stop",
        "stream",
        "streaming",
        "stats",
        "describe",
        "ready",
        "why",
        "recording",
        "lora_adapters",
        "lora_path",
        "live",
        "live_since",
        "live_blocks",
        "shared",
        "text_input",
        "num_return_sequences",
        "return_finish_reason",
        "stop_words",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "bad_words",
        "embedding_bias_words",
        "embedding_bias_weights",
    }
)
"""Consumed by the Triton model; not tensors of an `InferenceRequest`."""
