"""Applies the tokens of a step that was assumed: each replaces a pending token."""

from __future__ import annotations

from collections.abc import Sequence, Set

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.planning.plan_parts import Candidates, search
from inflight_scheduler.request import PENDING_TOKEN, LlmRequest
from inflight_scheduler.states import FinishReason


class PendingTokenBatch:
    """The generation requests of a step that gives each of them a token, as parallel lists.

    As in `RankedGenerations`, the requests need not be visited. The lists are not altered.
    ``end_ids``: all that end one of them.
    """

    __slots__ = ("_end_ids", "_texts", "requests")

    def __init__(
        self, requests: list[LlmRequest], texts: list[list[int]], end_ids: frozenset[int]
    ) -> None:
        self.requests = requests
        self._texts = texts
        self._end_ids = end_ids

    def apply(self, tokens: Sequence[int]) -> list[LlmRequest]:
        """As `apply_tokens_to`, for all of ``requests``, while exactly one later step runs.

        Nearly all of them expect a token of that one, too. Then the last token but one is the one
        that arrived, and the length ends none. One without a pending token is checked: it has ended
        meanwhile, or expects no other token.
        """
        others = []
        places = range(len(tokens))
        for place, text, token in zip(places, self._texts, tokens, strict=True):
            try:
                if text[-2] == PENDING_TOKEN:
                    text[-2] = token
                    continue
            except IndexError:  # only a prompt of one token is left of it
                pass
            others.append(place)
        updated = list(self.requests) if others else self.requests
        for place in reversed(others):
            request = updated[place]
            if request.num_pending_tokens:
                request.replace_pending_token(tokens[place])
            else:
                del updated[place]
        for request in with_end_id(self.requests, self._end_ids, tokens):
            if request.num_pending_tokens:  # else it is one of the others
                request.finish(FinishReason.END_ID)
        return updated


def apply_tokens_to(owners: Sequence[LlmRequest], tokens: Sequence[int]) -> list[LlmRequest]:
    """`LlmRequest.replace_pending_token` for those of ``owners`` that expect one; returns these."""
    updated = []
    for request, token in zip(owners, tokens, strict=True):
        if request.num_pending_tokens:
            request.replace_pending_token(token)
            updated.append(request)
    return updated


def with_end_id(
    requests: Sequence[LlmRequest], end_ids: Set[int], tokens: Sequence[int]
) -> list[LlmRequest]:
    """Those of ``requests`` whose token is one that ends them; ``end_ids``: all that end one."""
    if end_ids.isdisjoint(tokens):
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
                request.replace_pending_token(token)
            else:
                search(request, candidates, manager)
                has_failed = request.tokens[-1] < 0
            updated.append(request)
            if has_failed:
                manager.forget(request.request_id)
    return updated
