"""The way between models of this package in one tritonserver: a Unix socket for each request.

Not Triton's own calls from model to model (BLS). Where a second response to a call comes while
another call begins, Python backends up to that of June 2026, if not later ones, stand still for
ever: one thread waits for Python's lock, one for the table of calls, one for the queue of the
first. Before April 2025 an error behind a first response was lost as well, and under many calls the
process that calls crashed now and then (24.10). Here whoever leaves, however it does, is seen to:
its connection closes.

The sockets are abstract: there is no file, so nothing is left behind. Every process in the same
network namespace can reach them, so both sides look at who the other is.
"""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from inflight_backend.errors import CapacityExceeded
from inflight_backend.triton.relay_messages import LENGTHS, Message, unpack

_VERSION = "1"  # of the messages; others have other addresses
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MIN_DESCRIPTORS = 2**13
_CONNECT_SECONDS = 1.0  # while a model is loaded again nobody listens for some 0.05 s
_QUEUE_SECONDS = 10.0  # where very many connect at once; by default Linux lets 4096 wait
_CONNECT_PAUSE = 0.02


def address_of(model: str) -> bytes:
    """Where the model ``model`` of this process's tritonserver listens."""
    parent = os.getppid()
    namespace = os.stat("/proc/self/ns/pid").st_ino  # two may have the same network
    identity = f"{_VERSION} {namespace} {parent} {_stat_of(parent)[_START_TIME]} {model}"
    return b"\0inflight-relay-" + hashlib.sha256(identity.encode()).hexdigest()[:32].encode()


def is_sibling(connection: socket.socket) -> bool:
    """True if the other side is a process of the same user that the same tritonserver started."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    with suppress(OSError):  # it has gone
        return user == os.geteuid() and int(_stat_of(process)[_PARENT]) == os.getppid()
    return False


def connect(connection: socket.socket, model: str) -> None:
    """Connect to ``model``; `CapacityExceeded` if it is not there, or lets nobody in.

    Tries for a second: it may be loaded anew just now. A call that may wait would do so for ever
    before a frozen process whose queue is full.
    """
    started, timeout = time.monotonic(), connection.gettimeout()
    address = address_of(model)
    connection.setblocking(False)
    while True:
        try:
            connection.connect(address)
            break
        except ConnectionRefusedError:
            limit, what = _CONNECT_SECONDS, "is not loaded, or the server is shutting down"
        except BlockingIOError:
            limit, what = _QUEUE_SECONDS, "takes no requests just now; try again later"
        if time.monotonic() > started + limit:
            raise CapacityExceeded(f"the model '{model}' {what}")
        time.sleep(_CONNECT_PAUSE)
    connection.settimeout(timeout)
    if not is_sibling(connection):
        raise CapacityExceeded(f"the model '{model}' has gone, or another process is in its place")


def read_messages(connection: socket.socket) -> Iterator[Message]:
    """The messages that come, until the other side closes or is cut off in the midst of one."""
    with connection.makefile("rb") as file, suppress(ConnectionError):
        while len(lengths := file.read(LENGTHS.size)) == LENGTHS.size:
            head_size, contents_size = LENGTHS.unpack(lengths)
            head, contents = file.read(head_size), file.read(contents_size)
            if len(head) + len(contents) < head_size + contents_size:
                return
            yield unpack(head, contents)


def allow_many_connections() -> None:
    """Raise this process's limit of open files, where the system allows it: each request that is
    relayed has one. Many systems begin at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_DESCRIPTORS:
        limit = _MIN_DESCRIPTORS if hard < 0 else min(_MIN_DESCRIPTORS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


_PARENT, _START_TIME = 1, 19  # of `_stat_of`


def _stat_of(process: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold anything."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
