"""Searches without text: which rows followed which is told by the recording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from inflight_recorder.errors import RecordingError
from inflight_scheduler.beam_search import BeamStep, Candidate
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import FinishReason

MAX_BEAM_ENTRIES = 2**24
"""Entries of the block tables of all beams in flight, at most: these share blocks, so the size of
the pool does not bound them."""


class Moves(NamedTuple):
    """Since the decision before, the rows of a search went on from those of ``parents``."""

    request_id: int
    parents: tuple[int, ...]


class RecordedBeams:
    """Stands in for `BeamSearch`: it knows how many tokens there are, and that ends are told.

    Until it is told otherwise each row goes on by itself. ``is_broken``: the model's numbers have
    failed, so nothing follows.
    """

    def __init__(self, width: int, max_new_tokens: int) -> None:
        self.step: BeamStep | None = None
        self.is_broken = False
        self._width = width
        self._max_new_tokens = max_new_tokens
        self._num_tokens = 0

    def reset(self) -> None:
        """Start again behind the prompt."""
        self.step, self._num_tokens = None, 0

    def advance(self, _: Sequence[Sequence[Candidate]]) -> bool:
        """One token more."""
        if self.is_broken:
            return False
        is_first = self.step is None
        parents = [0] * self._width if is_first else range(self._width)
        self.step = BeamStep(tuple(parents), (0,) * self._width)
        self._num_tokens += 1
        return True

    def write(self, text: list[int], prompt_len: int) -> None:
        """As many tokens as there are."""
        while len(text) < prompt_len + self._num_tokens:
            text.append(0)

    @property
    def finish_reason(self) -> FinishReason:
        """LENGTH at the last token; other ends are told."""
        is_last = self._num_tokens >= self._max_new_tokens
        return FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED


class MoveWatch:
    """Notices what searches have decided since it was asked last; for the recorder."""

    def __init__(self) -> None:
        self._searches: dict[int, tuple[LlmRequest, BeamStep | None]] = {}

    def add(self, request: LlmRequest) -> None:
        """Watch ``request``, if it searches."""
        if request.beams is not None:
            self._searches[request.request_id] = request, request.beams.step

    def forget(self, request: LlmRequest) -> None:
        """It has ended."""
        self._searches.pop(request.request_id, None)

    def take(self) -> tuple[Moves, ...]:
        """The moves that are new, of requests that still hold their rows."""
        if not self._searches:
            return ()
        moves = []
        for request_id, (request, seen) in self._searches.items():
            assert request.beams is not None
            step = request.beams.step
            if step is not None and step is not seen and not request.is_finished:
                moves.append(Moves(request_id, step.parents))
            self._searches[request_id] = request, step
        return tuple(moves)


class BeamEntries:
    """Counts the entries that the block tables of all beams have at their last tokens."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._num = 0

    def add(self, request: LlmRequest) -> None:
        """``request`` is active; `RecordingError` where that makes too many."""
        self._num += self._entries(request)
        if self._num > MAX_BEAM_ENTRIES:
            raise RecordingError(
                f"the tables of all beams have more than {MAX_BEAM_ENTRIES} blocks"
            )

    def remove(self, request: LlmRequest) -> None:
        """It is not any more."""
        self._num -= self._entries(request)

    def _entries(self, request: LlmRequest) -> int:
        if request.beams is None:
            return 0
        return request.num_rows * -(-request.max_num_tokens // self._tokens_per_block)


def is_possible(moves: Iterable[int], width: int) -> bool:
    """Whether rows can have followed one another so: a parent goes on by itself."""
    parents = tuple(moves)
    return len(parents) == width and all(
        0 <= parent < width and parents[parent] == parent for parent in parents
    )
