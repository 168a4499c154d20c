"""Tokens of the requests that have ended, for whoever counts them."""

from __future__ import annotations

from collections import deque

from inflight_scheduler import FinishReason, LlmRequest

_MAX_UNREAD = 65_536
"""Requests kept for a reader; of more, the newest."""


class TokenLengths:
    """Filled by the batch manager's thread, emptied by another one."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=_MAX_UNREAD)

    def ended(self, request: LlmRequest) -> None:
        """Keep the lengths of ``request``; as in answers, the end id does not count."""
        num_output = request.num_drawn_tokens - request.orig_prompt_len
        num_output -= request.finish_reason == FinishReason.END_ID
        self._lengths.append((request.orig_prompt_len, num_output))

    def take(self) -> list[tuple[int, int]]:
        """Tokens of prompt and answer of each request since the last call."""
        return [self._lengths.popleft() for _ in range(len(self._lengths))]
