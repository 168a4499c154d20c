"""tritonserver and the model processes it starts, as one thing to watch and to stop.

They live in a process group of their own, so that Ctrl-C reaches the launcher alone, which decides.
Nor do they hear SIGTERM, which systemd sends to every process of a service, and at which
tritonserver cuts its streams after seconds: it is asked to end by SIGINT, which it takes alike. The
server is killed by the kernel if the launcher dies; the launcher adopts and reaps a model process
whose server died.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from inflight_backend.errors import ServingError
from inflight_server.serve.messages import say

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05
_MAX_FILES = 2**16
# Triton reads JSON by recursion, with 70 to 330 bytes of stack for a level (24.10); a stack that
# is full ends it. With so much it answers any body of 6 MB. What is not used takes no memory.
_STACK_BYTES = 2**30
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_KILLED_SECONDS = 30.0  # to give much memory back; who needs more waits in a driver

_libc = ctypes.CDLL(None, use_errno=True)


class ServerProcess:
    """A running server; `stop` ends it and everything it started, and must be called."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int
    ) -> None:
        """Start ``command`` with its output in ``output``; `ServingError` if that fails."""
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_prepare,
            )
        except OSError as error:
            raise ServingError(f"cannot start {command[0]}: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """Id of the server and of its process group."""
        return self._process.pid

    def exit_status(self) -> str | None:
        """How the server ended, in words; None while it runs."""
        code = self._process.poll()
        return None if code is None else _in_words(code)

    @property
    def was_killed(self) -> bool:
        """True if a signal ended the server, one of its own as well."""
        return (self._process.poll() or 0) < 0

    def stop(self, grace_seconds: float, is_hurried: Callable[[], bool]) -> None:
        """Ask the server to end, kill the whole group after the grace time, reap everything.

        Who does not end then, as a process that waits for a device in the kernel, is left behind.
        A server with an open gRPC stream never ends by itself, even an idle one. A caller
        whose ``is_hurried`` becomes true does not want to wait for the grace time.
        """
        if grace_seconds > 0 and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + grace_seconds
            while self._process.poll() is None and time.monotonic() < deadline:
                if is_hurried():
                    break
                time.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not self._has_gone():
            say(
                f"a process of tritonserver ({self.pid}) was killed and does not end, "
                "as if it were stuck in the kernel: it is left behind",
                err=True,
            )

    def _has_gone(self) -> bool:
        """Wait until all are dead, and reap them; False if that takes too long."""
        deadline = time.monotonic() + _KILLED_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                try:
                    while os.waitpid(-self.pid, os.WNOHANG)[0]:
                        pass
                except ChildProcessError:
                    return True
            time.sleep(_POLL_SECONDS)
        return False


def is_running(pid: int) -> bool:
    """True while ``pid`` exists and is no zombie (a dead model process that nobody reaped)."""
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def end_of(pid: int) -> str:
    """How the process ``pid`` ended, in words; "" unless it is dead and not reaped yet."""
    stat = _stat(pid)
    return _in_words(os.waitstatus_to_exitcode(int(stat[-1]))) if stat[:1] == ["Z"] else ""


def children_of(pid: int) -> dict[int, list[str]]:
    """The processes that ``pid`` has started and their command lines; of a dead one it is empty."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if _stat(int(folder.name))[1:2] == [str(pid)]:
            with contextlib.suppress(OSError):  # it was reaped just now
                line = (folder / "cmdline").read_text(encoding="utf-8", errors="replace")
                found[int(folder.name)] = line.rstrip("\0").split("\0")
    return found


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process from its state on (man 5 proc); nothing if it is gone.

    The name before that is any bytes: a long one is cut by the kernel, amid a character too.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"


def _prepare() -> None:
    """In the server, before it is one: it dies with its parent and hears no SIGTERM."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _raise_limits()


def _raise_limits() -> None:
    """Each connection takes a descriptor, of which most machines give 1,024 to who does not ask for
    more; and the limit of the stack is that of each thread that Triton starts (see `_STACK_BYTES`).

    Where address space is limited stacks stay as they are; elsewhere Linux refuses a mapping only
    if it is larger than all memory of the machine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _at_most(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if _is_address_space_limited():
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = _at_most(hard, min(_STACK_BYTES, memory // 2))
    if soft == resource.RLIM_INFINITY or soft < wanted:  # without a limit a thread gets 2 MB
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _at_most(hard: int, wanted: int) -> int:
    """``wanted``, as far as a hard limit allows it."""
    return wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)


def _is_address_space_limited() -> bool:
    """True where memory counts that is only reserved: below `ulimit -v`, or if the machine allows
    no overcommitment (2 in man 5 proc_sys_vm)."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return True
    try:
        return _OVERCOMMIT.read_text(encoding="ascii").strip() == "2"
    except OSError:
        return False
