"""Schedulers of the user, named in the configuration; each of their decisions is checked."""

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

    ``what``: the kind of object, for the error about the form of ``name``.
    """
    module_name, _, object_name = name.partition(":")
    if not module_name or module_name.startswith(".") or not object_name:
        raise ConfigurationError(f"{setting} = '{name}' must have the form package.module:{what}")
    try:
        return getattr(importlib.import_module(module_name), object_name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{setting} = '{name}': {error}") from None
    except (Exception, SystemExit) as error:  # raised by the module's own code
        raise ConfigurationError(
            f"{setting} = '{name}' cannot be imported: {type(error).__name__}: {error}"
        ) from error


_logger = get_logger(__name__)
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE
_OURS = InvalidDecision, ContextTooLong  # their messages quote no text, so they may be logged
_KINDS = (RequestScheduler, CapacityScheduler, MicroBatchScheduler)

Decision = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]


def find_scheduler_class(name: str) -> type:
    """The class ``package.module:ClassName``, trusted code that the operator names."""
    scheduler_class = find_entry("scheduler_class", name, "ClassName")
    if not isinstance(scheduler_class, type) or not issubclass(scheduler_class, _KINDS):
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise ConfigurationError(f"scheduler_class = '{name}' is none of {kinds}")
    return scheduler_class


def make_guarded(
    scheduler_class: type, settings: Settings, planner: BatchPlanner
) -> GuardedScheduler:
    """The user's scheduler for these settings, over the blocks and slots of ``planner``.

    `ConfigurationError` if its constructor fails.
    """
    name = scheduler_class.__name__
    try:
        scheduler = _combine(scheduler_class, settings, planner)
    except BaseException as error:  # also SystemExit
        reason = f"{type(error).__name__}: {error}"  # the text of a KeyError alone says little
        raise ConfigurationError(f"scheduler_class {name} cannot be made: {reason}") from error
    return GuardedScheduler(name, scheduler, settings, planner)


def _combine(
    scheduler_class: type[Any], settings: Settings, planner: BatchPlanner
) -> RequestScheduler:
    """Make the user's class; a scheduler of one part is combined with our other part."""
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
    else:  # also a SimpleScheduler that makes both of its parts
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
    """Checks each decision of the user's scheduler and replaces a refused one by the default's.

    A decision that runs no request is refused too, even if it pauses some: it would repeat for
    ever. ``is_overruled``: of the last decision. Requests whose last token is being computed are
    not shown to the scheduler: they hold cache, and nothing about them can be decided.
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
            # A copy: the scheduler may change its list, and is checked against all requests.
            decision = self._scheduler.schedule_request(list(shown), inflight_request_ids)
            checked = check_possible(
                decision, shown, self._settings, self._planner, inflight_request_ids
            )
            is_waiting = inflight_request_ids or len(shown) < len(active_requests)
            if not (checked[0] or checked[1] or is_waiting):  # pausing alone is no progress
                raise InvalidDecision(f"none of {len(shown)} active requests runs")
            return checked
        except BaseException as error:  # also SystemExit
            self.is_overruled = True
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "the scheduler %s failed and the default takes over while it does (logged "
                    "once): %s",
                    self.name,
                    error if isinstance(error, _OURS) else type(error).__name__,
                    exc_info=None if isinstance(error, InvalidDecision) else error,
                )
            for request in active_requests:  # it may have written chunk sizes
                if request.is_context_init_state and request.request_id not in inflight_request_ids:
                    request.context_chunk_size = request.context_remaining_length
            return self.default.schedule_request(active_requests, inflight_request_ids)
