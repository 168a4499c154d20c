"""The engine of the first rank, which has the others run every plan that it runs itself.

Only this rank draws, answers, and has a scheduler. A rank that dies or falls silent is noticed by a
thread of its own, not by the next collective; then all others are killed, so that no collective
waits for them, and whatever is asked of the engine raises `EngineLost`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inflight_backend.engine.config import EngineConfig
from inflight_backend.engine.engine import Engine
from inflight_backend.engine.interface import StepOutputs
from inflight_backend.engine.outputs import PendingTokens
from inflight_backend.errors import ConfigurationError, EngineLost, InvalidRequest
from inflight_backend.models.blocks.lora import Adapter
from inflight_backend.models.parallel.collectives import GroupCollectives
from inflight_backend.models.weights import OnProgress
from inflight_backend.ranks.adapters import AdapterCuts, to_bytes
from inflight_backend.ranks.group import RankGroup
from inflight_backend.ranks.machines import Machines, accept
from inflight_backend.ranks.meeting import LOOPBACK, give_up, meet, open_store, part
from inflight_backend.ranks.messages import (
    Begin,
    LoadAdapter,
    PartBytes,
    Prepare,
    Step,
    pack,
    receive_rank,
)
from inflight_scheduler import ScheduledBatch

_NOTICE_SECONDS = 1.0


class RankedStep:
    """A step of all ranks that may still run; see `PendingStep`."""

    def __init__(self, pending: PendingTokens, engine: LeadingEngine) -> None:
        self._pending, self._engine = pending, engine

    def read(self) -> list[int]:
        """See `PendingStep`."""
        with self._engine.watched():
            return self._pending.read()

    def read_outputs(self) -> StepOutputs | None:
        """See `PendingStep`."""
        with self._engine.watched():
            return self._pending.read_outputs()


@dataclass(frozen=True, slots=True)
class PartedAdapter:
    """An adapter on the host, as each rank gets it: ``own`` of the first, and ``parts`` of the
    others; ``num_bytes`` of all these. The rest is of the whole."""

    own: Any
    parts: tuple[tuple[PartBytes, ...], ...]
    digest: bytes
    rank: int
    num_bytes: int


def _without_sampling(batch: ScheduledBatch) -> ScheduledBatch:
    """What the others need of ``batch``: they draw nothing, and a bias may be of every token."""
    if not batch.setups:
        return batch
    setups = [
        each._replace(sampling=replace(each.sampling, bias=(), bad_words=()), tokens=())
        for each in batch.setups
    ]
    return replace(batch, setups=tuple(setups))


class LeadingEngine(Engine):
    """As `Engine`; a `RankedEngine`."""

    _group: RankGroup | None = None  # while it loads, every rank goes its way alone

    @classmethod
    def start(
        cls,
        checkpoint: Path,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        *,
        gpu_device_ids: Sequence[int] = (),
        machines: Machines | None = None,
        silence_seconds: float,
    ) -> LeadingEngine:
        """Start the other ranks on this machine, wait for those of other ``machines``, and load,
        each its part.

        ``gpu_device_ids``: the GPUs of the ranks, in order; (): the first ones. A rank that says
        nothing for ``silence_seconds`` is lost. `CheckpointError` or `ConfigurationError` when it
        cannot be served as asked.
        """
        size, machines = config.place(0).size, machines or Machines(host=LOOPBACK, port=-1)
        own = machines.ranks_of(0, size)
        devices = gpu_device_ids or range(len(own))
        backend = "nccl" if _is_on_gpus(config, devices) else "gloo"
        threads = 0 if backend == "nccl" else _threads_of_each(len(own))
        joined: dict[int, socket.socket] = {}
        if len(own) < size:
            with machines.listening() as listener:
                joined = accept(listener, range(len(own), size), receive_rank)
        # Whoever waits in it for a rank that is lost gets an error when it is gone.
        stores = [open_store(machines.host, size, machines.port + 1)]
        port = stores[0].port

        def begin(rank: int) -> Begin:
            return Begin(
                checkpoint=str(checkpoint.absolute()),
                config=config,
                rank=rank,
                local_rank=devices[rank % len(own)],
                host=machines.host,
                port=port,
                backend=backend,
                timeout_seconds=_COLLECTIVE_SECONDS,
                num_threads=threads,
            )

        orders = [begin(rank) for rank in range(1, size)]
        group = RankGroup.start(orders, silence_seconds, joined)
        ranks = None
        try:
            group.wait_until_ready()
            group.when_lost(stores.clear)
            group.when_lost(give_up)
            ranks = meet(begin(0))
            group.when_lost(ranks.give_up)
            engine = cls.load(checkpoint, config, on_progress, ranks=ranks)
        except BaseException as error:
            group.is_lost(_NOTICE_SECONDS)
            group.close(is_orderly=False)
            _leave(ranks, stores)
            if isinstance(error, ConfigurationError):
                raise
            why = group.error or f"the ranks do not start: {group.reason or error}"
            raise ConfigurationError(why) from error
        engine._group, engine._collectives, engine._stores = group, ranks, stores
        engine._device, engine._num_threads = devices[0], threads
        model = engine.model_config
        engine._cuts = [AdapterCuts.of(model, config.place(rank)) for rank in range(size)]
        return engine

    _collectives: GroupCollectives
    _stores: list[Any]
    _device = _num_threads = 0
    _cuts: list[AdapterCuts]

    @property
    def device_name(self) -> str:
        """Where it runs, for people."""
        return f"{self._ranks.place.size} x {super().device_name}"

    def when_lost(self, tell: Callable[[], None]) -> None:
        """See `RankedEngine`."""
        assert self._group is not None
        self._group.when_lost(tell)

    def close(self) -> None:
        """See `RankedEngine`."""
        assert self._group is not None
        self._group.close(is_orderly=True)
        _leave(self._collectives, self._stores)

    def submit(self, batch: ScheduledBatch) -> Any:
        """See `Engine`."""
        if self._group is None:
            return super().submit(batch)
        with self.watched():
            self._group.send(pack(Step(_without_sampling(batch))))
            return RankedStep(super().submit(batch), self)

    def prepare_adapter(self, adapter: Adapter) -> Any:
        """What `load_adapter` takes; any thread may call it."""
        known = {name for cuts in self._cuts for name in cuts.cuts}
        if unknown := [each.linear for each in adapter.parts if each.linear not in known]:
            raise InvalidRequest(
                f"the adapter changes {unknown[0]}: adapters of experts, their routers and latents "
                "need tensor_parallel_size and pipeline_parallel_size 1"
            )
        own, *others = [cuts.part_of(adapter) for cuts in self._cuts]
        parts = tuple(tuple(map(to_bytes, each.parts)) for each in others)
        prepared = super().prepare_adapter(own)
        # More than of the whole: each rank has what is not cut.
        num_bytes = own.num_bytes + sum(each.num_bytes for each in others)
        return PartedAdapter(prepared, parts, adapter.digest, adapter.rank, num_bytes)

    def load_adapter(self, place: int, adapter: Any) -> None:
        """See `Engine`."""
        assert self._group is not None
        parts = [None] * self._group.size if adapter is None else adapter.parts
        with self.watched():
            self._group.send_each([pack(LoadAdapter(place, each)) for each in parts])
            super().load_adapter(place, None if adapter is None else adapter.own)

    def prepare_thread(self) -> None:
        """See `Engine`."""
        assert self._group is not None
        # Each thread has its own.
        if self.config.device == "cuda":
            torch.cuda.set_device(self._device)
        elif self._num_threads:
            torch.set_num_threads(self._num_threads)
        with self.watched():
            self._group.send(pack(Prepare()))
            group, self._group = self._group, None  # its warm-up is no plan of theirs
            try:
                super().prepare_thread()
                self._ranks.least(0)  # their first step must not wait for what they compile
            finally:
                self._group = group

    @contextmanager
    def watched(self) -> Iterator[None]:
        """`EngineLost` once a rank is lost, and for an error that leaves the ranks at different
        places: none is known that would not."""
        assert self._group is not None
        if self._group.is_lost(0):
            raise EngineLost()
        try:
            yield
        except Exception as error:
            self._group.is_lost(_NOTICE_SECONDS)
            self._group.lose(f"a step failed: {error}")
            raise EngineLost() from error


_COLLECTIVE_SECONDS = 86_400.0
"""A collective waits for the slowest rank, and that may load for long; who is lost is noticed by
`RankGroup`."""


def _leave(ranks: GroupCollectives | None, stores: list[Any]) -> None:
    """Part from the other ranks, which have ended."""
    part()
    if ranks is not None:
        ranks.close()
    stores.clear()


def _is_on_gpus(config: EngineConfig, devices: Sequence[int]) -> bool:
    if config.device == "cpu" or not torch.cuda.is_available():
        return False
    if max(devices) >= (count := torch.cuda.device_count()):
        raise ConfigurationError(
            f"tensor_parallel_size * pipeline_parallel_size is {len(devices)}, on the GPUs "
            f"{', '.join(map(str, devices))}, and this server sees {count}"
        )
    return True


def _threads_of_each(size: int) -> int:
    """Cores for each rank; a user's own number stands."""
    if os.environ.get("OMP_NUM_THREADS"):
        return 0
    return max(len(os.sched_getaffinity(0)) // size, 1)
