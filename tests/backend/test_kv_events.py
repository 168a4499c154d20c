"""KV events as consumers get them: decoded by vLLM's structs, and by Dynamo's indexer."""

from __future__ import annotations

import random
import struct
import time
from typing import Any

import msgspec
import pytest
import zmq
from support.manager_harness import MAX_UTILIZATION, WAIT, Recorder, request, running
from support.router_process import dynamo_indexer, wait_until
from support.server_process import HOST, free_ports
from support.triton_stub import CountingEngine

from inflight_backend import kv_events
from inflight_backend.errors import ConfigurationError
from inflight_backend.kv_events import KvEventPublisher
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.parameters import KvCacheConfig
from inflight_scheduler import LlmRequest

BLOCK = 4


# The events as vLLM's documentation of its subscribers has them.
class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class StoredMap(Stored, tag="BlockStored", array_like=False):
    pass


class RemovedMap(Removed, tag="BlockRemoved", array_like=False):
    pass


class ClearedMap(Cleared, tag="AllBlocksCleared", array_like=False):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    data_parallel_rank: int | None = None


class WindowedEngine(CountingEngine):
    windows = (8,)


class Consumer:
    """Follows one server; loses some of the frames and asks for them again."""

    def __init__(self, kind: type[Batch | MapBatch], events: str, replay: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(b"kv@pod@model")
        self._live.connect(events)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self._rng = random.Random(0)
        self.num_seen = self.num_gaps = 0
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def close(self) -> None:
        self._context.destroy(linger=0)

    def follow(self, num_batches: int) -> None:
        """Until so many batches have been applied; the last one is always replayed."""
        deadline = time.monotonic() + WAIT
        while self.num_seen < num_batches:
            assert time.monotonic() < deadline
            if not self._live.poll(200):
                self._heal()
                continue
            _, sequence, payload = self._live.recv_multipart()
            (number,) = struct.unpack(">q", sequence)
            if self._rng.random() < 0.05 or number == num_batches - 1:
                continue  # lost
            if number > self.num_seen:
                self.num_gaps += 1
                self._heal()
            elif number == self.num_seen:
                self._apply(payload)

    def _heal(self) -> None:
        self._replay.send_multipart((b"", struct.pack(">q", self.num_seen)))
        while True:
            assert self._replay.poll(int(WAIT * 1000))
            _, sequence, payload = self._replay.recv_multipart()
            if struct.unpack(">q", sequence) == (-1,):
                assert payload == b""
                return
            assert struct.unpack(">q", sequence) == (self.num_seen,)
            self._apply(payload)

    def _apply(self, payload: bytes) -> None:
        self.num_seen += 1
        batch = self._decoder.decode(payload)
        assert batch.events
        assert batch.data_parallel_rank == 0
        assert abs(batch.ts - time.time()) < WAIT
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                assert event.medium == "GPU"
                for number in event.block_hashes:
                    del self.blocks[number]
            else:
                self.blocks.clear()

    def _store(self, event: Stored) -> None:
        assert (event.block_size, event.medium, event.lora_id) == (BLOCK, "GPU", None)
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        parent = event.parent_block_hash
        assert parent is None or parent in self.blocks, "a block comes before its parent"
        for index, number in enumerate(event.block_hashes):
            assert 0 < number < 2**63
            assert number not in self.blocks
            tokens = tuple(event.token_ids[index * BLOCK :][:BLOCK])
            self.blocks[number] = parent, tokens
            parent = number

    def num_cached(self, tokens: list[int]) -> int:
        """Blocks of a text, from its beginning."""
        children = {content: number for number, content in self.blocks.items()}
        parent, index = None, 0
        while (found := children.get((parent, tuple(tokens[index:][:BLOCK])))) is not None:
            parent, index = found, index + BLOCK
        return index // BLOCK


def told(manager: GptManager) -> int:
    """Batches until now."""
    publisher = manager._kv_events
    assert publisher is not None
    return publisher._num_batches


def kept_hashes(manager: GptManager) -> set[int]:
    """What the prefix cache has, from a snapshot as the flight recorder takes it."""
    state = manager._batcher.block_manager.cache_state()
    assert state is not None
    keys = [state.hashes[block_id].to_bytes(8, "little") for block_id in state.kept]
    return {int.from_bytes(key, "big") % 2**63 for key in keys}


def addresses() -> tuple[str, str]:
    events, replay = free_ports(2)
    return f"tcp://{HOST}:{events}", f"tcp://{HOST}:{replay}"


@pytest.mark.fast(1)
@pytest.mark.parametrize(("name", "kind"), [("array", Batch), ("map", MapBatch)])
def test_a_consumer_knows_what_is_cached(name: str, kind: type[Batch | MapBatch]) -> None:
    """Small pool, so that blocks are evicted and requests are paused; frames are lost."""
    events, replay = addresses()
    rng = random.Random(7)
    requests = []
    for number in range(1, 151):
        prompt = [100 * rng.randrange(4)] * 8 + [
            rng.randrange(900) for _ in range(rng.randrange(30))
        ]
        requests.append(request(number, prompt, rng.randrange(1, 20)))
    recorder = Recorder()
    consumer = Consumer(kind, events, replay)
    with running(
        recorder,
        CountingEngine(num_blocks=40, tokens_per_block=BLOCK),
        MAX_UTILIZATION,
        kv_events=events,
        kv_events_replay=replay,
        kv_events_topic="kv@pod@model",
        kv_events_format=name,
    ) as manager:
        for start in (0, 50, 100):
            recorder.pending.extend(requests[start : start + 50])
            manager.wake()
            recorder.wait_for_finals(*range(start + 1, start + 51))
            num_told = manager._calls.call_soon(lambda: told(manager)).result()
            consumer.follow(num_told)
            kept = manager._calls.call_soon(lambda: kept_hashes(manager)).result()
            assert len(kept) > 20
            assert consumer.blocks.keys() == kept
        manager._calls.call_soon(manager._batcher.block_manager.forget_all).result()
        manager._calls.call_soon(manager._kv_events.end_iteration).result()  # type: ignore[union-attr]
        consumer.follow(num_told + 1)
    assert consumer.blocks == {}
    assert recorder.total("Paused Requests") > 0
    assert consumer.num_gaps > 0
    consumer.close()


def test_texts_of_salted_requests_are_not_told() -> None:
    events, replay = addresses()
    consumer = Consumer(Batch, events, replay)
    recorder = Recorder([request(1, range(1, 30), 9, cache_salt="secret")])
    with running(
        recorder,
        CountingEngine(num_blocks=12, tokens_per_block=BLOCK),
        kv_events=events,
        kv_events_replay=replay,
        kv_events_topic="kv@pod@model",
    ) as manager:
        recorder.wait_for_finals(1)
        assert told(manager) == 0
        for number in (2, 3, 4):  # which take the blocks of the first one away
            recorder.pending.append(request(number, range(number, number + 25), 9))
            manager.wake()
            recorder.wait_for_finals(number)
        consumer.follow(manager._calls.call_soon(lambda: told(manager)).result())
        assert consumer.blocks.keys() == kept_hashes(manager)
        assert consumer.num_cached(list(range(4, 36))) == 8
    consumer.close()


def test_a_full_queue_drops_batches_and_the_sequence_skips_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop never waits, whatever the thread that sends is doing."""
    monkeypatch.setattr(kv_events, "MAX_BATCHES", 3)
    monkeypatch.setattr(KvEventPublisher, "_send_next", lambda self: time.sleep(WAIT))
    events, _ = addresses()
    num_dropped = 0

    def on_drop() -> None:
        nonlocal num_dropped
        num_dropped += 1

    publisher = KvEventPublisher(events, BLOCK, on_drop=on_drop)
    start = time.monotonic()
    for number in range(5):
        llm_request = LlmRequest(number, tuple(range(BLOCK)), 1)
        publisher.stored(llm_request, 0, bytes([number]) * 32)
        publisher.end_iteration()
        publisher.end_iteration()  # nothing new, no batch
    assert num_dropped == 2
    assert publisher._num_batches == 5
    assert time.monotonic() - start < WAIT / 2


@pytest.mark.parametrize(
    ("task_id", "lora_id", "lora_name"),
    [(None, None, None), (2**63, 2**63, str(2**63)), (-1, None, "mine")],
)
def test_blocks_say_whose_adapter_they_are_of(
    task_id: int | None, lora_id: int | None, lora_name: str | None
) -> None:
    """By name, or by the id that clients gave it; ids of our own are none of theirs."""
    (port,) = free_ports(1)
    endpoint = f"tcp://{HOST}:{port}"
    publisher = KvEventPublisher(endpoint, BLOCK, name_of={-1: "mine"}.get)
    llm_request = LlmRequest(1, tuple(range(BLOCK)), 1, lora_task_id=task_id)
    publisher.stored(llm_request, 0, b"k" * 32)
    (event,) = publisher._events
    found = msgspec.convert(kv_events.as_array(event), Stored)
    publisher.close()
    assert (found.lora_id, found.lora_name) == (lora_id, lora_name)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"kv_events": "tcp://nowhere.invalid:1"}, "kv_events = 'tcp://nowhere.invalid:1'"),
        ({"kv_events": "5557"}, "kv_events = '5557' cannot be bound .*: give an address"),
        (
            {"kv_events": "ipc:///tmp/inflight-test", "kv_events_replay": "tcp://1.2.3.4:1"},
            "kv_events_replay = 'tcp://1.2.3.4:1' cannot be bound",
        ),
        (
            {
                "kv_events": "tcp://127.0.0.1:1",
                "kv_cache_config": KvCacheConfig(enable_block_reuse=False),
            },
            "kv_events tells what is cached, but enable_kv_cache_reuse is false",
        ),
        (
            {"kv_events": "tcp://127.0.0.1:1", "engine": WindowedEngine()},
            "kv_events tells what layers with full attention have cached, and this checkpoint has",
        ),
    ],
)
def test_what_cannot_be_published_fails_the_start(params: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason), running(Recorder(), **params):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", ["array", "map"])
def test_dynamos_indexer_finds_a_prompt_where_it_is(name: str) -> None:
    """Two servers, each with a text of its own and one of both."""
    texts = {1: list(range(1, 41)), 2: list(range(500, 540))}
    common = [7] * 10
    with dynamo_indexer() as http:

        def matches(tokens: list[int]) -> dict[int, int]:
            """Tokens found, by server."""
            body = {"token_ids": tokens, "model_name": "demo"}
            found = http.post("/query", json=body).json()["instances"]
            return {int(number): each["longest_matched"] for number, each in found.items()}

        for number, text in texts.items():
            events, replay = addresses()
            recorder = Recorder()
            options = {"kv_events": events, "kv_events_replay": replay, "kv_events_format": name}
            with running(recorder, CountingEngine(num_blocks=60), **options) as manager:
                body = {"instance_id": number, "endpoint": events, "replay_endpoint": replay}
                answer = http.post(
                    "/register", json=body | {"model_name": "demo", "block_size": BLOCK}
                )
                assert answer.is_success, answer.text
                recorder.pending.append(request(1, [1], 1))  # its batches may come too early

                def is_known(tokens: list[int], number: int = number) -> bool:
                    return number in matches(tokens)

                probe = 900
                while not is_known([probe] * 8):
                    probe += 1  # blocks that are cached are not published again
                    recorder.pending.append(request(probe, [probe] * 9, 1))
                    manager.wake()
                    recorder.wait_for_finals(probe)
                    time.sleep(0.1)
                recorder.pending += [request(2, text, 1), request(3, common, 1)]
                manager.wake()
                recorder.wait_for_finals(2, 3)
                wait_until(lambda: is_known(common[:8]), WAIT)
        assert matches(texts[1]) == {1: 40}
        assert matches(texts[2][:21] + texts[1]) == {2: 20}
        assert matches(common) == {1: 8, 2: 8}
