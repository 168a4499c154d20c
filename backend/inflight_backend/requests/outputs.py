"""The outputs that a request asks for beside its tokens, read from its inputs and checked."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.values import flag, integer
from inflight_scheduler import NO_OUTPUTS, OutputParams

MAX_LOGITS_BYTES = 2**29
"""Logits of prompts and answers that all active requests together may ask for. One response may
hold them all, on its way through shared memory."""

MAX_TOP_LOG_PROBS = 20
"""Likeliest tokens told beside each token: OpenAI's bound of ``top_logprobs``."""

_FLAGS = [each.name for each in fields(OutputParams) if each.name != "num_top_log_probs"]


def input_of(output: str) -> str:
    """The input that asks for a field of `OutputParams`."""
    return output if output.startswith("num_top") else f"return_{output}"


def read_outputs(
    request: InferenceRequest,
    prompt_len: int,
    max_new_tokens: int,
    vocab_size: int,
) -> OutputParams:
    """The outputs that ``request`` asks for; `InvalidRequest` for one that would be too large."""
    wanted: dict[str, Any] = {name: flag(request, input_of(name), False) for name in _FLAGS}
    wanted["num_top_log_probs"] = integer(request, "num_top_log_probs", 0, 0, MAX_TOP_LOG_PROBS)
    if not any(wanted.values()):
        return NO_OUTPUTS
    outputs = OutputParams(**wanted)
    if outputs.num_top_log_probs > vocab_size:
        raise InvalidRequest(f"'num_top_log_probs' is more than the {vocab_size} tokens there are")
    num_rows = num_logits_rows(outputs, prompt_len, max_new_tokens)
    num_bytes = 4 * num_rows * vocab_size
    if num_bytes > MAX_LOGITS_BYTES:
        raise InvalidRequest(
            f"{names_of_logits(outputs)} would take {num_rows} tokens x {vocab_size} logits = "
            f"{num_bytes} bytes, more than {MAX_LOGITS_BYTES}; ask for fewer tokens"
        )
    return outputs


def num_logits_rows(outputs: OutputParams, prompt_len: int, max_new_tokens: int) -> int:
    """Rows of logits, [vocab] each, that a request asks for at most."""
    return prompt_len * outputs.context_logits + max_new_tokens * outputs.generation_logits


def names_of_logits(outputs: OutputParams) -> str:
    """The inputs that ask for logits, for the text of an error."""
    kinds = ("context_logits", "generation_logits")
    return " and ".join(f"'{input_of(kind)}'" for kind in kinds if getattr(outputs, kind))
