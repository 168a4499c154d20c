"""How the processes of one test run share the tests (``pytest -n``)."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling


class Distribution(LoadFileScheduling):  # type: ignore[misc]
    """A file at a time goes to a process that is free; tests/e2e is one piece.

    Its tests share a server, start others of several processes, and watch a clock: one of them at a
    time is enough. Beside them the other processes run what needs a core and no clock.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "e2e" if "/e2e/" in file else file
