"""tritonserver and the model processes it starts: started, stopped and checked together.

They live in a process group of their own, so that Ctrl-C reaches the launcher alone, which decides.
They ignore SIGTERM, which systemd sends to every process of a service, and at which tritonserver
cuts its streams after seconds: it is asked to end by SIGINT, which it handles alike. The kernel
kills the server if the launcher dies; the launcher adopts and reaps a model process whose server
died.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from inflight_backend.errors import ServerKilled, ServingError
from inflight_backend.status import ModelStatus, beat_of, read_status
from inflight_backend.triton.watchdog import AwakeClock
from inflight_protocol import LLM_MODEL_NAME
from inflight_server.serve.console import say
from inflight_server.serve.log_file import explain, explain_abort
from inflight_server.serve.repository import DEFAULT_MODELS
from inflight_server.serve.settings import ServeSettings
from inflight_server.serve.workspace import Workspace

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05
_MAX_FILES = 2**16
# Triton reads JSON by recursion, with 70 to 330 bytes of stack for a level (24.10); a stack that
# is full ends it. With so much it answers any body of 6 MB. What is not used takes no memory.
_STACK_BYTES = 2**30
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_KILLED_SECONDS = 30.0  # to give much memory back; a process that needs more waits in a driver

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

    def ask_to_end(self) -> None:
        """Ask it to end by itself, by SIGINT."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def stop(self, grace_seconds: float, is_hurried: Callable[[], bool]) -> None:
        """Ask the server to end, kill the whole group after the grace time, reap everything.

        A process that does not end then, since it waits for a device in the kernel, is left behind.
        A server with an open gRPC stream never ends by itself, even an idle one. A caller
        whose ``is_hurried`` becomes true does not want to wait for the grace time.
        """
        if grace_seconds > 0:
            self.ask_to_end()
            deadline = time.monotonic() + grace_seconds
            while self._process.poll() is None and time.monotonic() < deadline:
                if is_hurried():
                    break
                time.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not self._has_gone():
            say(
                f"a process ({self.pid}) was killed and does not end, "
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
    """True while ``pid`` exists and is no zombie (a dead model process that is not reaped)."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def end_of(pid: int) -> str:
    """How the process ``pid`` ended, in words; "" unless it is dead and not reaped yet."""
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            # Its parent alone may wait for it; the last field of this file is its wait status.
            status = Path(f"/proc/{pid}/stat").read_bytes().split()[-1]
            return _in_words(os.waitstatus_to_exitcode(int(status)))
    return ""


def children_of(pid: int) -> dict[int, list[str]]:
    """The processes that ``pid`` has started and their command lines; of a dead one it is empty."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):  # it has ended just now
                found[child.pid] = child.cmdline()
    return found


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
    """Each connection takes a descriptor, and most machines allow 1,024 by default;
    and the limit of the stack is that of each thread that Triton starts (see `_STACK_BYTES`).

    Where address space is limited stacks stay as they are; otherwise Linux refuses a mapping
    only if it is larger than all memory of the machine.
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


_STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_HEALTH_SECONDS = 2.0
_PROBE_PERIOD_SECONDS = 2.0
_BEAT_SECONDS = 1.0  # of a model, at least
# For the model after it has reported that nothing moves: its streams have ended by then, the server
# may still be writing the ends out. Until it is ended Triton says that the model is ready.
_FAREWELL_SECONDS = 0.5
# Of the models beside it, which are small, once `tensorrt_llm` is loaded. Triton takes a model that
# got no processor for a second of its imports for dead, and waits for ever for its end.
_REST_SECONDS = 60.0
_LOADED = "tensorrt_llm loaded"
_SEE_LOG = "(--verbose shows its log)"


class ServerHealth:
    """Looks at one server and its model processes; raises `ServingError` saying what is wrong."""

    def __init__(
        self, settings: ServeSettings, workspace: Workspace, server: ServerProcess
    ) -> None:
        self._settings = settings
        self._workspace = workspace
        self._server = server
        stall_seconds = settings.llm_parameters.stall_seconds
        self._silence_seconds = stall_seconds + 2 * _PROBE_PERIOD_SECONDS
        self._model_silence_seconds = stall_seconds + _BEAT_SECONDS
        self._clock = AwakeClock(longest_turn=stall_seconds / 2)
        self._answered_at = self._probed_at = self._beat_at = self._loaded_at = self._clock.now()
        self._streamed_at = self._answered_at
        self._last_beat = 0
        self._last_stage = _stage_of(None)
        self._unhealthy_since: float | None = None
        self._model_pid: int | None = None
        self._added: dict[str, int | None] | None = None

    def processes(self) -> list[int]:
        """The server and the processes of its models, as far as they are known."""
        pids = (self._server.pid, self._model_pid, *(self._added or {}).values())
        return [pid for pid in pids if pid is not None]

    def check_processes(self, is_loading: bool = False) -> ModelStatus | None:
        """The status of the model; fails if the model could not be loaded or a process died."""
        # Before the server: when it dies its models do, and the server is the cause.
        death = "" if is_loading else self._death_of_added()
        end = self._server.exit_status()
        is_model_dead = self._model_pid is not None and not is_running(self._model_pid)
        status = read_status(self._workspace.status_file)  # what was written before the death
        if status is not None and status.phase == "failed":
            raise ServingError(status.fields["error"])
        if end is not None:
            log_file = self._workspace.log_file
            reason = explain_abort(log_file) or (explain(log_file) if is_loading else "")
            why = f": {reason}" if reason else f" {_SEE_LOG}"
            failure = ServerKilled if self._server.was_killed else ServingError
            raise failure(f"tritonserver ended ({end}){why}")
        if is_model_dead:
            raise ServingError(f"{_death('the model process', self._model_pid)} {_SEE_LOG}")
        if death:
            raise ServingError(f"{death} {_SEE_LOG}")
        if status is not None:
            self._model_pid = status.pid
        return status

    def check_loading(self) -> ModelStatus | None:
        """`check_processes`, and fails if nothing is heard of the model or its load stands still
        for too long."""
        status = self.check_processes(is_loading=True)
        now = self._clock.now()
        stage = _stage_of(status)
        if stage != self._last_stage:
            self._last_stage, self._loaded_at = stage, now
        limit, hint = self._settings.load_seconds, "--load-seconds allows for more"
        if stage == _LOADED and self._settings.draft_model is None and limit > _REST_SECONDS:
            limit, hint = _REST_SECONDS, "was the machine busy? Start it again"
        if now - self._loaded_at > limit:
            raise ServingError(
                f"loading has stood still for {now - self._loaded_at:.0f} s with {stage} ({hint})"
            )
        self._answered_at = self._streamed_at = now  # it does not before all is loaded
        if status is None:  # the model process has not come to our code: no beat yet
            self._beat_at = now
        else:
            self._check_beat()
        return status

    def check_progress(self) -> None:
        """`check_processes`, and fails if the model says that nothing moves, or nothing is heard of
        model or server."""
        self._check_health_of_model(self.check_processes())
        self._check_beat()
        now = self._clock.now()
        if now - self._probed_at >= _PROBE_PERIOD_SECONDS:
            self._probed_at = now
            if self.is_answering("live"):
                self._answered_at = self._clock.now()
            if self._is_streaming():
                self._streamed_at = self._clock.now()
        for what, since in (("", self._answered_at), (" a gRPC stream", self._streamed_at)):
            silence = self._clock.now() - since
            if silence > self._silence_seconds:
                raise ServingError(f"tritonserver has not answered{what} for {silence:.0f} s")

    def is_answering(self, what: str = "ready") -> bool:
        """True if the server says that it is ``live`` or ``ready``."""
        connection = http.client.HTTPConnection(
            self._settings.local_address, self._settings.http_port, timeout=_HEALTH_SECONDS
        )
        try:
            connection.request("GET", f"/v2/health/{what}")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _is_streaming(self) -> bool:
        """True if a gRPC stream is answered: one that names no model, with an error. A single
        thread of tritonserver serves all streams, and now and then (24.10) a cancelled one leaves
        it waiting for ever, while all else is answered."""
        import grpc  # in a launcher that forks: not before it has to

        address = f"{self._settings.local_host}:{self._settings.grpc_port}"
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(address, options) as channel:
            stream = channel.unary_stream(_STREAM_METHOD)(b"", timeout=_HEALTH_SECONDS)
            try:
                return any(True for _ in stream)
            except grpc.RpcError:
                return False

    def _death_of_added(self) -> str:
        """Which process of a model beside `tensorrt_llm` died, and how; "" if none did.

        They write no status: the process of such a model is looked up when all are loaded.
        """
        if self._added is None:
            self._added = self._find_added_models()
        for model, pid in self._added.items():
            if pid is None or not is_running(pid):
                return _death(f"the process of {model}", pid)
        return ""

    def _find_added_models(self) -> dict[str, int | None]:
        """Model -> its process; None if that has died already.

        None is watched if not even that of `tensorrt_llm` is found: then this Triton starts them
        in a way that we do not know.
        """
        added = [model for model in self._settings.models if model not in DEFAULT_MODELS]
        found = {
            Path(argument).parts[-3]: pid
            for pid, arguments in (children_of(self._server.pid) if added else {}).items()
            for argument in arguments
            if argument.endswith("/1/model.py")
        }
        return {model: found.get(model) for model in added} if LLM_MODEL_NAME in found else {}

    def _check_beat(self) -> None:
        now = self._clock.now()
        beat = beat_of(self._workspace.status_file)
        if beat != self._last_beat:
            self._last_beat, self._beat_at = beat, now
        if now - self._beat_at > self._model_silence_seconds:
            raise ServingError(f"the model process was silent for {now - self._beat_at:.0f} s")

    def _check_health_of_model(self, status: ModelStatus | None) -> None:
        if status is None or status.phase != "unhealthy":
            self._unhealthy_since = None
            return
        now = self._clock.now()
        self._unhealthy_since = self._unhealthy_since or now
        if now - self._unhealthy_since >= _FAREWELL_SECONDS:
            raise ServingError(f"the model is not healthy: {status.fields['error']}")


def _death(process: str, pid: int | None) -> str:
    how = "" if pid is None else end_of(pid)
    return f"{process} died{how and f': {how}'}"


def _stage_of(status: ModelStatus | None) -> str:
    """How far loading is, in words."""
    if status is None:
        return "no word from the model process"
    if status.phase != "loading":  # of the model with the status file; there may be others
        return _LOADED
    return f"{status.fields['loaded_bytes']} bytes of weights loaded"
