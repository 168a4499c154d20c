"""`TritonPythonModel` with a fake `pb_utils` around an engine that counts."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.triton_stub import CountingEngine, FakeRequest, FakeSender
from tokenizers import Tokenizer, models, pre_tokenizers

from inflight_backend.status import read_status, stop_file_of
from inflight_backend.triton.model import TritonPythonModel
from inflight_protocol import INPUT_BY_NAME, OUTPUT_BY_NAME
from inflight_protocol.tensors import make_inputs
from inflight_scheduler import ScheduledBatch

WAIT = 60.0  # for what takes milliseconds: a busy machine may not come to it for long


def write_number_tokenizer(folder: Path, size: int = 1000) -> None:
    """A tokenizer whose words are numbers, each its own id."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


class Gate(threading.Event):
    """An engine hook. Set, as it is at first: the engine runs. Cleared: its next step waits."""

    def __init__(self) -> None:
        super().__init__()
        self.set()
        self.is_reached = threading.Event()
        self._num_left: int | None = None

    def close_after(self, num_steps: int) -> None:
        """Clear the gate when so many more steps have begun, however fast they are."""
        self._num_left = num_steps

    def go_on(self, num_steps: int) -> None:
        """Let the step that waits go on, until so many more have begun; the last of them waits."""
        self.is_reached.clear()
        self.close_after(num_steps - 1)
        self.set()
        assert self.is_reached.wait(WAIT)

    def __call__(self, batch: ScheduledBatch) -> None:
        """Before a step."""
        if self._num_left is not None:
            self._num_left -= 1
            if self._num_left < 0:
                self._num_left = None
                self.clear()
                self.is_reached.set()
        assert self.wait(3 * WAIT)


class Server:
    """A loaded `TritonPythonModel` over an engine that counts."""

    def __init__(
        self,
        folder: Path,
        engine: CountingEngine,
        model_name: str = "tensorrt_llm",
        without: str = "",
        outputs: Sequence[str] = tuple(OUTPUT_BY_NAME),
        **parameters: str,
    ) -> None:
        """``without``: the input that its config, of an older version, does not have. ``outputs``:
        those that it has."""
        self.engine = engine
        self.status_file = folder / "status.json"
        self.drain_file = folder / "drain"
        self.stop_file = stop_file_of(self.drain_file)
        parameters = {
            "gpt_model_path": str(folder),
            "status_file": str(self.status_file),
            "drain_file": str(self.drain_file),
            "cancellation_check_period_ms": "5",
            "stats_check_period_ms": "5",
            "max_batch_size": "4",
            **parameters,
        }
        config = {
            "input": [{"name": name} for name in INPUT_BY_NAME if name != without],
            "output": [{"name": name} for name in outputs],
            "parameters": {k: {"string_value": v} for k, v in parameters.items()},
        }
        self.model = TritonPythonModel()
        self.model.initialize(
            {
                "model_config": json.dumps(config),
                "model_name": model_name,
                "model_version": "1",
            }
        )

    def end_all(self) -> None:
        """What the launcher does when the drain time is over."""
        self.drain_file.touch()
        self.stop_file.touch()

    def send(
        self,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        sender: FakeSender | None = None,
        **values: Any,
    ) -> FakeSender:
        request = FakeRequest(make_inputs(values), request_id, outputs, sender=sender)
        self.model.execute([request])
        return request.sender

    def send_all(self) -> None:
        """Until the dispatcher has sent what it was handed so far, or keeps it for want of room."""
        for _ in range(2):  # answers leave before the tokens of their round
            self.ask("nobody", (), why=True)

    def ask(self, request_id: str = "", outputs: tuple[str, ...] = (), **values: Any) -> FakeSender:
        sender = self.send(request_id, outputs, **values)
        assert sender.is_final.wait(WAIT)
        return sender


@contextmanager
def full_disk(status_file: Path) -> Iterator[None]:
    """While entered, no `StatusWriter` of this process can write ``status_file``."""
    scratch = status_file.with_name(f"{status_file.name}.{os.getpid()}.tmp")
    scratch.mkdir()
    try:
        yield
    finally:
        scratch.rmdir()


def responses_of(sender: FakeSender) -> list[dict[str, Any]]:
    """The tensors of every response, by name; an error has none."""
    return [
        {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors}
        for response in sender.responses
    ]


def values_of(sender: FakeSender, name: str) -> list[Any]:
    """What all responses say in tensor ``name``, one after the other."""
    tensors = (response[name] for response in responses_of(sender) if name in response)
    return [value for tensor in tensors for value in tensor.reshape(-1).tolist()]


def ids_of(sender: FakeSender) -> list[int]:
    return values_of(sender, "output_ids")


def text_of(sender: FakeSender) -> str:
    return b"".join(values_of(sender, "text_output")).decode()


def error_of(sender: FakeSender) -> tuple[str, int]:
    assert len(sender.responses) == 1
    error = sender.responses[0].error
    assert error is not None
    return str(error), error.code


def wait_until(is_true: Callable[[], bool], what: str = "it") -> None:
    """Poll until ``is_true``; fail after `WAIT` seconds."""
    deadline = time.monotonic() + WAIT
    while not is_true():
        assert time.monotonic() < deadline, f"not within {WAIT} s: {what}"
        time.sleep(0.002)


def wait_until_queued(server: Server, num_queued: int) -> None:
    wait_until(lambda: len(server.model._queue) == num_queued)


def phase_of(server: Server) -> str:
    """What the status file says; "" while there is none."""
    return getattr(read_status(server.status_file), "phase", "")


def wait_for_phase(server: Server, phase: str) -> None:
    wait_until(lambda: phase_of(server) == phase, f"phase {phase}")


def last_error(sender: FakeSender) -> tuple[str, int] | None:
    """The error with which an answer ended, of which parts may have come before."""
    error = sender.responses[-1].error
    return None if error is None else (str(error), error.code)
