"""What a response of a request with several beams carries.

All beams that are returned, best first, in every response: the prompt (if wanted) and the whole
answer so far, since the next step may go on from another one. Beams shorter than the longest are
padded, with ``pad_id`` if it was sent, else with -1; ``sequence_length`` says where each ends.
"""

from __future__ import annotations

import numpy as np

from inflight_backend.manager.output_gatherer import OutputGatherer
from inflight_backend.requests.inference_request import NamedTensor
from inflight_scheduler import BeamSearch, FinishReason, Hypothesis, LlmRequest


def make_beam_tensors(
    request: LlmRequest, is_final: bool, gatherer: OutputGatherer
) -> list[NamedTensor]:
    """The beams as they stand, without their end ids; a stream leaves the prompt out."""
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
    for row, answer in enumerate(answers):
        ids[0, row, : len(prompt) + len(answer)] = [*prompt, *answer]
    lengths = np.array([[len(prompt) + len(answer) for answer in answers]], dtype=np.int32)
    request.num_sent_tokens = request.num_generated_tokens
    tensors = [NamedTensor("output_ids", ids), NamedTensor("sequence_length", lengths)]
    if request.outputs.log_probs:
        tensors += _log_probs(beams, len(answers), max(map(len, answers)))
    tensors += gatherer.take_of_beams(request, sum(map(len, answers)), is_final)
    return tensors


def num_shown(beam: Hypothesis) -> int:
    """Tokens of a beam that are output: all but its end id."""
    return len(beam.tokens) - (beam.reason is FinishReason.END_ID)


def _log_probs(beams: list[Hypothesis], num_rows: int, length: int) -> list[NamedTensor]:
    """Those the search has chosen by: 0 behind a beam, but its end id counts in the sum."""
    log_probs = np.zeros((1, num_rows, length), dtype=np.float32)
    sums = np.zeros((1, num_rows), dtype=np.float32)
    for row, beam in enumerate(beams):
        shown = beam.log_probs[: num_shown(beam)]
        log_probs[0, row, : len(shown)] = shown
        sums[0, row] = beam.cum_log_prob
    return [NamedTensor("output_log_probs", log_probs), NamedTensor("cum_log_probs", sums)]
