"""Stories of requests around an engine that takes a step only when told to, and their rules.

What happens between two steps is chosen by the test. The rules: exactly one final for every
request, and nothing held any more when it leaves.
"""

from __future__ import annotations

import copy
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from support.triton_harness import WAIT, Server, responses_of, wait_until
from support.triton_stub import CountedStep, CountingEngine, FakeResponse, FakeSender, fake_pb_utils

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.manager import gpt_manager
from inflight_backend.triton import frontend
from inflight_backend.triton import model as triton_model
from inflight_scheduler import ScheduledBatch
from inflight_server.serve.settings import DEMO_MODEL

NUM_NAMES = 6
KINDS = ("ok", "raise", "not a number", "one not a number", "exit", "wrong count")
LONGEST = 40
NOTHING_MOVES = "nothing moves"
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequences": {"num_return_sequences": 3},
    "drafts": {"draft_input_ids": [1, 2, 0]},  # for a prompt of zeros
    "beams": {"beam_width": 3},
    "guided": {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{30,60}"},
}


class Steps:
    """Grants steps of an engine, and says how each goes."""

    def __init__(self) -> None:
        self._granted = threading.Semaphore(0)
        self._kinds: list[str] = []
        self.is_free = False

    def grant(self, kind: str) -> None:
        self._kinds.append(kind)
        self._granted.release()

    def let_go(self) -> None:
        """No waiting from now on."""
        self.is_free = True
        self._granted.release()

    def take(
        self, execute: Callable[[ScheduledBatch], list[int]], batch: ScheduledBatch
    ) -> list[int]:
        if not self.is_free:
            assert self._granted.acquire(timeout=WAIT)
        kind = self._kinds.pop(0) if self._kinds else "ok"
        tokens = execute(batch)
        if kind == "raise":
            raise RuntimeError("a step")
        if kind == "exit":
            raise SystemExit("a thread")
        if kind == "not a number":
            return [-1] * len(tokens)
        if kind == "one not a number":
            return [-1, *tokens[1:]]
        return tokens[:-1] if kind == "wrong count" else tokens


class SteppedEngine(CountingEngine):
    """Takes a step when one is granted, the way it is asked to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = Steps()

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        """What goes wrong is heard of late, when the step is read."""
        try:
            return super().submit(batch)
        except Exception as error:
            return CountedStep([], error=error)

    def execute(self, batch: ScheduledBatch) -> list[int]:
        return self.steps.take(super().execute, batch)


def stepped_demo() -> tuple[Any, Steps]:
    """The demo model on the real engine, which has beams and takes masks."""
    config = EngineConfig(
        device="cpu",
        max_batch_size=4,
        max_beam_width=3,
        max_num_tokens=64,
        max_tokens_in_paged_kv_cache=384,
    )
    engine: Any = Engine.load(DEMO_MODEL, config)
    steps, real = Steps(), engine.submit

    def submit(batch: ScheduledBatch) -> CountedStep:
        step = real(batch)
        return CountedStep(steps.take(lambda _: list(step.read()), batch), step.read_outputs())

    engine.submit, engine.prepare_thread = submit, lambda: None  # which has steps of its own
    return engine, steps


class StrictSender(FakeSender):
    """Counts what Triton would die of instead of raising where it might be swallowed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_finals = 0
        self.violations: list[str] = []
        self.what_it_holds: Callable[[], list[str]] = list

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        self.num_finals += bool(flags)
        error = response.error if response is not None else None
        if flags and str(error) != NOTHING_MOVES:  # a stall does not wait
            self.violations += self.what_it_holds()
        if self.is_final.is_set():
            self.violations.append("a send after the final")
        super().send(response, flags)

    def is_cancelled(self) -> bool:
        if self.is_final.is_set():
            self.violations.append("is_cancelled() after the final")
            return False
        return self.cancelled


class Story:
    """A loaded model and everything that was sent to it."""

    def __init__(self, server: Server, steps: Steps, *, counts: bool = True) -> None:
        """``counts``: a token is the one before it plus 1."""
        self.server = server
        self.steps = steps
        self.sent: list[tuple[int, StrictSender]] = []
        self._counts = counts
        self._num_sent = 0

    def send(self, name: int, prompt_len: int, num_tokens: int, form: str = "plain") -> None:
        """A stream that counts from a number of its own; refused if its id is in flight."""
        self._num_sent += 1
        start = 0 if form == "drafts" or not self._counts else 20 * self._num_sent
        sender = StrictSender()
        # Only this thread sends, so the numbers that the next request gets are known.
        first = next(copy.copy(self.server.model._frontend._ids._numbers))
        numbers = range(first, first + FORMS[form].get("num_return_sequences", 1))
        sender.what_it_holds = lambda: self._held_by(numbers)
        self.sent.append((start, sender))
        self.server.send(
            f"r{name}",
            sender=sender,
            outputs=("output_ids", "sequence_index"),
            input_ids=[start] * prompt_len,
            request_output_len=num_tokens,
            streaming=True,
            **FORMS[form],
        )

    def stop(self, name: int) -> None:
        ack = self.server.ask(f"r{name}", stop=True)
        assert [response.error for response in ack.responses] == [None]

    def cancel(self, name: int) -> None:
        if name < len(self.sent):
            self.sent[name][1].cancelled = True
            self.server.model._frontend.check_cancelled()

    def expire(self, name: int) -> None:
        """Let the run deadline of the oldest active request pass, if there is any."""
        manager = self.server.model._manager

        def expire() -> None:
            for request in list(manager._active)[:1]:
                request.run_deadline = time.monotonic()
                manager._deadlines.add(request)

        manager._calls.call_soon(expire)

    def abandon(self) -> None:
        """What the watchdog does when nothing moves."""
        for _, sender in self.sent:  # whose text may be that of an error of its own
            sender.what_it_holds = list
        self.server.model._frontend.fail_all(NOTHING_MOVES)

    def step(self, kind: str) -> None:
        self.steps.grant(kind)

    def _held_by(self, numbers: range) -> list[str]:
        """What the requests with these numbers hold of the batch manager."""
        manager = self.server.model._manager
        batcher = manager._batcher
        active = [n for n in numbers if n in manager._intake._preparing or manager._active.get(n)]
        blocks = [n for n in numbers if batcher.block_manager.num_distinct_blocks_of(n)]
        held = {"a place": active, "blocks": blocks}
        return [f"{what} of {which} at the final" for what, which in held.items() if which]

    def finish(self, is_unloaded: bool) -> None:
        """Let everything run out, or unload right away; then check every rule."""
        self.steps.let_go()
        if is_unloaded:
            self.server.model.finalize()
        for start, sender in self.sent:
            assert sender.is_final.wait(WAIT), "a request without an end"
            assert (sender.num_finals, sender.violations) == (1, [])
            for ids in sequences_of(sender).values() if self._counts else ():
                assert ids == list(range(start + 1, start + 1 + len(ids))), "a gap or a double"
        manager = self.server.model._manager
        wait_until(lambda: manager.get_num_active_requests() == 0)
        assert manager._batcher.is_idle_and_intact()
        frontend = self.server.model._frontend
        assert frontend.num_live == 0
        assert frontend._ids._name_to_number == {}
        wait_until(lambda: not self.server.model._dispatcher._streams)
        if not is_unloaded:
            self.server.model.finalize()


@contextmanager
def loaded(engine: Any, **parameters: str) -> Iterator[Server]:
    """A model with four places around ``engine``; what is stopped at its end has time to end."""
    with (
        mock.patch.object(triton_model, "exit_with_parent"),
        mock.patch.object(gpt_manager, "load_engine", return_value=engine),
        mock.patch.object(frontend, "_LAST_SECONDS", WAIT),
        fake_pb_utils(),
        tempfile.TemporaryDirectory() as folder,
    ):
        yield Server(
            Path(folder),
            engine,
            enable_chunked_context="true",
            enable_kv_cache_reuse="true",
            **{"max_queue_size": "3", **parameters},
        )


@contextmanager
def story(policy: str, overlap: str) -> Iterator[Story]:
    """Chunks of 8 tokens, and a pool that two long requests fill."""
    engine = SteppedEngine(num_blocks=16, max_num_tokens=8, max_seq_len=64)
    options = {"overlap_scheduler": overlap, "max_draft_len": "3"}
    with loaded(engine, batch_scheduler_policy=policy, **options) as server:
        yield Story(server, engine.steps)


@contextmanager
def demo_story(policy: str) -> Iterator[Story]:
    """The same with the real engine."""
    engine, steps = stepped_demo()
    options = {"max_beam_width": "3", "tokenizer_dir": str(DEMO_MODEL)}
    with loaded(engine, batch_scheduler_policy=policy, **options) as server:
        yield Story(server, steps, counts=False)


def sequences_of(sender: FakeSender) -> dict[int, list[int]]:
    """Tokens by ``sequence_index``, 0 for the only one."""
    found: dict[int, list[int]] = defaultdict(list)
    for tensors in filter(None, responses_of(sender)):
        index = int(tensors["sequence_index"].item()) if "sequence_index" in tensors else 0
        found[index] += tensors["output_ids"].reshape(-1).tolist()
    return found
