"""The process of a rank behind the first: it runs every plan that the first one sends.

It needs neither scheduler nor tokenizer, and answers nobody. It ends with the first rank: the
kernel kills it when that process ends, and across machines when the connection does.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from inflight_backend.errors import ServingError
from inflight_backend.log import get_logger
from inflight_backend.process_guard import die_with_writer
from inflight_backend.ranks.machines import Machines, connect
from inflight_backend.ranks.messages import (
    Beat,
    Begin,
    Failed,
    Join,
    LoadAdapter,
    Prepare,
    Ready,
    Step,
    Stop,
    pack,
    receive_order,
)

BEAT_SECONDS = 0.2
_FAILURE = 1

_logger = get_logger(__name__)


class _Pulse:
    """Tells the first rank, from a thread of its own, that this process lives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._turn = connection, threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLRDHUP)
        threading.Thread(target=self._run, name="Beat", daemon=True).start()

    def send(self, message: Ready | Beat | Failed) -> None:
        """One message at a time."""
        with self._turn:
            self._connection.sendall(pack(message))

    def _run(self) -> None:
        while not self._poll.poll(BEAT_SECONDS * 1000):
            try:
                self.send(Beat())
            except OSError:
                break
        os._exit(_FAILURE)  # whatever else runs here waits for a rank that has gone


def run_rank(connection: socket.socket, changes: Mapping[str, Any] | None = None) -> int:
    """Run the plans that come by ``connection``, up to its end; what the process exits with.

    ``changes``: what is otherwise on this machine than `Begin` says.
    """
    pulse = _Pulse(connection)
    try:
        _serve(connection, pulse, changes or {})
    except EOFError:
        return _FAILURE
    except ServingError as error:
        with suppress(OSError):
            pulse.send(Failed(str(error), is_expected=True))
        return _FAILURE
    except BaseException as error:
        _logger.exception("a rank failed")
        first_line = str(error).partition("\n")[0]
        with suppress(OSError):
            pulse.send(Failed(f"{type(error).__name__}: {first_line}"))
        return _FAILURE
    return 0


def _serve(connection: socket.socket, pulse: _Pulse, changes: Mapping[str, Any]) -> None:
    begin = receive_order(connection)
    assert isinstance(begin, Begin)
    begin = msgspec.structs.replace(begin, **changes)
    from inflight_backend.engine import Engine  # torch: seconds to import
    from inflight_backend.models.blocks.lora import Adapter
    from inflight_backend.ranks.adapters import from_bytes
    from inflight_backend.ranks.meeting import meet

    pulse.send(Ready())
    ranks = meet(begin)
    engine = Engine.load(Path(begin.checkpoint), begin.config, ranks=ranks)
    before = None
    while True:
        order = receive_order(connection)
        if isinstance(order, Step):
            pending = engine.submit(order.batch)
            if before is not None:
                before.read()  # at most two steps may be on their way
            before = pending if engine.is_asynchronous else None
        elif isinstance(order, LoadAdapter):
            adapter = None
            if order.parts is not None:
                parts = tuple(from_bytes(part) for part in order.parts)
                adapter = engine.prepare_adapter(Adapter(parts, b""))
            engine.load_adapter(order.place, adapter)
        elif isinstance(order, Prepare):
            engine.prepare_thread()
            ranks.least(0)  # the first rank is ready when all are
        else:
            assert isinstance(order, Stop)
            return


def join(machines: Machines, rank: int, local_rank: int, model: str) -> int:
    """Be a rank of the model of another machine; what the process exits with.

    ``model``: the checkpoint here; "": where the first machine has it.
    """
    try:
        connection = connect(machines)
    except ServingError as error:
        _logger.error("%s", error)
        return _FAILURE
    connection.sendall(pack(Join(rank)))
    changes = {"local_rank": local_rank, **({"checkpoint": model} if model else {})}
    return run_rank(connection, changes)


def main() -> None:
    """Run as ``python -m inflight_backend.ranks.worker CONNECTION LIFELINE`` (descriptors), or as
    ``... join HOST PORT RANK LOCAL_RANK LIFELINE MODEL``."""
    kind, *arguments = sys.argv[1:]
    if kind == "join":
        host, port, rank, local_rank, lifeline, model = arguments
        _die_with(int(lifeline))
        code = join(Machines(host=host, port=int(port)), int(rank), int(local_rank), model)
    else:
        (lifeline,) = arguments
        _die_with(int(lifeline))
        code = run_rank(socket.socket(fileno=int(kind)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # libraries that wait for other ranks must not keep it


def _die_with(lifeline: int) -> None:
    os.set_blocking(lifeline, False)
    die_with_writer(lifeline)


if __name__ == "__main__":
    main()
