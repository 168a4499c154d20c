"""What requests have the host do to the draws of a step: guides and logits processors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight_backend.engine.interface import (
    EditSource,
    LogitsEdits,
    MaskSource,
    PendingStep,
    TokenMasks,
)
from inflight_backend.guided.masks import AnswerGuides
from inflight_backend.manager.logits_processors import ActiveProcessors, LogitsPostProcessor
from inflight_scheduler import LlmRequest

NO_TOKEN = (
    "no token could be drawn: the model's logits are not finite numbers, or 'bad_words_list', "
    "'embedding_bias' and the other rules forbid every token"
)

Unread = tuple[Sequence[LlmRequest], PendingStep]
"""A step whose tokens have not been read, and whose they are."""


class DrawRules:
    """Owner of both; engines without ``mask_next`` or ``edit_next`` are asked for neither."""

    def __init__(self, engine: Any, processors: Mapping[str, LogitsPostProcessor]) -> None:
        self._mask_next: Callable[[MaskSource], None] | None = getattr(engine, "mask_next", None)
        self._edit_next: Callable[[EditSource], None] | None = getattr(engine, "edit_next", None)
        self.guides = AnswerGuides(engine.vocab_size)
        self.processors = ActiveProcessors(processors, can_edit=self._edit_next is not None)

    @property
    def can_mask(self) -> bool:
        """True when the engine masks draws, so that answers can be guided."""
        return self._mask_next is not None

    def __bool__(self) -> bool:
        """True when a request is active that any of this is for."""
        return bool(self.guides) or bool(self.processors)

    def has_any(self, request_id: int) -> bool:
        """True for a request that one of them is for: its tokens are drawn one by one."""
        return self.guides.is_guided(request_id) or self.processors.is_chosen(request_id)

    def prepare(self, owners: Sequence[LlmRequest], before: Unread | None) -> None:
        """Have the engine mask and edit rows of the plan that it runs next, where ``owners`` draw.

        It asks for masks and edits when the decoder runs; the tokens of the step ``before``, which
        has not been read, are waited for then.
        """
        guided, edited = self.guides.guided_rows(owners), self.processors.chosen_rows(owners)

        def latest() -> dict[int, int]:
            if before is None:
                return {}
            tokens = zip(before[0], before[1].read(), strict=True)
            return {owner.request_id: token for owner, token in tokens}

        def masks() -> TokenMasks:
            return self.guides.masks(guided, latest())

        def edits() -> LogitsEdits:
            return self.processors.edits(edited, latest())

        if guided and self._mask_next is not None:
            self._mask_next(masks)
        if edited and self._edit_next is not None:
            self._edit_next(edits)

    def discard(self, request_id: int) -> None:
        """Forget a request."""
        self.guides.discard(request_id)
        self.processors.discard(request_id)

    def why_no_token(self, request_id: int) -> str:
        """Why nothing could be drawn for a request; empty if it has no part in this."""
        return self.guides.error_of(request_id) or self.processors.why_no_token(request_id)
