"""A user's scheduler decides; a bad one is overruled and nothing is lost."""

from __future__ import annotations

import logging

import pytest
from fakes import CountingEngine
from manager_harness import Recorder, request, running
from user_schedulers import BadChunks, Greedy, Lazy, OneAtATime, Raises

from inflight_backend.errors import ConfigurationError
from inflight_backend.optional_params import TrtGptModelOptionalParams
from inflight_backend.user_scheduler import find_scheduler_class


def params_for(scheduler: type) -> TrtGptModelOptionalParams:
    return TrtGptModelOptionalParams(
        max_batch_size=8, scheduler_class=f"{scheduler.__module__}:{scheduler.__name__}"
    )


def test_the_users_scheduler_decides() -> None:
    recorder = Recorder([request(i, [100 * i], 30 - i) for i in range(1, 6)])
    finished: list[int] = []
    recorder.on_response = lambda i, is_final: finished.append(i) if is_final else None
    engine = CountingEngine()
    with running(recorder, engine, params=params_for(OneAtATime)):
        recorder.wait_for_finals(*range(1, 6))
    assert finished == [5, 4, 3, 2, 1]
    assert max(len(b.context_chunks) + len(b.generation_slots) for b in engine.batches) == 1


@pytest.mark.parametrize("scheduler", [Raises, Greedy, Lazy, BadChunks])
@pytest.mark.case(98)
def test_a_bad_scheduler_is_overruled_with_one_warning(  # case 98
    scheduler: type, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder([request(i, [100 * i], 30) for i in range(1, 7)])
    engine = CountingEngine(num_blocks=16, tokens_per_block=4)
    with (
        caplog.at_level(logging.WARNING),
        running(recorder, engine, params=params_for(scheduler)),
    ):
        recorder.wait_for_finals(*range(1, 7))
    for i in range(1, 7):
        assert recorder.tokens(i) == list(range(100 * i + 1, 100 * i + 31))
    warnings = [record for record in caplog.records if "takes over" in record.message]
    assert len(warnings) == 1
    assert recorder.stats[-1]["Used KV cache blocks"] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "must have the form package.module:ClassName"),
        ("no_such_module:Scheduler", "No module named 'no_such_module'"),
        ("json:NoSuchClass", "has no attribute 'NoSuchClass'"),
        ("json:JSONDecoder", "is not a RequestScheduler"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_scheduler_class(name)
