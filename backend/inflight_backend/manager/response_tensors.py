"""What a response carries, as named tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from inflight_backend.manager.beam_responses import make_beam_tensors
from inflight_backend.manager.output_gatherer import OutputGatherer
from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.requests.tensors import INT32, finish_reason_tensor, length_tensor, row
from inflight_scheduler import NO_OUTPUTS, FinishReason, LlmRequest


@dataclass(frozen=True, slots=True)
class HeldResponse:
    """One call of the send-response callback, held back until the end of the iteration."""

    request: LlmRequest
    is_final: bool
    error: str = ""


def make_tensors(
    request: LlmRequest, is_final: bool, gatherer: OutputGatherer
) -> list[NamedTensor]:
    """New tokens when streaming, else prompt (if wanted) and answer; why it ended, at the end.

    The end id is not part of the answer (as in TensorRT-LLM, whose sequence length counts only
    tokens to be output); the tokens of a stop word are.
    """
    if request.beams is not None:
        tensors = make_beam_tensors(request, is_final, gatherer)
        if is_final:
            reason = finish_reason_tensor(request.finish_reason)
            tensors.append(NamedTensor("finish_reason", reason))
        return tensors
    start = 0 if not request.exclude_input_in_output else request.orig_prompt_len
    if request.is_streaming:
        start = request.orig_prompt_len + request.num_sent_tokens
    end = request.num_drawn_tokens
    if is_final and request.finish_reason == FinishReason.END_ID:
        end -= 1
    ids = request.tokens[start:end]
    request.num_sent_tokens += len(ids)
    tensors = [NamedTensor("output_ids", row(ids, INT32)), _named_length(len(ids))]
    if request.outputs is not NO_OUTPUTS:
        tensors += gatherer.take(request, end - max(start, request.orig_prompt_len), is_final)
    if is_final:
        tensors.append(NamedTensor("finish_reason", finish_reason_tensor(request.finish_reason)))
    return tensors


def make_unstarted_tensors(request: LlmRequest, arrival_ns: int) -> list[NamedTensor]:
    """The end of a request that was stopped in the queue: as if before its first step."""
    request.finish(FinishReason.CANCELLED)
    gatherer = OutputGatherer(vocab_size=0)  # no row of logits comes
    gatherer.add(request, arrival_ns)
    return make_tensors(request, True, gatherer)


@lru_cache(maxsize=64)
def _named_length(length: int) -> NamedTensor:
    return NamedTensor("sequence_length", length_tensor(length))
