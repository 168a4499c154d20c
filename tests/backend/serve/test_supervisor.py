"""When a server that failed is started again, after how long, and when that ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from inflight_backend.errors import ServerKilled, ServingError
from inflight_server.serve import supervisor
from inflight_server.serve.supervisor import (
    STEADY_SECONDS,
    Attempt,
    RestartPolicy,
    StopSignals,
    Supervisor,
)
from inflight_server.serve.workspace import Workspace


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Workspace]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Workspace() as workspace:
        yield workspace


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.01)


@pytest.mark.case(120)
def test_delays_double_up_to_a_bound_as_long_as_servers_become_ready() -> None:
    """Whatever clients do to it, others are served again: here for some ten hours."""
    policy = RestartPolicy(1)
    first, longest = supervisor._FIRST_DELAY, supervisor._MAX_DELAY
    delays = [policy.next_delay(1.0) for _ in range(1200)]
    assert delays[:5] == [0.0, first, 2 * first, 4 * first, 8 * first]
    assert max(each for each in delays if each is not None) <= longest
    assert None not in delays


@pytest.mark.case(120)
def test_starts_that_make_no_server_ready_come_to_an_end() -> None:
    """One that did in between gives it as many again."""
    policy = RestartPolicy(3)
    assert None not in [policy.next_delay(each) for each in (1.0, None, None, 1.0, None, None)]
    assert policy.next_delay(None) is None


def test_a_long_good_time_makes_the_next_failure_the_first() -> None:
    policy = RestartPolicy(2)
    assert [policy.next_delay(0.0), policy.next_delay(0.0)] == [0.0, supervisor._FIRST_DELAY]
    assert policy.next_delay(STEADY_SECONDS) == 0.0
    assert policy.num_failures == 1


def run(workspace: Workspace, serve: Callable[[Attempt], None], max_restarts: int = 3) -> None:
    with StopSignals() as signals:
        Supervisor(workspace, signals, RestartPolicy(max_restarts)).run(serve)


@pytest.mark.case(119)
def test_a_failure_after_ready_is_followed_by_a_clean_start(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    region = Path("/dev/shm") / f"{workspace.shm_prefix}test"
    seen: list[tuple[int, bool]] = []

    def serve(attempt: Attempt) -> None:
        seen.append((attempt.number, region.exists() or workspace.status_file.exists()))
        attempt.mark_ready()
        if attempt.number == 1:
            for file in (region, workspace.status_file, workspace.log_file):
                file.write_text("old")
            raise ServingError("the model process died")

    run(workspace, serve)
    assert seen == [(1, False), (2, False)]
    assert "the model process died; starting again now (failure 1)" in capsys.readouterr().err
    assert workspace.log_file.with_suffix(".old").read_text() == "old"


@pytest.mark.case(119)
def test_a_restart_that_nobody_hears_of_takes_place(
    workspace: Workspace, nobody_hears: AbstractContextManager[None]
) -> None:
    numbers: list[int] = []

    def serve(attempt: Attempt) -> None:
        numbers.append(attempt.number)
        attempt.mark_ready()
        if attempt.number == 1:
            raise ServingError("the model process died")

    with nobody_hears:
        run(workspace, serve)
    assert numbers == [1, 2]


@pytest.mark.case(119)
def test_what_the_machine_lacks_is_a_failure_like_others(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers: list[int] = []

    def serve(attempt: Attempt) -> None:
        numbers.append(attempt.number)
        if attempt.number == 2:
            Path("/dev/full").write_text("no room for the log")
        attempt.mark_ready()
        if attempt.number == 1:
            raise ServingError("the model process died")

    run(workspace, serve)
    assert numbers == [1, 2, 3]
    assert "No space left on device; starting again in" in capsys.readouterr().err


@pytest.mark.case(119)
def test_what_cannot_be_removed_is_a_failure_and_no_server_starts_over_it(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it end the launcher at once: the disk may have room again soon."""
    numbers: list[int] = []

    def serve(attempt: Attempt) -> None:
        numbers.append(attempt.number)
        attempt.mark_ready()
        workspace.status_file.mkdir()
        raise ServingError("the model process died")

    with pytest.raises(
        ServingError, match=r"giving up after 2 failed starts in a row, last: .*directory"
    ):
        run(workspace, serve, max_restarts=2)
    assert numbers == [1]
    assert capsys.readouterr().err.count("Is a directory") == 1


def test_a_server_that_never_was_ready_is_not_started_again(workspace: Workspace) -> None:
    def serve(attempt: Attempt) -> None:
        raise ServingError("no such checkpoint")

    with pytest.raises(ServingError, match=r"^no such checkpoint$"):
        run(workspace, serve)


def test_a_server_that_a_signal_ended_while_it_loaded_gets_one_more_chance(
    workspace: Workspace,
) -> None:
    """Ready then, it is not ready *again*."""
    attempts: list[Attempt] = []

    def serve(attempt: Attempt) -> None:
        attempts.append(attempt)
        if len(attempts) % 2:
            raise ServerKilled("tritonserver ended (killed by SIGABRT)")

    run(workspace, serve)
    assert [(each.number, each.failed_at) for each in attempts] == [(1, None), (2, None)]

    def serve_never(attempt: Attempt) -> None:
        attempts.append(attempt)
        raise ServerKilled(f"killed {attempt.number}")

    with pytest.raises(ServerKilled, match=r"^killed 2$"):
        run(workspace, serve_never)


@pytest.mark.case(120)
def test_crashes_between_answers_do_not_use_up_the_restarts(workspace: Workspace) -> None:
    """As those that a client causes: more of them than there may be failed starts."""
    numbers: list[int] = []

    def serve(attempt: Attempt) -> None:
        numbers.append(attempt.number)
        attempt.mark_ready()
        if attempt.number < 7:
            raise ServerKilled("tritonserver ended (killed by SIGSEGV)")

    run(workspace, serve, max_restarts=1)
    assert numbers == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.case(120)
def test_it_gives_up_with_the_last_reason(workspace: Workspace) -> None:
    def serve(attempt: Attempt) -> None:
        if attempt.number == 1:
            attempt.mark_ready()  # the later ones do not even load
        raise ServingError(f"reason {attempt.number}")

    with pytest.raises(ServingError, match="giving up after 1 failed start, last: reason 2"):
        run(workspace, serve, max_restarts=1)


def test_no_restarts_at_all(workspace: Workspace) -> None:
    def serve(attempt: Attempt) -> None:
        attempt.mark_ready()
        raise ServingError("died")

    with pytest.raises(ServingError, match=r"^died$"):
        run(workspace, serve, max_restarts=0)


def test_whoever_wants_to_stop_does_not_wait(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 3600.0)
    signals = StopSignals()
    attempts: list[int] = []

    def serve(attempt: Attempt) -> None:
        attempts.append(attempt.number)
        attempt.mark_ready()
        if attempt.number == 2:
            signals.count = 1
        raise ServingError("died")

    began = time.monotonic()
    with signals, pytest.raises(ServingError, match=r"^died$"):
        Supervisor(workspace, signals, RestartPolicy(9)).run(serve)
    assert attempts == [1, 2]
    assert time.monotonic() - began < 10
