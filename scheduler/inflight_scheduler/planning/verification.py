"""Drafts against draws: how many of the tokens of a step count.

A step with ``k`` drafts draws ``k + 1`` tokens: one after the last token of the text, and one after
each draft, as if all before it were right. Each is drawn exactly as in a step of its own (same
logits, same noise, which depends on seed and position only). So the draws count as long as the
draft before them is what was drawn there, and the answer is that of plain decoding, greedy or
seeded. The first draw that differs from its draft counts too: it is what comes in its place.

KV of drafts that were wrong stays where it is: the next step writes over it, and a block is entered
for reuse only as far as tokens count.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight_scheduler.batch import VerifiedSlot
from inflight_scheduler.request import LlmRequest


def can_verify(request: LlmRequest) -> bool:
    """True where several tokens of ``request`` can be drawn in one step, if it has no guide."""
    return request.beam_width == 1 and not request.sampling.looks_back


def take_verified(open_slots: set[int], requests: Sequence[LlmRequest]) -> tuple[VerifiedSlot, ...]:
    """Where those of ``requests`` stand that have one of ``open_slots``, which it leaves.

    Such a slot ran with drafts last, so the engine does not know how many of them counted.
    """
    if not open_slots:
        return ()
    told = []
    for request in requests:
        slot = request.seq_slot
        if slot is not None and slot in open_slots:
            open_slots.remove(slot)
            told.append(VerifiedSlot(slot, request.num_cached_tokens, request.tokens[-1]))
    return tuple(told)


def num_confirmed(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of ``drafts`` are what was drawn in their place, up to the first that is not."""
    num_right = 0
    for draft, token in zip(drafts, drawn, strict=False):
        if draft != token:
            break
        num_right += 1
    return num_right


def fitting_drafts(request: LlmRequest) -> tuple[int, ...]:
    """The drafts of ``request`` that may still become tokens: one more is drawn in any case."""
    if not request.draft_tokens:
        return ()
    return request.draft_tokens[: max(request.num_remaining_tokens - 1, 0)]


def add_verified_tokens(
    request: LlmRequest, drafts: Sequence[int], drawn: Sequence[int], num_added: int = 0
) -> None:
    """Append the draws that count behind the first ``num_added``, which were appended already.

    Counts what became of ``drafts``; nothing comes after the end of the request.
    """
    num_right = num_confirmed(drafts, drawn)
    for token in drawn[num_added : num_right + 1]:
        if request.is_finished:
            break
        request.add_new_token(token)
        num_added += 1
    request.num_verified_drafts += len(drafts)
    request.num_accepted_drafts += min(num_right, num_added)
