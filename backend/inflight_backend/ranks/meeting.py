"""Where the ranks of a model meet: the process group of `torch.distributed`."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from inflight_backend.models.parallel.collectives import GroupCollectives
from inflight_backend.ranks.messages import Begin

LOOPBACK = "127.0.0.1"
_MEETING_SECONDS = 30.0
"""For ranks that are about to meet, see `RankGroup.wait_until_ready`, to connect to one another and
to the store: one that died meanwhile is tried to be reached for as long."""


def open_store(host: str, num_ranks: int, port: int = 0) -> TCPStore:
    """Of the first rank, on a free port or that; the others are not waited for."""
    return TCPStore(host, port, num_ranks, is_master=True, wait_for_workers=False)


def meet(begin: Begin) -> GroupCollectives:
    """Wait for all ranks, in the store of the first one."""
    place = begin.config.place(begin.rank)
    if begin.num_threads:
        torch.set_num_threads(begin.num_threads)
    if begin.backend == "gloo" and begin.host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else what the host's name stands for
    device = None
    if begin.backend == "nccl":
        torch.cuda.set_device(begin.local_rank)
        device = torch.device("cuda", begin.local_rank)
    timeout = timedelta(seconds=begin.timeout_seconds)
    meeting = timedelta(seconds=_MEETING_SECONDS)
    store = TCPStore(begin.host, begin.port, place.size, is_master=False, timeout=meeting)
    store.set_timeout(timeout)
    is_gloo = begin.backend == "gloo"
    if not is_gloo:
        meeting = timeout
    dist.init_process_group(
        begin.backend,
        store=store,
        rank=begin.rank,
        world_size=place.size,
        timeout=meeting,
        device_id=device,
    )
    ranks = GroupCollectives(place, meeting)
    if is_gloo:
        ranks.wait_for(timeout)
    return ranks


def give_up() -> None:
    """Have collectives return that wait for a rank on GPUs, with an error, soon; from any thread.
    Those of gloo do so by themselves."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        abort = dist.distributed_c10d._abort_process_group
        threading.Thread(target=abort, name="AbortNCCL", daemon=True).start()


def part() -> None:
    """Forget the group, whatever has become of it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # If they did not all meet. Groups find one another by their number.
    dist.distributed_c10d._world.group_count = 0
