"""Tokens of the requests that have ended, for whoever counts them."""

from __future__ import annotations

from collections import deque

from inflight_backend.beam_responses import num_shown
from inflight_scheduler import BeamSearch, FinishReason, LlmRequest

_MAX_UNREAD = 65_536
"""Requests kept for a reader; of more, the newest."""


class TokenLengths:
    """Filled by the batch manager's thread, emptied by another one."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=_MAX_UNREAD)

    def ended(self, request: LlmRequest) -> None:
        """Keep the lengths of ``request``: tokens of all beams, and as in answers no end ids."""
        if isinstance(request.beams, BeamSearch):
            num_output = sum(map(num_shown, request.beams.hypotheses()))
        else:
            num_output = request.num_drawn_tokens - request.orig_prompt_len
            num_output -= request.finish_reason == FinishReason.END_ID
        self._lengths.append((request.orig_prompt_len, num_output))

    def take(self) -> list[tuple[int, int]]:
        """Tokens of prompt and answer of each request since the last call."""
        return [self._lengths.popleft() for _ in range(len(self._lengths))]
