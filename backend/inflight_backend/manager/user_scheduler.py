"""Schedulers that the operator names in the configuration; each decision is checked."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Sequence
from typing import Any

from inflight_backend.errors import ConfigurationError
from inflight_backend.log import get_logger
from inflight_recorder.settings import Settings, check_possible, fallback_scheduler, scheduler_of
from inflight_scheduler import (
    BatchPlanner,
    CapacityScheduler,
    ContextTooLong,
    InvalidDecision,
    LlmRequest,
    LlmRequestState,
    MicroBatchScheduler,
    RequestScheduler,
    SimpleScheduler,
)


def find_entry(setting: str, name: str, what: str) -> Any:
    """The object ``package.module:name``; `ConfigurationError` names ``setting``.

    ``what`` is what the object is called in the form that a bad name is answered with.
    """
    module_name, _, object_name = name.partition(":")
    if not module_name or module_name.startswith(".") or not object_name:
        raise ConfigurationError(f"{setting} = '{name}' must have the form package.module:{what}")
    try:
        return getattr(importlib.import_module(module_name), object_name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{setting} = '{name}': {error}") from None
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ConfigurationError(
            f"{setting} = '{name}' cannot be imported: {type(error).__name__}: {error}"
        ) from error


_logger = get_logger(__name__)
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE
_OURS = InvalidDecision, ContextTooLong  # they quote no text, so what they say may be logged
_KINDS = (RequestScheduler, CapacityScheduler, MicroBatchScheduler)

Decision = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]


def find_scheduler_class(name: str) -> type:
    """The class ``package.module:ClassName``. It is trusted code: the operator names it."""
    scheduler_class = find_entry("scheduler_class", name, "ClassName")
    if not isinstance(scheduler_class, type) or not issubclass(scheduler_class, _KINDS):
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise ConfigurationError(f"scheduler_class = '{name}' is none of {kinds}")
    return scheduler_class


def make_guarded(
    scheduler_class: type, settings: Settings, planner: BatchPlanner
) -> GuardedScheduler:
    """The user's scheduler for these settings, over the blocks and slots of ``planner``.

    `ConfigurationError` if it cannot be made.
    """
    name = scheduler_class.__name__
    try:
        scheduler = _combine(scheduler_class, settings, planner)
    except BaseException as error:  # also one that wants to end the process
        reason = f"{type(error).__name__}: {error}"  # of a KeyError the text alone says nothing
        raise ConfigurationError(f"scheduler_class {name} cannot be made: {reason}") from error
    return GuardedScheduler(name, scheduler, settings, planner)


def _combine(
    scheduler_class: type[Any], settings: Settings, planner: BatchPlanner
) -> RequestScheduler:
    """Make the user's class; what answers only one of the two questions gets ours beside it."""
    ours = scheduler_of(settings.policy, settings, planner)
    micro_batch = ours.micro_batch_scheduler
    blocks, batch_size = planner.block_manager, settings.max_batch_size
    if issubclass(scheduler_class, CapacityScheduler):
        capacity = _make(scheduler_class, batch_size, block_manager=blocks)
        return SimpleScheduler(capacity, micro_batch)
    if issubclass(scheduler_class, MicroBatchScheduler):
        own = _make(
            scheduler_class,
            batch_size,
            settings.max_num_tokens,
            chunking=settings.chunking,
            count_reusable_tokens=micro_batch.count_reusable_tokens,
        )
        return SimpleScheduler(ours.capacity_scheduler, own)
    parameters = inspect.signature(scheduler_class).parameters
    scheduler: RequestScheduler
    if issubclass(scheduler_class, SimpleScheduler) and "block_manager" not in parameters:
        scheduler = _make(scheduler_class, ours.capacity_scheduler, micro_batch)
    else:  # also a SimpleScheduler that makes both parts itself
        tokens, chunking = settings.max_num_tokens, settings.chunking
        scheduler = _make(scheduler_class, blocks, batch_size, tokens, chunking=chunking)
    return scheduler


def _make(scheduler_class: type[Any], *arguments: object, **options: object) -> Any:
    """Call the class with those of the ``options`` that it takes."""
    parameters = inspect.signature(scheduler_class).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    taken = {name: o for name, o in options.items() if takes_all or name in parameters}
    return scheduler_class(*arguments, **taken)


class GuardedScheduler(RequestScheduler):
    """Runs the user's scheduler and checks each decision; a refused one is made by the default.

    A decision that lets nobody run is refused too, whoever it pauses: nothing would ever change.
    ``is_overruled`` tells of the last decision. Requests whose last token is being computed are not
    shown to it: they hold cache, and nothing can be decided about them.
    """

    def __init__(
        self,
        name: str,
        scheduler: RequestScheduler,
        settings: Settings,
        planner: BatchPlanner,
    ) -> None:
        """``name``: the user's class. `default` decides when its decision is refused."""
        self.name = name
        self.default = fallback_scheduler(settings, planner)
        self._scheduler = scheduler
        self._settings = settings
        self._planner = planner
        self._has_warned = False
        self.is_overruled = False

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """The user's decision if it can be carried out, else the default scheduler's."""
        shown = [r for r in active_requests if r.state is not _TO_COMPLETE]
        try:
            self.is_overruled = False
            if not shown:
                return [], [], []
            # A list of its own: it may take requests out as it goes, and has to be held to all.
            decision = self._scheduler.schedule_request(list(shown), inflight_request_ids)
            checked = check_possible(
                decision, shown, self._settings, self._planner, inflight_request_ids
            )
            is_waiting = inflight_request_ids or len(shown) < len(active_requests)
            if not (checked[0] or checked[1] or is_waiting):  # pausing alone is no progress
                raise InvalidDecision(f"none of {len(shown)} active requests runs")
            return checked
        except BaseException as error:  # the user's code may want to end the thread
            self.is_overruled = True
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "the scheduler %s failed and the default takes over while it does (said "
                    "once): %s",
                    self.name,
                    error if isinstance(error, _OURS) else type(error).__name__,
                    exc_info=None if isinstance(error, InvalidDecision) else error,
                )
            for request in active_requests:  # it may have written chunk sizes
                if request.is_context_init_state and request.request_id not in inflight_request_ids:
                    request.context_chunk_size = request.context_remaining_length
            return self.default.schedule_request(active_requests, inflight_request_ids)
