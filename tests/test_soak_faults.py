"""What the soak says of answers that end too early, or in no form that is known, and of a server
that holds what nobody waits for."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from support.soak_servers import asked, names_of, pieces_of, response
from support.triton_stub import FakeSender

from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.triton.frontend import Frontend, SharedStream
from inflight_backend.triton.queue import RequestIds
from inflight_backend.triton_io.beam_stream import BeamStream
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_backend.triton_io.token_stream import TokenStream
from inflight_scheduler import LlmRequest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from soak_parts import ends, quiet, verdict
from soak_parts.inside import kept
from soak_parts.places import count_forgotten
from soak_parts.questions import Asker
from soak_parts.server import processes_of
from soak_parts.traffic import NotAnswered, Tally, Traffic

pytestmark = pytest.mark.slow

PER_REQUEST: tuple[type, ...] = (
    BeamStream,
    Frontend,
    InferenceRequest,
    LlmRequest,
    RequestIds,
    ResponseSender,
    SharedStream,
    TokenStream,
)


async def until(is_so: Callable[[], bool]) -> None:
    """Return when it is; fail after a minute."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def traffic_of(
    num_workers: int, is_enough: Callable[[Tally], bool]
) -> Callable[[Traffic], Awaitable[Traffic]]:
    """Traffic of so many until there was enough, which is given back when it has stopped."""

    async def work(traffic: Traffic) -> Traffic:
        traffic.start(num_workers)
        await until(lambda: is_enough(traffic.tally))
        await traffic.stop()
        return traffic

    return work


def test_an_answer_in_no_known_form_ends_no_worker() -> None:
    """It was raised when the traffic stopped, and the report of the whole hour was lost."""

    async def script(each: Any) -> AsyncIterator[Any]:
        message = response("1", is_final=True)
        message.infer_response.outputs[0].datatype = "UINT8"
        yield message

    traffic = asked(script, traffic_of(4, lambda tally: tally.num_wrong > 8))
    assert not traffic.open_since


def test_of_what_is_wrong_all_is_counted_and_not_all_kept() -> None:
    tally = Tally()
    for number in range(5000):
        tally.blame(f"wrong {number}")
    assert (tally.num_requests, tally.to_json()["wrong"]) == (5000, 5000)
    assert len(tally.wrong) < 5000


CUTS: dict[str, tuple[int, int, int]] = {  # pieces, finals, and how often each is wrong
    "right": (3, 0, 0),
    "ended": (3, 1, 0),
    "ended twice": (3, 2, 0),
    "somebody else's": (-1, 0, 1),
}


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("kind", ["complete", "stopped", "cancelled"])
def test_what_came_of_a_stream_that_was_cut_is_judged(kind: str, how: str) -> None:
    num_pieces, num_finals, num_wrong = CUTS[how]

    async def script(each: Any) -> AsyncIterator[Any]:
        yield response(pieces_of(each, 2) if num_pieces > 0 else " somebody else")
        for _ in range(num_finals):
            yield response(is_final=True)
        raise RuntimeError("cut")

    async def ask(traffic: Traffic) -> tuple[int, Tally]:
        num_cut = 0
        for _ in range(12 if kind == "cancelled" else 1):
            try:
                await getattr(traffic, f"_{kind}")()
            except grpc.RpcError:
                num_cut += 1
        return num_cut, traffic.tally

    num_cut, tally = asked(script, ask)
    assert num_cut > 0
    if kind != "cancelled":  # of those, some are not read up to the cut, which is judged elsewhere
        assert tally.num_wrong == num_wrong
    assert tally.finals == ({num_finals: num_cut} if num_finals else {})
    assert tally.num_wrong >= num_wrong * num_cut


def test_a_wrong_text_before_an_error_is_found() -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        yield response(" somebody else")
        yield response(error="Stub process 'tensorrt_llm_0_0' is not healthy.")

    async def ask(traffic: Traffic) -> Tally:
        assert await traffic._complete()
        return traffic.tally

    tally = asked(script, ask)
    assert (tally.num_wrong, tally.outcomes) == (1, {"refused: not healthy": 1})


@pytest.mark.parametrize(
    ("text", "error", "num_wrong"),
    [
        (" 4 5 6 7", "", 0),
        (" 4 5 5 5", "", 1),
        ("", "the server makes no progress", 0),
        ("", "the engine failed", 1),
    ],
)
def test_a_wrong_answer_of_a_server_that_is_back_is_found(
    text: str, error: str, num_wrong: int
) -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        yield response(text, error=error, is_final=True)

    async def ask(traffic: Traffic) -> tuple[bool, Tally]:
        return await traffic.try_once(), traffic.tally

    is_back, tally = asked(script, ask)
    assert (is_back, tally.num_wrong) == (text == " 4 5 6 7", num_wrong)
    assert verdict.judge(sound(), sound(), tally, []) == tally.wrong


def test_a_question_that_is_refused_is_no_end_of_the_soak() -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        yield response(error="the server makes no progress")

    async def ask(traffic: Traffic) -> list[str]:
        with pytest.raises(NotAnswered, match="makes no progress"):
            await traffic.ask_json("", "stats", stats=True)
        asker = Asker(traffic)
        asker.start()
        await until(lambda: bool(asker.wrong))
        await asker.stop()
        return asker.wrong

    (wrong,) = asked(script, ask)
    assert "makes no progress" in wrong


def test_an_id_that_cannot_be_asked_about_counts_as_held() -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        yield response(" ")
        raise RuntimeError("cut")

    why = asked(script, lambda traffic: traffic.why_held("some id"))
    assert "not answered" in why


def test_a_stop_that_is_refused_and_a_wrong_text_are_found_while_all_places_are_taken() -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        if "why" in names_of(each):
            yield response('{"state": "queued", "num_waiting": 1}', name="why")
        elif "stop" in names_of(each):
            yield response(error="no")
            return
        else:
            yield response(" somebody else")
            await asyncio.sleep(0.5)
        yield response(is_final=True)

    async def count(traffic: Traffic) -> tuple[tuple[int, list[str]], int]:
        return await count_forgotten(traffic, 2), traffic.tally.num_wrong

    assert asked(script, count) == ((0, ["no"] * 3), 3)


@pytest.mark.parametrize(
    ("told", "failures"),
    [
        (["10 3 9", "510 0 0"], []),
        (["10 0 0"], []),
        (["10 3 9", "511 0 0"], ["501 iterations more until all was free: a cancel did not"]),
        (["10 3 9"], ["3 active, 9 blocks in use"]),
        (["10 0 9"], ["0 active, 9 blocks in use"]),
        (["10 3 0"], ["3 active, 0 blocks in use"]),
        (["none", "10 0 0"], ["a question was not answered"]),
        (["none"], ["a question was not answered", "-1 active, -1 blocks in use"]),
    ],
)
def test_what_is_held_or_goes_on_though_nobody_waits_is_found(
    told: list[str], failures: list[str]
) -> None:
    """Each question is answered with iterations, active requests and blocks; the last goes on."""
    left = iter(told)
    is_free_at_last = told[-1].endswith(" 0 0")

    async def script(each: Any) -> AsyncIterator[Any]:
        now = next(left, told[-1])
        if now == "none":
            yield response(error="the server makes no progress")
            return
        iterations, active, used = now.split()
        yield response(
            f'{{"Iteration Counter": {iterations}, "Active Request Count": {active}, '
            f'"Used KV cache blocks": {used}}}',
            name="stats",
            is_final=True,
        )

    async def wait(traffic: Traffic) -> quiet.Rest:
        async def again() -> None:
            """The connection is the test's."""

        traffic.close, close = again, traffic.close  # type: ignore[method-assign]
        rest = await quiet.wait_until_free(lambda: traffic, 60.0 if is_free_at_last else 0.3)
        await close()
        return rest

    found: dict[str, None] = dict.fromkeys(asked(script, wait).failures)
    assert len(found) == len(failures)
    assert all(one.startswith(other) for one, other in zip(found, failures, strict=True))


def test_what_is_lost_while_nothing_is_done_to_the_server_is_found() -> None:
    """Among kills a process that ended by itself was one transport error more."""
    outages = [(100.0, 105.0), (200.0, 238.0)]
    assert ends.judge_harm([100.1, 106.0, 119.9, 252.9], outages) == []
    assert ends.judge_harm([99.9, 100.1, 120.1, 190.0], outages) == [
        "3 requests were lost or refused while nothing was done to the server"
    ]


def test_when_a_request_is_lost_or_refused_by_a_dying_server_is_noted() -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        yield response(error="the server is shutting down")

    def is_enough(tally: Tally) -> bool:
        is_refused = tally.outcomes["refused: shutting down"] > 20
        return is_refused and tally.outcomes["transport error"] > 0  # nobody listens for HTTP

    traffic = asked(script, traffic_of(20, is_enough))
    refused = traffic.tally.outcomes["refused: shutting down"]
    lost = traffic.tally.outcomes["transport error"]
    assert len(traffic.harmed_at) == refused + lost


def sound() -> Tally:
    return Tally(outcomes=Counter({"completed": 3}), finals=Counter({1: 3}))


HARMS: dict[str, Callable[[Tally], None]] = {
    "2 times 'refused: shutting down' before any kill": lambda tally: tally.outcomes.update(
        ["refused: shutting down"] * 2
    ),
    "1 times 'transport error' before any kill": lambda tally: tally.outcomes.update(
        ["transport error"]
    ),
}


@pytest.mark.parametrize("failure", HARMS)
def test_a_server_that_harms_before_any_kill_is_found(failure: str) -> None:
    calm, disturbed = sound(), sound()
    HARMS[failure](disturbed)
    assert verdict.judge(calm, disturbed, sound(), []) == []
    HARMS[failure](calm)
    assert verdict.judge(calm, disturbed, sound(), ["not answered"]) == ["not answered", failure]


def test_every_phase_must_have_one_final_each() -> None:
    calm, disturbed, questions = sound(), sound(), sound()
    disturbed.finals.clear()
    assert verdict.judge(calm, disturbed, questions, []) == []
    calm.finals.clear()
    questions.finals[0] = 1
    disturbed.finals[2] = 1
    assert [each.partition(":")[0] for each in verdict.judge(calm, disturbed, questions, [])] == [
        "load",
        "kills",
        "questions",
    ]


def test_a_process_left_behind_is_found_whatever_its_command_line_says(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(["sleep", "60"], env=environment)
    try:
        while not any("sleep" in line for line in processes_of(tmp_path).values()):
            assert process.poll() is None
        assert list(processes_of(tmp_path)) == [process.pid]
    finally:
        process.kill()
        process.wait()
    assert processes_of(tmp_path) == {}


def test_what_the_model_process_keeps_of_a_request_is_counted() -> None:
    """As its logits processor, which a request asks; of all objects, whoever holds them."""
    model = ResponseFactory(object())
    ids, before = RequestIds(), kept.count()
    forgotten = [ResponseSender(FakeSender(), model) for _ in range(3)]
    number = ids.reserve("forgotten")
    told, tokens = "", [65]
    for _ in range(300):
        logits = torch.zeros(1, 1, 256)
        kept.tell(number, logits, [tokens], 0)
        assert int(logits.isinf().sum()) == 255
        tokens.append(int(logits.argmax()))
        told += chr(tokens[-1])
    counts = json.loads(told)
    assert counts.keys() == {*kept.CLASSES, *kept.LISTS}
    more = {name: count - before[name] for name, count in counts.items() if count != before[name]}
    assert more == {"ResponseSender": len(forgotten), "RequestIds": 1}
    ids.release("forgotten", number)
    del forgotten
    assert kept.count() == before


@pytest.mark.parametrize("name", [*kept.CLASSES, *kept.LISTS])
def test_every_class_that_is_counted_is_there(name: str) -> None:
    (entry,) = [each for each in PER_REQUEST if each.__name__ == name]
    assert name not in kept.LISTS or kept.LISTS[name] in inspect.getsource(entry)


@pytest.mark.parametrize(
    ("counts", "num_kept"),
    [
        ({"LlmRequest": 1, "ResponseSender": 1, "TokenStream": 1, "RequestIds": 0}, 0),
        ({"LlmRequest": 1, "ResponseSender": 1, "TokenStream": 3, "RequestIds": 0}, 2),
        ({"LlmRequest": 1, "ResponseSender": 1, "TokenStream": 1, "RequestIds": 1}, 1),
        ({"LlmRequest": 1, "ResponseSender": 2, "TokenStream": 0}, -1),
        ({"LlmRequest": 0}, -1),
    ],
)
def test_what_is_kept_besides_the_question_is_found(counts: dict[str, int], num_kept: int) -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        message = response(is_final=True)
        told = np.frombuffer(json.dumps(counts).encode(), np.uint8).astype(np.int32)
        message.infer_response.outputs.add(name="output_ids", datatype="INT32", shape=told.shape)
        message.infer_response.raw_output_contents.append(told.tobytes())
        yield message

    found, failures = asked(script, counted)
    assert found == num_kept
    assert bool(failures) == bool(num_kept)


def test_a_server_that_does_not_tell_what_it_keeps_is_found() -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        yield response(error="this server has no logits processor of that name")

    num_kept, (failure,) = asked(script, counted)
    assert num_kept == -1
    assert "no logits processor" in failure


async def counted(traffic: Traffic) -> tuple[int, list[str]]:
    async def again() -> None:
        """The connection is the test's."""

    traffic.close, close = again, traffic.close  # type: ignore[method-assign]
    result = await quiet.count_kept(lambda: traffic, 0.3)
    await close()
    return result
