"""A scheduler that the user brings: named in the configuration, and never trusted blindly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from inflight_backend.entry_names import find_entry
from inflight_backend.errors import ConfigurationError
from inflight_scheduler import InvalidDecision, LlmRequest, LlmRequestState, RequestScheduler

_logger = logging.getLogger(__name__)
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE

Decision = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]


def find_scheduler_class(name: str) -> Callable[..., RequestScheduler]:
    """The class ``package.module:ClassName``. It is trusted code: the operator names it.

    It is called as ``ClassName(block_manager, max_batch_size, max_num_tokens)``.
    """
    scheduler_class = find_entry("scheduler_class", name, "ClassName")
    if not isinstance(scheduler_class, type) or not issubclass(scheduler_class, RequestScheduler):
        raise ConfigurationError(f"scheduler_class = '{name}' is not a RequestScheduler")
    return scheduler_class


class GuardedScheduler(RequestScheduler):
    """Runs the user's scheduler and checks each decision; a refused one is made by the default.

    A decision that lets nobody run is refused too: nothing would ever change. ``is_overruled``
    tells of the last decision. Requests whose last token is being computed are not shown to it:
    they hold cache, and nothing can be decided about them.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        default: RequestScheduler,
        check: Callable[[object, Sequence[LlmRequest], Collection[int]], Decision],
    ) -> None:
        self._scheduler = scheduler
        self._default = default
        self._check = check
        self._has_warned = False
        self.is_overruled = False

    @property
    def name(self) -> str:
        """The user's class."""
        return type(self._scheduler).__name__

    @property
    def default(self) -> RequestScheduler:
        """Who decides when the user's decision is refused."""
        return self._default

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """The user's decision if it can be carried out, else the default scheduler's."""
        shown = [r for r in active_requests if r.state is not _TO_COMPLETE]
        try:
            self.is_overruled = False
            if not shown:
                return [], [], []
            decision = self._scheduler.schedule_request(shown, inflight_request_ids)
            checked = self._check(decision, shown, inflight_request_ids)
            is_waiting = inflight_request_ids or len(shown) < len(active_requests)
            if not any(checked) and not is_waiting:
                raise InvalidDecision(f"none of {len(shown)} active requests runs")
            return checked
        except Exception as error:
            self.is_overruled = True
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "the scheduler %s failed and the default takes over while it does (said "
                    "once): %s",
                    self.name,
                    error,
                    exc_info=None if isinstance(error, InvalidDecision) else error,
                )
            for request in active_requests:  # it may have written chunk sizes
                if request.is_context_init_state and request.request_id not in inflight_request_ids:
                    request.context_chunk_size = request.context_remaining_length
            return self._default.schedule_request(active_requests, inflight_request_ids)
