"""Every output tensor of the model, in the order of `config.pbtxt`."""

from __future__ import annotations

from inflight_protocol.specs import TensorSpec, refused

OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("output_ids", "INT32", (-1, -1), "token ids [beam, length]"),
    TensorSpec("sequence_length", "INT32", (-1,), "tokens per beam"),
    TensorSpec("cum_log_probs", "FP32", (-1,), "sum of log probabilities per beam"),
    TensorSpec("output_log_probs", "FP32", (-1, -1), "log probability of each new token"),
    TensorSpec("context_logits", "FP32", (-1, -1), "logits of the prompt"),
    TensorSpec("generation_logits", "FP32", (-1, -1, -1), "logits of the new tokens"),
    TensorSpec("batch_index", "INT32", (1,), "row of the request this response belongs to"),
    TensorSpec("sequence_index", "INT32", (1,), "which of num_return_sequences"),
    refused(TensorSpec("context_phase_params", "UINT8", (-1,), "disaggregated context phase")),
    TensorSpec("kv_cache_alloc_new_blocks", "INT32", (1,), "blocks newly allocated"),
    TensorSpec("kv_cache_reused_blocks", "INT32", (1,), "blocks reused"),
    TensorSpec(
        "kv_cache_alloc_total_blocks",
        "INT32",
        (1,),
        "blocks allocated in all, without those reused",
    ),
    TensorSpec("arrival_time_ns", "INT64", (1,), "time of arrival"),
    TensorSpec("first_scheduled_time_ns", "INT64", (1,), "time first scheduled"),
    TensorSpec("first_token_time_ns", "INT64", (1,), "time of the first token"),
    TensorSpec("last_token_time_ns", "INT64", (1,), "time of the last token"),
    TensorSpec("acceptance_rate", "FP32", (1,), "share of draft tokens accepted"),
    TensorSpec("total_accepted_draft_tokens", "INT32", (1,), "draft tokens accepted"),
    TensorSpec("total_draft_tokens", "INT32", (1,), "draft tokens"),
    TensorSpec("num_input_tokens", "INT32", (1,), "tokens of the prompt"),
    TensorSpec("num_output_tokens", "INT32", (1,), "tokens of this response, of all beams"),
    TensorSpec(
        "num_cached_tokens",
        "INT32",
        (1,),
        "tokens of the prompt that were not computed: found in the cache; first response only",
    ),
    TensorSpec("finish_reason", "STRING", (1,), "why the answer ended"),
    TensorSpec(
        "top_log_probs",
        "FP32",
        (-1, -1, -1),
        "of the likeliest tokens in each place, from the likeliest",
    ),
    TensorSpec("top_log_prob_ids", "INT32", (-1, -1, -1), "which tokens these are"),
    TensorSpec(
        "output_log_prob_ranks",
        "INT32",
        (-1, -1),
        "how many tokens are at least as likely as each new one, itself included",
    ),
    TensorSpec(
        "context_log_probs", "FP32", (-1,), "log probability of each prompt token but the first"
    ),
    TensorSpec(
        "top_context_log_probs", "FP32", (-1, -1), "of the likeliest tokens in each of these places"
    ),
    TensorSpec("top_context_log_prob_ids", "INT32", (-1, -1), "which tokens these are"),
    TensorSpec("text_output", "STRING", (-1,), "text of each beam; no batch dimension"),
    TensorSpec("stats", "STRING", (-1,), "statistics, one JSON per iteration"),
    TensorSpec("description", "STRING", (-1,), "what is served, as JSON"),
    TensorSpec("why", "STRING", (-1,), "why a request waits, as JSON"),
    TensorSpec("recording", "STRING", (-1,), "decisions as JSON lines"),
    TensorSpec("live", "STRING", (-1,), "what is in flight and has happened, as JSON"),
    TensorSpec("shared", "UINT8", (-1,), "what several requests answer, as MessagePack"),
)

OUTPUT_BY_NAME: dict[str, TensorSpec] = {spec.name: spec for spec in OUTPUTS}
