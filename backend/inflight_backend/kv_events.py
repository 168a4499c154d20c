"""KV events: tells routers over ZeroMQ which blocks of text are cached here.

A router that follows the events of every replica can send a prompt to the replica that has its
beginning. The wire format is vLLM's (its `distributed/kv_events.py`), so that consumers made for
vLLM work: Dynamo, llm-d, SGLang's tools. A PUB socket sends three frames for each iteration that
changed something::

    topic (UTF-8) | sequence number (8 bytes, big-endian, from 0) | msgpack of [time, events, 0]

Time is in seconds since 1970; the 0 is the rank of a data-parallel group, of which there is none.
An event is an array that begins with its name or, in newer versions, a map with it as "type".

A gap between sequence numbers means that a consumer has missed something. It may ask the replay
socket (ROUTER) with the frames "" and the first number that it wants (8 bytes); each batch from
there on that is still kept answers with the frames "", number and payload, and the end with the
number -1 and an empty payload.

Hashes are the first 63 bits of the keys of `ReuseIndex`, since consumers expect positive integers
that fit a signed one of 64 bits. They depend on a random key of the process; consumers that compare
replicas hash the tokens, which is why the events carry them. Blocks of requests with a
``cache_salt`` are not told: a consumer that does not know the salt would see hits that are none.

The loop's thread appends to a list and hands it over at the end of an iteration; a thread of its
own encodes and sends. If that is behind by `MAX_BATCHES`, batches are dropped and the sequence
skips them.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from inflight_backend.errors import ConfigurationError
from inflight_backend.log import get_logger

if TYPE_CHECKING:
    import zmq

    from inflight_scheduler import LlmRequest

MAX_BATCHES = 10_000
"""Batches that wait to be sent, that a slow consumer may be behind, and that can be replayed."""

MAX_REPLAY_BYTES = 2**26
"""Of the payloads that are kept to be replayed."""

MEDIUM = "GPU"
"""Where the blocks are, in vLLM's words: the memory that attention reads."""

_SEQUENCE = struct.Struct(">q")
_END_OF_REPLAY = _SEQUENCE.pack(-1)
_POSITIVE = 2**63 - 1
_REPLAY_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 5.0

_logger = get_logger(__name__)


class BlockStored(NamedTuple):
    """Consecutive blocks of one text; ``token_ids`` are those of all, one block after another.

    ``parent_block_hash`` None: the text begins with them. ``lora_name`` is the name
    of the adapter, or its id. Hashes are keys of the prefix cache until they are sent.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(NamedTuple):
    """These blocks are not cached any more."""

    block_hashes: list[bytes]
    medium: str


class AllBlocksCleared(NamedTuple):
    """No block is."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def fields_of(event: Event) -> dict[str, Any]:
    """The values of an event by name, hashes as numbers."""
    values = event._asdict()
    if not isinstance(event, AllBlocksCleared):
        values["block_hashes"] = list(map(_hash, event.block_hashes))
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        values["parent_block_hash"] = _hash(event.parent_block_hash)
    return values


def as_array(event: Event) -> tuple[Any, ...]:
    """The form of vLLM until June 2026, which SGLang and llm-d read as well."""
    return (type(event).__name__, *fields_of(event).values())


def as_map(event: Event) -> dict[str, Any]:
    """The form of vLLM since then."""
    return {"type": type(event).__name__, **fields_of(event)}


class KvEventPublisher:
    """A `CacheListener` whose events leave over ZeroMQ.

    `stored`, `removed`, `cleared` and `end_iteration` are for the loop's thread and never wait.
    """

    def __init__(
        self,
        endpoint: str,
        tokens_per_block: int,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        event_format: str = "array",
        on_drop: Callable[[], None] = lambda: None,
        name_of: Callable[[int], str | None] = lambda task_id: None,
    ) -> None:
        """Bind the endpoints (``tcp://127.0.0.1:5557``); `ConfigurationError` if that fails.

        ``on_drop`` is called for each batch that is dropped. ``name_of`` an adapter, by its id.
        """
        try:
            import zmq
        except ImportError:
            raise ConfigurationError(
                "kv_events needs pyzmq, which is not installed: install the extra 'kv-events' "
                "(in a clone of inflight: pip install '.[kv-events]')"
            ) from None
        self._tokens_per_block = tokens_per_block
        self._topic = topic.encode()
        self._convert: Callable[[Event], object] = as_map if event_format == "map" else as_array
        self._on_drop, self._name_of = on_drop, name_of
        self._events: list[Event] = []
        self._untold: set[bytes] = set()  # keys of the blocks of salted requests
        self._num_batches = 0
        self._queue: queue.SimpleQueue[tuple[int, float, list[Event]] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._num_kept_bytes = 0
        self._context = zmq.Context()
        try:
            self._publisher = _bind(self._context, zmq.PUB, "kv_events", endpoint)
            self._replayer = replay_endpoint and _bind(
                self._context, zmq.ROUTER, "kv_events_replay", replay_endpoint
            )
        except ConfigurationError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="KvEvents", daemon=True)
        self._thread.start()

    def stored(self, request: LlmRequest, index: int, key: bytes) -> None:
        """Full block ``index`` of the text of ``request`` is cached now."""
        if request.cache_salt:
            self._untold.add(key)
            return
        start = index * self._tokens_per_block
        tokens = request.tokens[start : start + self._tokens_per_block]
        parent = request.block_keys[index - 1] if index > 0 else None
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(key)
            last.token_ids.extend(tokens)
            return
        task_id = request.lora_task_id
        name = None if task_id is None else self._name_of(task_id) or str(task_id)
        if task_id is not None and task_id < 0:  # of an adapter with a name; ids are unsigned there
            task_id = None
        size = self._tokens_per_block
        self._events.append(BlockStored([key], parent, list(tokens), size, task_id, MEDIUM, name))

    def removed(self, key: bytes) -> None:
        """The block under ``key`` is not cached any more."""
        if key in self._untold:
            self._untold.remove(key)
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(key)
        else:
            self._events.append(BlockRemoved([key], MEDIUM))

    def cleared(self) -> None:
        """Nothing is cached any more."""
        self._untold.clear()
        self._events.append(AllBlocksCleared())

    def end_iteration(self) -> None:
        """Hand the events since the last call to the thread that sends them, as one batch."""
        if not self._events:
            return
        events, self._events = self._events, []
        number, self._num_batches = self._num_batches, self._num_batches + 1
        if self._queue.qsize() < MAX_BATCHES:
            self._queue.put((number, time.time(), events))
        else:
            self._on_drop()

    def close(self) -> None:
        """Send what is queued, then close the sockets."""
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while self._send_next():
                if self._replayer and self._replayer.poll(0):
                    self._replay(self._replayer)
        except Exception:
            _logger.exception("no KV events are sent any more")
        finally:
            self._context.destroy(linger=int(_CLOSE_SECONDS * 1000))

    def _send_next(self) -> bool:
        """Send one batch if there is one; False at the end."""
        import msgspec

        try:
            batch = self._queue.get(timeout=_REPLAY_POLL_SECONDS if self._replayer else None)
        except queue.Empty:
            return True
        if batch is None:
            return False
        number, moment, events = batch
        payload = msgspec.msgpack.encode((moment, [self._convert(event) for event in events], 0))
        sequence = _SEQUENCE.pack(number)
        if self._replayer:
            self._keep(sequence, payload)
        self._publisher.send_multipart((self._topic, sequence, payload))
        return True

    def _keep(self, sequence: bytes, payload: bytes) -> None:
        self._kept.append((sequence, payload))
        self._num_kept_bytes += len(payload)
        while len(self._kept) > MAX_BATCHES or self._num_kept_bytes > MAX_REPLAY_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer one request; one that is malformed gets the end at once."""
        client, *frames = socket.recv_multipart()
        is_request = len(frames) == 2 and len(frames[1]) == _SEQUENCE.size
        first = frames[1] if is_request else b"\xff" * _SEQUENCE.size  # big-endian: bytes compare
        for sequence, payload in self._kept:
            if sequence >= first:
                socket.send_multipart((client, b"", sequence, payload))
        socket.send_multipart((client, b"", _END_OF_REPLAY, b""))


def _bind(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, setting: str, endpoint: str
) -> zmq.Socket[bytes]:
    import zmq

    socket = context.socket(kind)
    socket.set_hwm(MAX_BATCHES)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigurationError(
            f"{setting} = {endpoint!r} cannot be bound ({error.strerror}): give an address of this "
            "machine as tcp://127.0.0.1:5557"
        ) from None
    return socket


def _hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "big") & _POSITIVE
