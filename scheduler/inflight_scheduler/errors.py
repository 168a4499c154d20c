"""What a scheduler refuses. Messages name the request, the number and the bound."""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of the errors raised on purpose by this package."""


class ContextTooLong(SchedulerError):
    """A context can never run: it has more tokens than one iteration may compute.

    Its draft tokens count; of an encoder it is its input.
    """

    def __init__(
        self, request_id: int, num_tokens: int, max_num_tokens: int, what: str = "a context"
    ) -> None:
        super().__init__(
            f"request {request_id}: {what} of {num_tokens} tokens exceeds "
            f"max_num_tokens={max_num_tokens}; shorten the prompt or raise max_num_tokens"
        )
        self.request_id = request_id


class InvalidDecision(SchedulerError):
    """A scheduler decided something that cannot be carried out; nothing was changed."""
