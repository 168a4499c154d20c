"""The client for threads: each call runs in `AsyncInflightClient` on an event loop of its own.

That loop lives in one background thread per client. Calling threads only wait for a queue, so
Ctrl-C reaches the main thread at once and never inside gRPC, where it can leave a lock taken for
ever (grpcio 1.85: one Ctrl-C in about 300 while an answer is awaited).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import aclosing, suppress
from functools import partial, wraps
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar
from weakref import WeakSet

from inflight_client.address import Protocol
from inflight_client.aio import AsyncGenerateStream, AsyncInflightClient
from inflight_client.errors import InflightError, StreamInterrupted
from inflight_client.options import GenerateChunk
from inflight_protocol import LLM_MODEL_NAME

if TYPE_CHECKING:
    from typing_extensions import Self

_Item = TypeVar("_Item")
_Work = TypeVar("_Work")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

_READ_AHEAD: Final = 64
"""Items that the loop's thread takes before they are asked for."""

_CLOSE_SECONDS: Final = 10.0
"""More than a running HTTP request may take to be stopped on the server."""

_CLOSED: Final = "this InflightClient is closed."


class _Worker:
    """An asyncio client, and the thread whose event loop runs its calls."""

    def __init__(self, client: AsyncInflightClient, uses_grpc: bool) -> None:
        self.client = client
        self.uses_grpc = uses_grpc
        self.is_closed = False
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._close_wanted = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        # The thread does not refer to this object, which is closed when it is no longer referenced.
        self._thread = threading.Thread(
            target=_run_loop,
            args=(self._loop, client, self._tasks, self._close_wanted),
            name="inflight-client",
            daemon=True,
        )
        self._thread.start()
        _workers.add(self)

    @property
    def is_running(self) -> bool:
        """False once closed, and in a child process, which has no threads of its parent."""
        return not self.is_closed and self._process_id == os.getpid()

    @property
    def is_idle(self) -> bool:
        """Whether no call is running."""
        return not self._tasks

    def run(self, call: Coroutine[Any, Any, _Item]) -> _Item:
        """The result of ``call``; Ctrl-C in the waiting thread cancels it."""

        async def only_result() -> AsyncGenerator[_Item, None]:
            yield await call

        (result,) = self.iterate(only_result())
        return result

    def iterate(self, source: AsyncGenerator[_Item, None]) -> Generator[_Item, None, None]:
        """The items of ``source``; leaving the iteration cancels it and waits for its end."""
        call = _Call(source)
        with self._lock:  # what is started before `close` is cancelled by it
            if not self.is_running:
                raise RuntimeError(_CLOSED)
            self._loop.call_soon_threadsafe(call.start, self._tasks)
        try:
            while (entry := call.items.get()) is not None:
                yield entry[0]
                if call.items.qsize() == _READ_AHEAD // 2:
                    self._notify(call.has_room.set)
        finally:
            if not call.has_ended.is_set() and self._process_id == os.getpid():
                self._notify(call.cancel)
                # The garbage collector may end an iteration in the thread that is waited for.
                if threading.current_thread() is not self._thread:
                    call.has_ended.wait()
        if call.errors:
            raise call.errors.pop()

    def close(self) -> None:
        """Cancel the calls that run, close the connection and end the thread."""
        self._begin_close()
        if self._process_id == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def __del__(self) -> None:
        self._begin_close()

    def _begin_close(self) -> None:
        with self._lock:
            if self.is_running:
                self.is_closed = True
                self._notify(self._close_wanted.set)

    def _notify(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it what is to be told
            self._loop.call_soon_threadsafe(callback)


class _Call(Generic[_Item]):
    """Takes the items of ``source`` on the loop, `_READ_AHEAD` before they are asked for."""

    def __init__(self, source: AsyncGenerator[_Item, None]) -> None:
        self.items: SimpleQueue[tuple[_Item] | None] = SimpleQueue()  # None: it has ended
        self.errors: list[BaseException] = []  # at most one, which ended it
        self.has_room = asyncio.Event()
        self.has_ended = threading.Event()
        self._source = source
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: set[asyncio.Task[None]]) -> None:
        """Begin; ``tasks`` has the task as long as it runs."""
        self._task = asyncio.get_running_loop().create_task(self._read())
        tasks.add(self._task)
        self._task.add_done_callback(tasks.discard)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """End it soon; nothing if it has ended."""
        if self._task is not None:
            self._task.cancel()

    async def _read(self) -> None:
        async with aclosing(self._source) as source:
            async for item in source:
                self.items.put((item,))
                if self.items.qsize() >= _READ_AHEAD:
                    self.has_room.clear()
                    await self.has_room.wait()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            self.errors.append(
                StreamInterrupted("the client was closed before the final response.")
            )
        elif error := task.exception():
            self.errors.append(error)
        self.has_ended.set()
        self.items.put(None)


def _run_loop(
    loop: asyncio.AbstractEventLoop,
    client: AsyncInflightClient,
    tasks: set[asyncio.Task[None]],
    close_wanted: asyncio.Event,
) -> None:
    async def serve() -> None:
        await close_wanted.wait()
        running = list(tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await client.close()
        await loop.shutdown_asyncgens()  # else they are closed when nothing runs any more
        # Tasks of grpc.aio's own end a moment after their calls.
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=_CLOSE_SECONDS / 2)

    loop.run_until_complete(serve())
    loop.close()


_workers: WeakSet[_Worker] = WeakSet()
_has_broken_grpc = False
"""True in a child process that was forked while a gRPC call was running."""


class GenerateStream:
    """An answer on its way: iterate it once. Leaving the iteration early cancels the request."""

    def __init__(self, worker: _Worker, stream: AsyncGenerateStream) -> None:
        self.request_id = stream.request_id
        self._worker = worker
        self._stream = stream
        self._chunks = worker.iterate(stream.__aiter__())

    def __iter__(self) -> Iterator[GenerateChunk]:
        return self._chunks

    def __next__(self) -> GenerateChunk:
        return next(self._chunks)

    def cancel(self) -> None:
        """Cancel the request, from any thread; the iteration ends without an error."""
        if self._worker.is_running:
            self._worker.run(self._stream.cancel())


def _forward(
    method: Callable[Concatenate[AsyncInflightClient, _Arguments], _Work],
    wait: Callable[[_Worker, _Work], _Result],
) -> Callable[Concatenate[InflightClient, _Arguments], _Result]:
    """``method`` for threads; ``wait`` gives what a worker makes of its coroutine or generator."""

    @wraps(method)
    def call(
        client: InflightClient, /, *arguments: _Arguments.args, **options: _Arguments.kwargs
    ) -> _Result:
        worker = client._get_worker()
        return wait(worker, method(worker.client, *arguments, **options))

    return call


class InflightClient:
    """Talks to one model of one server. Thread-safe; use it in a ``with`` block or `close` it.

    ``url`` is ``host:port``; without it, the address at which ``inflight serve`` listens.
    ``headers`` go with every call; Triton's restricted gRPC wants ``triton-grpc-protocol-NAME``.
    Options of a request: see `GenerateOptions`. Errors: see `inflight_client.errors`.
    """

    def __init__(
        self,
        url: str | None = None,
        model: str = LLM_MODEL_NAME,
        protocol: Protocol = "grpc",
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._connect = partial(AsyncInflightClient, url, model, protocol, headers=headers)
        self._connect()  # reports a bad argument now
        self._uses_grpc = protocol == "grpc"
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._is_closed = False

    generate = _forward(AsyncInflightClient.generate, _Worker.run)
    generate_many = _forward(AsyncInflightClient.generate_many, _Worker.run)
    stream = _forward(AsyncInflightClient.stream, GenerateStream)
    stop = _forward(AsyncInflightClient.stop, _Worker.run)
    stats = _forward(AsyncInflightClient.stats, _Worker.iterate)
    why = _forward(AsyncInflightClient.why, _Worker.run)
    describe = _forward(AsyncInflightClient.describe, _Worker.run)
    live = _forward(AsyncInflightClient.live, _Worker.run)
    recording = _forward(AsyncInflightClient.recording, _Worker.run)
    health = _forward(AsyncInflightClient.health, _Worker.run)

    def close(self) -> None:
        """Close the connection; calls still running in other threads are interrupted."""
        with self._lock:
            self._is_closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get_worker(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise RuntimeError(_CLOSED)
            if self._worker is None or not self._worker.is_running:
                if self._uses_grpc and _has_broken_grpc:
                    raise InflightError(
                        "this process was forked while a gRPC call was running. Start it with "
                        'spawn, fork it before the first call, or use protocol="http".'
                    )
                self._worker = _Worker(self._connect(), self._uses_grpc)
            return self._worker


def _before_fork() -> None:
    """Connections are closed and opened again when needed: gRPC works in a forked child, and goes
    on working in the parent, only if no thread is inside it."""
    for worker in list(_workers):
        if worker.is_idle:
            worker.close()


def _after_fork_in_child() -> None:
    global _has_broken_grpc
    _has_broken_grpc = any(worker.uses_grpc and not worker.is_closed for worker in list(_workers))


def _at_exit() -> None:
    """No thread may be inside gRPC when the interpreter is taken down."""
    for worker in list(_workers):
        worker.close()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
