"""Tokens of the requests that have ended, for whoever counts them."""

from __future__ import annotations

from collections import deque

from inflight_backend.manager.beam_responses import num_shown
from inflight_scheduler import BeamSearch, FinishReason, LlmRequest

_MAX_UNREAD = 65_536
"""Requests kept for a reader; of more, the newest."""


class TokenLengths:
    """Filled by the batch manager's thread, emptied by another one."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=_MAX_UNREAD)
        self._unsent: dict[int, tuple[int, int]] | None = None

    def await_senders(self) -> None:
        """From now on only requests whose answers are `sent` count: who sends them may leave out
        what was drawn behind a stop word."""
        self._unsent = {}

    def ended(self, request: LlmRequest) -> None:
        """Keep the lengths of ``request``: tokens of all beams, and as in answers no end ids."""
        if isinstance(request.beams, BeamSearch):
            num_output = sum(map(num_shown, request.beams.hypotheses()))
        else:
            num_output = request.num_drawn_tokens - request.orig_prompt_len
            num_output -= request.finish_reason == FinishReason.END_ID
        lengths = (request.orig_prompt_len, num_output)
        if self._unsent is None:
            self._lengths.append(lengths)
        else:
            self._unsent[request.request_id] = lengths

    def sent(self, request_id: int, num_left_out: int) -> None:
        """Count a request, if it has ended without an error; from any thread."""
        lengths = None if self._unsent is None else self._unsent.pop(request_id, None)
        if lengths is not None:
            self._lengths.append((lengths[0], lengths[1] - num_left_out))

    def take(self) -> list[tuple[int, int]]:
        """Tokens of prompt and answer of each request since the last call."""
        return [self._lengths.popleft() for _ in range(len(self._lengths))]
