"""Beam search: of all continuations of a few hypotheses, which ones are followed and which end.

The rules are those of `transformers` (``GenerationMixin._beam_search``), which TensorRT-LLM's beam
search follows (`cpp/tensorrt_llm/kernels/beamSearchKernels`), with its defaults and its diversity.
One step of width W::

    scores      sum of log probabilities + diversity_rate * rank of the beam it continues
    candidates  the 2W best continuations of all beams, (1 + n) W with n > 1 end ids
    end         of the W best of those: with an end id, a stop word, or at the last token there may
                be; kept if among the W best finished ones, score / tokens ** length_penalty
    continue    the W best of the others

The search is over when W hypotheses have finished and, unless ``early_stopping`` is 1, no beam can
beat the worst of them any more: by the tokens it has now, or, with an ``early_stopping`` that is
neither 0 nor 1 and a ``length_penalty`` above 0, by as many as it may get.

It runs on the host: some 20 to 30 us per beam and step (4 to 10 beams), and O(tokens) of copying.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple, Protocol

from inflight_scheduler.sampling import Word, all_end_ids, num_continuations
from inflight_scheduler.states import FinishReason

Candidate = tuple[int, float]
"""A token and its log probability behind a beam."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How a request searches; names and defaults are TensorRT-LLM's (``SamplingConfig``,
    ``DefaultDecodingParams``). ``num_returned``: hypotheses in the answer, at most ``width``."""

    width: int
    num_returned: int
    length_penalty: float = 0.0
    early_stopping: int = 1
    diversity_rate: float = 0.0


class BeamStep(NamedTuple):
    """What one step decided, by row: each continues the text of row ``parents[row]`` with
    ``tokens[row]``. A row that survives is its own parent."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]


class Beams(Protocol):
    """What the budgets need of a search; `BeamSearch` is one."""

    step: BeamStep | None
    """The decision that the next generation step carries out; None before the first token."""

    def reset(self) -> None:
        """Start again behind the prompt."""

    def advance(self, rows: Sequence[Sequence[Candidate]]) -> bool:
        """A step has run, ``rows`` are the candidates of each row; False if there are none."""

    def write(self, text: list[int], prompt_len: int) -> None:
        """Put the best hypothesis behind the prompt, in place of what is there."""

    @property
    def finish_reason(self) -> FinishReason:
        """Why the search is over; NOT_FINISHED while it is not."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Generated tokens with their log probabilities; ``score`` orders those that have finished."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float = 0.0
    score: float = 0.0
    reason: FinishReason = FinishReason.NOT_FINISHED


class _Continuation(NamedTuple):
    score: float
    rank: int
    token: int
    log_prob: float


class BeamSearch:
    """The hypotheses of one request, best first; see the module for the rules."""

    __slots__ = (
        "_finished",
        "_is_done",
        "_rows",
        "_running",
        "_word_sizes",
        "end_id",
        "end_ids",
        "max_new_tokens",
        "params",
        "step",
        "stop_words",
    )

    def __init__(
        self,
        params: BeamParams,
        max_new_tokens: int,
        end_id: int = -1,
        stop_words: Sequence[Word] = (),
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        """``stop_token_ids`` end a beam as ``end_id`` does."""
        self.params = params
        self.max_new_tokens = max_new_tokens
        self.end_id = end_id
        self.end_ids = all_end_ids(end_id, stop_token_ids)
        self.stop_words = frozenset(stop_words)
        self._word_sizes = frozenset(map(len, self.stop_words))
        self.step: BeamStep | None
        self.reset()

    def reset(self) -> None:
        """Start again behind the prompt."""
        self._running = [Hypothesis()]
        self._rows = [0]  # where each of those runs
        self._finished: list[Hypothesis] = []
        self._is_done = False
        self.step = None

    @property
    def finish_reason(self) -> FinishReason:
        """Why the best hypothesis ended, once the search is over."""
        if not self._is_done or not self._finished:
            return FinishReason.NOT_FINISHED
        return self._finished[0].reason

    def hypotheses(self) -> list[Hypothesis]:
        """The best ``num_returned`` so far, best first; before the end beams are among them."""
        found = list(self._finished)
        if not self._is_done:
            running = [beam for beam in self._running if beam.tokens]
            found += [self._ended(beam, beam.cum_log_prob, beam.reason) for beam in running]
            found.sort(key=lambda hypothesis: -hypothesis.score)
        return found[: self.params.num_returned]

    def write(self, text: list[int], prompt_len: int) -> None:
        """Put the best beam, or the best answer, behind the prompt."""
        best = self._finished[0] if self._is_done and self._finished else self._running[0]
        text[prompt_len:] = best.tokens

    def advance(self, rows: Sequence[Sequence[Candidate]]) -> bool:
        """Take a step: ``rows`` are the most likely tokens behind each row (one row, of the prompt,
        at first), `num_continuations` or more. False if no token could follow anywhere and nothing
        has finished.
        """
        params, before = self.params, self._running
        rate = params.diversity_rate
        continuations = [
            _Continuation(beam.cum_log_prob + log_prob + rate * rank, rank, token, log_prob)
            for rank, (beam, row) in enumerate(zip(before, self._rows, strict=True))
            for token, log_prob in rows[row]
            if math.isfinite(log_prob)
        ]
        num_best = num_continuations(params.width, self.end_ids)
        best = nlargest(num_best, continuations, key=lambda one: one.score)
        running: list[tuple[int, Hypothesis]] = []
        for place, one in enumerate(best):
            beam = _extended(before[one.rank], one)
            reason = self._reason(beam.tokens)
            if reason is FinishReason.NOT_FINISHED:
                running.append((one.rank, beam))
            elif place < params.width:
                self._finished.append(self._ended(beam, one.score, reason))
        del running[params.width :]
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the older one wins
        del self._finished[params.width :]
        if not running:
            self._is_done = True
            return bool(self._finished)
        self._running = [beam for _, beam in running]
        self._is_done = self._is_over()
        self._place([self._rows[rank] for rank, _ in running])
        return True

    def _reason(self, tokens: tuple[int, ...]) -> FinishReason:
        if tokens[-1] in self.end_ids:
            return FinishReason.END_ID
        if any(tokens[-size:] in self.stop_words for size in self._word_sizes):
            return FinishReason.STOP_WORDS
        is_last = len(tokens) >= self.max_new_tokens
        return FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED

    def _ended(self, beam: Hypothesis, score: float, reason: FinishReason) -> Hypothesis:
        score /= len(beam.tokens) ** self.params.length_penalty
        return Hypothesis(beam.tokens, beam.log_probs, beam.cum_log_prob, score, reason)

    def _is_over(self) -> bool:
        params = self.params
        if len(self._finished) < params.width:
            return False
        if params.early_stopping == 1:
            return True
        best = self._running[0]
        length = len(best.tokens)
        if params.early_stopping != 0 and params.length_penalty > 0:
            length = self.max_new_tokens
        attainable: float = best.cum_log_prob / length**params.length_penalty
        return attainable <= self._finished[-1].score

    def _place(self, parents: list[int]) -> None:
        """Give each beam a row: its parent's for the best child, so that the least is moved."""
        width = self.params.width
        rows: list[int | None] = []
        for row in parents:
            rows.append(None if row in rows else row)
        free = iter([row for row in range(width) if row not in rows])
        self._rows = [next(free) if row is None else row for row in rows]
        is_first = self.step is None
        # A row without a beam repeats the best one's token; its result is not used.
        parent_of = [parents[0] if is_first else row for row in range(width)]
        tokens = [self._running[0].tokens[-1]] * width
        for row, parent, beam in zip(self._rows, parents, self._running, strict=True):
            parent_of[row], tokens[row] = parent, beam.tokens[-1]
        self.step = BeamStep(tuple(parent_of), tuple(tokens))


def _extended(beam: Hypothesis, one: _Continuation) -> Hypothesis:
    return Hypothesis(
        (*beam.tokens, one.token),
        (*beam.log_probs, one.log_prob),
        beam.cum_log_prob + one.log_prob,
    )
