"""Every output tensor of the model, in the order of `config.pbtxt`."""

from __future__ import annotations

from inflight_protocol.specs import TensorSpec

OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("output_ids", "INT32", (-1, -1), "token ids [beam, length]", is_honoured=True),
    TensorSpec("sequence_length", "INT32", (-1,), "tokens per beam", is_honoured=True),
    TensorSpec(
        "cum_log_probs", "FP32", (-1,), "sum of log probabilities per beam", is_honoured=True
    ),
    TensorSpec(
        "output_log_probs", "FP32", (-1, -1), "log probability of each new token", is_honoured=True
    ),
    TensorSpec("context_logits", "FP32", (-1, -1), "logits of the prompt", is_honoured=True),
    TensorSpec(
        "generation_logits", "FP32", (-1, -1, -1), "logits of the new tokens", is_honoured=True
    ),
    TensorSpec(
        "batch_index",
        "INT32",
        (1,),
        "row of the request this response belongs to",
        is_honoured=True,
    ),
    TensorSpec("sequence_index", "INT32", (1,), "which of num_return_sequences", is_honoured=True),
    TensorSpec("context_phase_params", "UINT8", (-1,), "disaggregated context phase"),
    TensorSpec(
        "kv_cache_alloc_new_blocks", "INT32", (1,), "blocks newly allocated", is_honoured=True
    ),
    TensorSpec("kv_cache_reused_blocks", "INT32", (1,), "blocks reused", is_honoured=True),
    TensorSpec(
        "kv_cache_alloc_total_blocks",
        "INT32",
        (1,),
        "blocks allocated in all, without those reused",
        is_honoured=True,
    ),
    TensorSpec("arrival_time_ns", "INT64", (1,), "time of arrival", is_honoured=True),
    TensorSpec("first_scheduled_time_ns", "INT64", (1,), "time first scheduled", is_honoured=True),
    TensorSpec("first_token_time_ns", "INT64", (1,), "time of the first token", is_honoured=True),
    TensorSpec("last_token_time_ns", "INT64", (1,), "time of the last token", is_honoured=True),
    TensorSpec("acceptance_rate", "FP32", (1,), "share of draft tokens accepted", is_honoured=True),
    TensorSpec(
        "total_accepted_draft_tokens", "INT32", (1,), "draft tokens accepted", is_honoured=True
    ),
    TensorSpec("total_draft_tokens", "INT32", (1,), "draft tokens", is_honoured=True),
    TensorSpec("num_input_tokens", "INT32", (1,), "tokens of the prompt", is_honoured=True),
    TensorSpec(
        "num_output_tokens",
        "INT32",
        (1,),
        "tokens of this response, of all beams",
        is_honoured=True,
    ),
    TensorSpec("finish_reason", "STRING", (1,), "why the answer ended", is_honoured=True),
    TensorSpec(
        "top_log_probs",
        "FP32",
        (-1, -1, -1),
        "of the likeliest tokens in each place, from the likeliest",
        is_honoured=True,
    ),
    TensorSpec(
        "top_log_prob_ids", "INT32", (-1, -1, -1), "which tokens these are", is_honoured=True
    ),
    TensorSpec(
        "output_log_prob_ranks",
        "INT32",
        (-1, -1),
        "how many tokens are at least as likely as each new one, itself included",
        is_honoured=True,
    ),
    TensorSpec(
        "text_output", "STRING", (-1,), "text of each beam; no batch dimension", is_honoured=True
    ),
    TensorSpec("stats", "STRING", (-1,), "statistics, one JSON per iteration", is_honoured=True),
    TensorSpec("description", "STRING", (-1,), "what is served, as JSON", is_honoured=True),
    TensorSpec("why", "STRING", (-1,), "why a request waits, as JSON", is_honoured=True),
    TensorSpec("recording", "STRING", (-1,), "decisions as JSON lines", is_honoured=True),
)

OUTPUT_BY_NAME: dict[str, TensorSpec] = {spec.name: spec for spec in OUTPUTS}
