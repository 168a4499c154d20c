"""Ranks on several machines: they join the first one over TCP, and each machine starts its own.

The connections and `torch.distributed` are neither encrypted nor authenticated: the machines belong
into a network of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight_backend.errors import ConfigurationError
from inflight_backend.log import get_logger
from inflight_backend.models.parallel.place import MAX_RANKS

JOIN_SECONDS = 300.0
"""How long machines wait for one another: names may resolve late, and images be fetched first."""
DEFAULT_PORT = 29500
_NAME_SECONDS = 60.0
"""How long the first machine waits until its own name, which may be that of a pod, is known."""
_RETRY_SECONDS = 0.5
_LOOK_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}

_logger = get_logger(__name__)


def check_no_mpi() -> None:
    """`ConfigurationError` where MPI has started a server for each rank, as
    ``launch_triton_server.py`` does."""
    count = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if count != "1":
        raise ConfigurationError(
            f"mpirun has started {count} servers: use --world_size 1, since the model starts its "
            f"ranks itself (tensor_parallel_size = {count})"
        )


@dataclass(frozen=True, slots=True)
class Machines:
    """Those that run one model: ``num_nodes``, which join the first at ``host`` and ``port``; the
    ranks of a model meet at the port behind it."""

    num_nodes: int = 1
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT

    def ranks_of(self, node: int, num_ranks: int) -> range:
        """The ranks of one machine; `ConfigurationError` if they cannot be divided."""
        if num_ranks % self.num_nodes or not 1 <= self.num_nodes <= MAX_RANKS:
            raise ConfigurationError(
                f"num_nodes is {self.num_nodes}, which does not divide the {num_ranks} ranks of "
                "tensor_parallel_size * pipeline_parallel_size"
            )
        if not 0 <= node < self.num_nodes:
            raise ConfigurationError(f"node_rank is {node}, and num_nodes only {self.num_nodes}")
        size = num_ranks // self.num_nodes
        return range(node * size, (node + 1) * size)

    @contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """On the first machine, for `accept`."""
        try:
            family, address = self._own_address()
            listener = socket.create_server(address, family=family, backlog=MAX_RANKS)
        except OSError as error:
            raise ConfigurationError(
                f"rank_address = '{self.host}:{self.port}': {error.strerror}; it must be an "
                "address of this machine"
            ) from None
        with listener:
            yield listener

    def _own_address(self) -> tuple[int, tuple[Any, ...]]:
        """Family and address of ``host``, IPv4 if it has one."""
        deadline = time.monotonic() + _NAME_SECONDS
        while True:
            try:
                found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            except socket.gaierror:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
                continue
            family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
            return family, address


def watch_link(connection: socket.socket) -> None:
    """Notice a machine that has gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def accept(
    listener: socket.socket, wanted: Sequence[int], read_rank: Callable[[socket.socket], int]
) -> dict[int, socket.socket]:
    """The connections of the ranks ``wanted``, by rank; `ConfigurationError` if not all come."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    while missing := [rank for rank in wanted if rank not in found]:
        listener.settimeout(max(deadline - time.monotonic(), _LOOK_SECONDS))
        try:
            connection, (host, *_) = listener.accept()
        except TimeoutError:
            raise ConfigurationError(
                f"rank {missing[0]} has not joined within {JOIN_SECONDS:g} s: start "
                "`inflight worker` on its machine"
            ) from None
        connection.settimeout(_CONNECT_SECONDS)
        try:
            rank = read_rank(connection)
        except (EOFError, OSError, ValueError):
            connection.close()
            continue
        if rank not in missing:
            _logger.warning("%s asks to be rank %d, which is not awaited", host, rank)
            connection.close()
            continue
        watch_link(connection)
        found[rank] = connection
    return found


def connect(machines: Machines) -> socket.socket:
    """To the first machine, which may start later; `ConfigurationError` after `JOIN_SECONDS`."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            connection = socket.create_connection((machines.host, machines.port), _CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"{machines.host}:{machines.port} does not answer ({error.strerror or error})"
                ) from None
            time.sleep(_RETRY_SECONDS)
            continue
        connection.settimeout(None)
        watch_link(connection)
        return connection


def run_node(machines: Machines, ranks: Sequence[int], model: Path | None) -> int:
    """Run ``ranks`` here until one ends or this process is asked to; what it exits with.

    ``model``: the checkpoint on this machine; None: where the first one has it.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)  # the kernel kills the ranks when this process dies
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "inflight_backend.ranks.worker", "join", machines.host,
             str(machines.port), str(rank), str(local_rank), str(reader), str(model or "")],
            stdin=subprocess.DEVNULL,
            pass_fds=(reader,),
        )
        for local_rank, rank in enumerate(ranks)
    ]  # fmt: skip
    os.close(reader)
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        while not asked and all(process.poll() is None for process in processes):
            time.sleep(_LOOK_SECONDS)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        os.close(writer)
        for number, handler in before.items():
            signal.signal(number, handler)
    ended = next((code for code in codes if code), 0)
    return 0 if asked else abs(ended or 0)
