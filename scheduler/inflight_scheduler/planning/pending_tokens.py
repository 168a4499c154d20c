"""Applies the tokens of a step that was assumed: each was pending until then."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.planning.plan_parts import Candidates, search
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import FinishReason

_rank = attrgetter("rank")


class SharedStep:
    """A step that runs and gives each of all generation requests a token; neither counted nor
    appended request by request.

    It is one of ``running``, which every request in the generation phase has as its
    `LlmRequest.shared_steps`, until its tokens are there. ``requests`` are in the order of their
    ranks, with their ``texts``; both are its own. ``end_ids``: all that end one of them.
    """

    __slots__ = ("_end_ids", "_gone", "_newcomers", "_running", "_texts", "requests")

    def __init__(
        self,
        running: list[SharedStep],
        requests: list[LlmRequest],
        texts: list[list[int]],
        end_ids: frozenset[int],
    ) -> None:
        self.requests = requests
        self._texts = texts
        self._end_ids = end_ids
        self._gone: dict[int, LlmRequest] = {}  # of ``requests``: count for themselves since then
        self._newcomers: dict[int, LlmRequest] = {}  # share the count, and expect no token of it
        self._running = running
        running.append(self)

    def join(self, request: LlmRequest) -> None:
        """``request`` has come to the generation phase after the start."""
        self._newcomers[request.request_id] = request

    def leave(self, request: LlmRequest) -> None:
        """``request`` has left the generation phase."""
        if self._newcomers.pop(request.request_id, None) is None:
            self._gone[request.request_id] = request

    def drop(self, request: LlmRequest) -> None:
        """``request``, in the generation phase, wants no token of it."""
        if request.request_id not in self._newcomers:
            self._gone[request.request_id] = self._newcomers[request.request_id] = request

    def apply(self, tokens: Sequence[int], updated: list[LlmRequest]) -> None:
        """As `apply_tokens_to`, for all of ``requests``; those that get one come to ``updated``.

        The length ends none that is still in the generation phase.
        """
        self._stop_sharing()
        first = len(updated)
        updated += self.requests
        places = [bisect_left(self.requests, gone.rank, key=_rank) for gone in self._gone.values()]
        for place in places:
            self._texts[place] = []  # the token of its own is added below, if it expects one
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        for place in sorted(places, reverse=True):
            request = self.requests[place]
            if request.num_pending_tokens:
                request.add_pending_token(tokens[place])
            else:
                del updated[first + place]
        for request in with_end_id(self.requests, self._end_ids, tokens):
            if request.request_id not in self._gone:
                request.finish(FinishReason.END_ID)

    def dissolve(self) -> None:
        """Let each request count its token for itself."""
        self._stop_sharing()
        for request in self.requests:
            if request.request_id not in self._gone:
                request.num_own_pending += 1

    def _stop_sharing(self) -> None:
        self._running.remove(self)
        for request in self._newcomers.values():
            request.num_own_pending += 1


def apply_tokens_to(owners: Sequence[LlmRequest], tokens: Sequence[int]) -> list[LlmRequest]:
    """`LlmRequest.add_pending_token` for those of ``owners`` that expect one; returns these."""
    updated = []
    for request, token in zip(owners, tokens, strict=True):
        if request.num_pending_tokens:
            request.add_pending_token(token)
            updated.append(request)
    return updated


def with_end_id(
    requests: Sequence[LlmRequest], end_ids: frozenset[int], tokens: Sequence[int]
) -> list[LlmRequest]:
    """Those of ``requests`` whose token is one that ends them; ``end_ids``: all that end one."""
    if not end_ids or end_ids.isdisjoint(tokens):
        return []
    owners = zip(requests, tokens, strict=True)
    return [each for each, token in owners if token in end_ids and token in each.end_ids]


def has_failed_unseen(owners: Sequence[LlmRequest], tokens: Sequence[int]) -> bool:
    """True if a request got no token because it left while the step ran, other than by a token.

    What the step has written for it may be cached, and no request is left to discard it.
    """
    by_token = (FinishReason.END_ID, FinishReason.LENGTH)
    return any(
        token < 0
        and not request.num_pending_tokens
        and request.finish_reason not in by_token
        and request.tokens[-1] >= 0  # else its numbers had failed before
        for request, token in zip(owners, tokens, strict=True)
    )


def apply_each(
    owners: Sequence[LlmRequest],
    tokens: Sequence[int],
    candidates: Candidates,
    manager: BlockManager,
) -> list[LlmRequest]:
    """`apply_tokens_to` where some search, or have got no token; nothing of these is kept.

    A search may end well although its rows have got none: with the beams that had ended before.
    """
    updated: list[LlmRequest] = []
    for request, token in zip(owners, tokens, strict=True):
        if request.num_pending_tokens:
            has_failed = token < 0
            if request.beams is None:
                request.add_pending_token(token)
            else:
                search(request, candidates, manager)
                has_failed = request.tokens[-1] < 0
            updated.append(request)
            if has_failed:
                manager.forget(request.request_id)
    return updated
