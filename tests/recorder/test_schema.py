"""The bounds of a recording, and the way of its parts into JSON and back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorder_worlds import GUARANTEED, MAX_UTILIZATION, chunkings
from support.scheduler_world import make_request

from inflight_recorder.schema import (
    Header,
    RequestState,
    SettingsRecord,
    apply_changes,
    convert,
)
from inflight_recorder.settings import RecordingError, Settings
from inflight_scheduler import ActiveRequests, BlockManager

SETTINGS = Settings(MAX_UTILIZATION, 12, 4, 6, 40)


@given(
    st.builds(
        Settings,
        policy=st.sampled_from([GUARANTEED, MAX_UTILIZATION]),
        num_blocks=st.integers(1, 2**22),
        tokens_per_block=st.integers(1, 2**16),
        max_batch_size=st.integers(1, 2**16),
        max_num_tokens=st.none() | st.integers(1, 2**24),
        chunking=chunkings,
        enable_reuse=st.booleans(),
        scheduler_class=st.none() | st.just("module:Class"),
        priority_span=st.floats(0, allow_infinity=False, allow_nan=False),
        max_drafting_batch=st.none() | st.integers(0, 9),
    )
)
def test_settings_come_back(settings: Settings) -> None:
    line = msgspec.json.encode(SettingsRecord.of(settings))
    assert msgspec.json.decode(line, type=SettingsRecord).settings() == settings


@given(st.lists(st.lists(st.integers(0, 30), unique=True), max_size=6))
def test_changes_make_the_next_list_of_the_last(lists: list[list[int]]) -> None:
    """As `ActiveRequests` tells them: the same requests come and go in any order."""
    active = ActiveRequests(BlockManager(2**12, 4))
    generation: tuple[int, ...] = ()
    before = active.generation
    active.generation_changes(before)
    for wanted in lists:
        for request in list(active):
            if request.request_id not in wanted:
                active.remove(request)
        for number in wanted:
            if active.get(number) is None:
                active.add(request := make_request(number, 4))
                request.move_to_next_context_chunk()
        changes = active.generation_changes(before)
        before = active.generation
        ids = tuple(request.request_id for request in before)
        generation = ids if changes is None else apply_changes(generation, changes)
        assert generation == ids


@pytest.mark.parametrize("changes", [[5, 1], [0], [~3], [~0, ~0, ~0, ~0]])
def test_changes_of_places_that_are_not_there_are_refused(changes: list[int]) -> None:
    with pytest.raises(RecordingError, match=r"^\+: a place behind the end of the list"):
        apply_changes((7, 8, 9), changes)


STATE = {"request_id": 1, "orig_prompt_len": 5, "prompt_len": 5, "num_tokens": 6,
         "max_new_tokens": 4, "num_computed": 5, "num_pauses": 0}  # fmt: skip
RECORD = msgspec.to_builtins(SettingsRecord.of(SETTINGS))


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (RequestState, STATE | {"prompt_len": 4}, "the lengths of a request contradict"),
        (RequestState, STATE | {"max_new_tokens": 1}, "has nothing left to generate"),
        (RequestState, STATE | {"num_computed": 3}, "generates before its context is computed"),
        (RequestState, STATE | {"priority": 1.5}, "priority: Expected `float` <= 1.0"),
        (RequestState, STATE | {"table": [-1]}, "table[0]: Expected `int` >= 0"),
        (SettingsRecord, RECORD | {"num_blocks": 0}, "num_blocks: Expected `int` >= 1"),
        (SettingsRecord, RECORD | {"num_blocks": 10**18}, "num_blocks: Expected `int` <= 4194304"),
        (SettingsRecord, RECORD | {"max_batch_size": 10**9}, "max_batch_size: Expected `int` <"),
        (SettingsRecord, RECORD | {"max_num_tokens": "many"}, "max_num_tokens: Expected `int | "),
        (SettingsRecord, RECORD | {"policy": "best"}, "there is no capacity policy 'best'; known"),
        (SettingsRecord, RECORD | {"enable_reuse": 1}, "enable_reuse: Expected `bool`"),
        (SettingsRecord, RECORD | {"scheduler_class": "a:\0"}, "scheduler_class: Expected `str`"),
        (SettingsRecord, RECORD | {"priority_span": -1.0}, "priority_span: Expected `float` >= 0"),
        (SettingsRecord, RECORD | {"priority_span": True}, "priority_span: Expected `float`, got"),
        (SettingsRecord, RECORD | {"chunking": {"policy": "no"}}, "chunking.policy: Invalid enum"),
        (SettingsRecord, RECORD | {"colour": 1}, "unknown field `colour`, which this inflight"),
        (Header, {"inflight_recording": 2, "settings": RECORD, "is_running": True}, "only in an"),
        (Header, {"inflight_recording": 2, "settings": RECORD, "cache": {}}, "without block reuse"),
    ],
)
@pytest.mark.case(112)
def test_an_error_names_field_and_bound(kind: type, content: object, message: str) -> None:
    with pytest.raises(RecordingError) as caught:
        convert(content, kind)
    assert message in str(caught.value)


def test_a_chunking_that_contradicts_itself_is_refused() -> None:
    chunking = {"policy": "force_chunk", "unit_size": 3, "max_context_length": 2}
    with pytest.raises(RecordingError, match=r"^chunking: unit_size 3 exceeds"):
        convert(RECORD | {"chunking": chunking}, SettingsRecord).settings()
