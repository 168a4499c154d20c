"""The tensors of a response.

With several beams every response holds all returned beams, best first: the prompt (if wanted) and
the whole answer so far, since the next step may extend another beam. Shorter beams are padded with
``pad_id``, or -1 if none was sent; ``sequence_length`` is the length of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from inflight_backend.manager.output_gatherer import OutputGatherer
from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.requests.tensors import INT32, finish_reason_tensor, number_tensor, row
from inflight_scheduler import NO_OUTPUTS, BeamSearch, FinishReason, Hypothesis, LlmRequest


@dataclass(frozen=True, slots=True)
class QueuedResponse:
    """One call of the send-response callback at the end of the iteration."""

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
        return _make_beam_tensors(request, is_final, gatherer)
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
        tensors.append(_named_reason(request.finish_reason))
    return tensors


def make_unstarted_tensors(request: LlmRequest, arrival_ns: int) -> list[NamedTensor]:
    """The final response of a request that was stopped before its first step."""
    request.finish(FinishReason.CANCELLED)
    gatherer = OutputGatherer(vocab_size=0)  # no row of logits comes
    gatherer.add(request, arrival_ns)
    return make_tensors(request, True, gatherer)


@lru_cache(maxsize=64)
def _named_length(length: int) -> NamedTensor:
    return NamedTensor("sequence_length", number_tensor(length))


def _named_reason(reason: FinishReason) -> NamedTensor:
    return NamedTensor("finish_reason", finish_reason_tensor(reason))


def _make_beam_tensors(
    request: LlmRequest, is_final: bool, gatherer: OutputGatherer
) -> list[NamedTensor]:
    """The beams so far, without their end ids; a stream leaves the prompt out."""
    search = request.beams
    assert isinstance(search, BeamSearch)
    beams = search.hypotheses()
    answers = [beam.tokens[: num_shown(beam)] for beam in beams]
    answers += [()] * (search.params.num_returned - len(answers))
    prompt: list[int] = []
    if not (request.is_streaming or request.exclude_input_in_output):
        prompt = request.tokens[: request.orig_prompt_len]
    length = len(prompt) + max(map(len, answers))
    ids = np.full((1, len(answers), length), request.pad_id, dtype=np.int32)
    for beam, answer in enumerate(answers):
        ids[0, beam, : len(prompt) + len(answer)] = [*prompt, *answer]
    lengths = np.array([[len(prompt) + len(answer) for answer in answers]], dtype=np.int32)
    request.num_sent_tokens = request.num_generated_tokens
    tensors = [NamedTensor("output_ids", ids), NamedTensor("sequence_length", lengths)]
    if request.outputs.log_probs:
        tensors += _log_probs(beams, len(answers), max(map(len, answers)))
    tensors += gatherer.take(request, sum(map(len, answers)), is_final)
    if is_final:
        tensors.append(_named_reason(request.finish_reason))
    return tensors


def num_shown(beam: Hypothesis) -> int:
    """Tokens of a beam that are output: all but its end id."""
    return len(beam.tokens) - (beam.reason is FinishReason.END_ID)


def _log_probs(beams: list[Hypothesis], num_rows: int, length: int) -> list[NamedTensor]:
    """Those that ranked the beams: 0 behind a beam, whose sum includes its end id."""
    log_probs = np.zeros((1, num_rows, length), dtype=np.float32)
    sums = np.zeros((1, num_rows), dtype=np.float32)
    for index, beam in enumerate(beams):
        shown = beam.log_probs[: num_shown(beam)]
        log_probs[0, index, : len(shown)] = shown
        sums[0, index] = beam.cum_log_prob
    return [NamedTensor("output_log_probs", log_probs), NamedTensor("cum_log_probs", sums)]
