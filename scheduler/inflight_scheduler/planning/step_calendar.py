"""Which requests to look at in which step."""

from __future__ import annotations

from inflight_scheduler.request import LlmRequest


class StepCalendar:
    """At most one entry for each request; ``clock`` counts the steps, and its owner moves it on.

    Before that the owner takes or postpones the entries of the step: those of the past are never
    looked at.
    """

    __slots__ = ("_entries", "_step_of", "clock")

    def __init__(self) -> None:
        self.clock = 0
        self._entries: dict[int, dict[int, LlmRequest]] = {}  # step -> id -> who
        self._step_of: dict[int, int] = {}  # id -> step

    def enter(self, request: LlmRequest, num_steps: int) -> None:
        """Look at ``request`` in ``num_steps`` steps from now, and not before."""
        self.forget(request)
        step = self.clock + num_steps
        self._step_of[request.request_id] = step
        self._entries.setdefault(step, {})[request.request_id] = request

    def forget(self, request: LlmRequest) -> None:
        """Do not look at ``request``, whether it had an entry or not."""
        step = self._step_of.pop(request.request_id, None)
        if step is not None:
            entries = self._entries[step]
            del entries[request.request_id]
            if not entries:
                del self._entries[step]

    def take(self) -> list[LlmRequest]:
        """Who has an entry for this step, and has none any more."""
        taken = self._entries.pop(self.clock, {})
        for request_id in taken:
            del self._step_of[request_id]
        return list(taken.values())

    def due(self) -> list[LlmRequest]:
        """Who has an entry for this step, and keeps it."""
        return list(self._entries.get(self.clock, {}).values())

    def postpone(self, num_steps: int) -> None:
        """Look at those with an entry for this step in ``num_steps``, at least 1, from now."""
        postponed = self._entries.pop(self.clock, {})
        if postponed:
            step = self.clock + num_steps
            self._step_of.update(dict.fromkeys(postponed, step))
            self._entries.setdefault(step, {}).update(postponed)

    def num_steps_to(self, request: LlmRequest) -> int:
        """Steps until the entry of ``request``; `KeyError` if it has none."""
        return self._step_of[request.request_id] - self.clock
