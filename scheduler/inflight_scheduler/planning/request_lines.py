"""Requests in the order of their ranks."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from inflight_scheduler.planning.settling import AwaitedTokens, with_end_id
from inflight_scheduler.request import PENDING_TOKEN, LlmRequest

MAX_CHANGES = 2**10
"""So many numbers tell how a list of requests has changed; nobody may ever ask for them."""


class RequestLine:
    """Requests by rank. `view` is a copy that is made only when something has changed."""

    __slots__ = ("_ranks", "_view", "requests")

    def __init__(self) -> None:
        self.requests: list[LlmRequest] = []
        # The first half of each rank, side by side: a search looks at no request far from its end.
        self._ranks = array("d")
        self._view: list[LlmRequest] | None = None

    def insert(self, request: LlmRequest) -> int:
        """Put it in its place, and return that."""
        index = bisect_right(self._ranks, request.rank[0])
        while index > 0 and self.requests[index - 1].rank > request.rank:
            index -= 1
        self.requests.insert(index, request)
        self._ranks.insert(index, request.rank[0])
        self._view = None
        return index

    def remove(self, request: LlmRequest) -> int:
        """Take it out, and return where it was."""
        index = bisect_left(self._ranks, request.rank[0])
        while self.requests[index] is not request:
            is_near = self._ranks[index] == request.rank[0]
            assert is_near, f"request {request.request_id} is not in its place"
            index += 1
        del self.requests[index], self._ranks[index]
        self._view = None
        return index

    def view(self) -> list[LlmRequest]:
        """All of them; the same list object until something changes, and never altered."""
        if self._view is None:
            self._view = list(self.requests)
        return self._view


class GenerationLine(RequestLine):
    """Those who generate, with what each step asks of every one of them, side by side.

    A request lies scattered over many cache lines. A step that gives a token to each of some
    thousand requests takes a third of the time if it need not go there.
    """

    __slots__ = ("_base", "_changes", "_end_ids", "_texts", "ids", "slots")

    def __init__(self) -> None:
        super().__init__()
        self.ids = array("Q")
        self.slots: list[int | None] = []
        self._texts: list[list[int]] = []
        self._end_ids: list[frozenset[int]] = []
        self._base: list[LlmRequest] | None = None  # an earlier view, and what came after it
        self._changes: list[int] = []

    def insert(self, request: LlmRequest) -> int:
        """As `RequestLine.insert`; slot, token list and end ids stay those it has now."""
        index = super().insert(request)
        self.ids.insert(index, request.request_id)
        self.slots.insert(index, request.seq_slot)
        self._texts.insert(index, request.tokens)
        self._end_ids.insert(index, request.end_ids)
        if len(self._changes) < MAX_CHANGES:
            self._changes += (index, request.request_id)
        return index

    def remove(self, request: LlmRequest) -> int:
        """As `RequestLine.remove`."""
        index = super().remove(request)
        del self.ids[index], self.slots[index], self._texts[index], self._end_ids[index]
        if len(self._changes) < MAX_CHANGES:
            self._changes.append(~index)
        return index

    def changes_since(self, before: Sequence[LlmRequest]) -> tuple[int, ...] | None:
        """What has made `view` of ``before``, which was that when this was asked last.

        None if it was not, or if too much has changed. In turn: a place and the id that was put
        there, or the complement (below 0) of the place that was taken out.
        """
        is_short = before is self._base and len(self._changes) < MAX_CHANGES
        changes = tuple(self._changes) if is_short else None
        self._base, self._changes = self.view(), []
        return changes

    def append(self, tokens: Iterable[int]) -> None:
        """Each text goes on with its token; ends nobody. `ValueError` if there are not as many."""
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)

    def with_end_id(self, tokens: Sequence[int]) -> list[LlmRequest]:
        """Those whose token is one that ends them."""
        return with_end_id(self.requests, self._end_ids, tokens)

    def append_pending(self) -> AwaitedTokens:
        """Each text goes on with what a step will draw that has been started."""
        for text in self._texts:
            text.append(PENDING_TOKEN)
        return AwaitedTokens(self.view(), self._texts.copy(), self._end_ids.copy())

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the requests say the same; O(requests)."""
        assert self.ids.tolist() == [r.request_id for r in self.requests], "ids have drifted"
        for request, slot, text, end_ids in zip(
            self.requests, self.slots, self._texts, self._end_ids, strict=True
        ):
            assert request.seq_slot in (None, slot), f"{request} has another slot"
            assert request.tokens is text, f"{request} has another text"
            assert request.end_ids == end_ids, f"{request} has other end ids"
