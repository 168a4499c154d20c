"""LoopCalls to the thread of the loop: each is answered, whatever it raises and however late."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

import pytest
from support.manager_harness import WAIT, GatedEngine, Recorder, request, running

from inflight_backend.manager.wait_reasons import LoopCalls


def test_questions_wait_for_their_owner_and_are_answered_in_order() -> None:
    questions = LoopCalls(wake=lambda: None)
    seen: list[int] = []
    futures = [questions.ask(partial(seen.append, number)) for number in range(3)]
    assert not any(future.done() for future in futures)
    questions.answer()
    assert all(future.done() for future in futures)
    assert seen == [0, 1, 2]


def test_a_question_to_an_owner_that_has_gone_is_answered_where_it_is_asked() -> None:
    questions = LoopCalls(wake=lambda: None)
    last = questions.ask(threading.get_ident)
    questions.close()
    assert last.result(0) == questions.ask(threading.get_ident).result(0)


@pytest.mark.parametrize("error", [ValueError(), SystemExit()])
def test_a_question_that_raises_ends_nothing_but_itself(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with running(Recorder()) as manager:
        assert manager._questions.ask(fail).exception(WAIT) is error
        assert manager._questions.ask(lambda: 1).result(WAIT) == 1


def test_a_question_that_nobody_waits_for_any_more_is_left_out() -> None:
    engine = GatedEngine()
    recorder = Recorder([request(1, [100], 5)])
    with running(recorder, engine) as manager:
        assert engine.has_begun.wait(WAIT)
        assert manager.why(1).cancel()
        last = manager.why(1)
        engine.go_on.set()
        assert last.result(WAIT)["request"] == 1
        recorder.wait_for_finals(1)


def test_a_callback_that_raises_ends_no_thread_but_its_own() -> None:
    def fail(_: object) -> None:
        raise SystemExit

    questions = LoopCalls(wake=lambda: None)
    futures = [questions.ask(lambda: 1) for _ in range(2)]
    futures[0].add_done_callback(fail)
    questions.answer()
    assert [future.result(0) for future in futures] == [1, 1]


@pytest.mark.parametrize("attempt", range(5))
def test_every_question_asked_while_the_loop_ends_is_answered(attempt: int) -> None:
    futures: list[Future[int]] = []
    is_over = threading.Event()
    with running(Recorder()) as manager:

        def ask() -> None:
            while not is_over.wait(0.0001):
                futures.append(manager._questions.ask(lambda: 1))

        thread = threading.Thread(target=ask)
        thread.start()
        manager.shutdown()
        is_over.set()
        thread.join()
    assert all(future.result(WAIT) == 1 for future in futures)
