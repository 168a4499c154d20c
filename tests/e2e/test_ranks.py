"""A model on several ranks behind a real server: whenever one dies or hangs, all streams end with
an error, and another server serves."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from e2e.conftest import ServeFactory
from e2e.test_supervision import (
    ENDLESS,
    PROMPT,
    assert_serves,
    drained,
    grpc_text,
    wait_until_ready_again,
)
from support.calls import stream_text
from support.server_process import HOST, MODEL, ServeProcess, free_ports, temporary_folder

from inflight_protocol import LLM_MODEL_NAME

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_LOSSES = int(os.environ.get("RANK_LOSSES", "6"))  # one after the other, in one server
STALL_SECONDS = 20  # the first request of a server has taken 10 on a machine with a load of 9
NOTICE_SECONDS = 10.0  # 1 s is the aim; tests share two cores
_logger = logging.getLogger(__name__)
WAYS = [(rank, number) for number in (signal.SIGKILL, signal.SIGSTOP) for rank in (0, 1)]


def ranks_of(running: ServeProcess) -> list[psutil.Process]:
    """Their processes: the model's, and its child."""
    first = psutil.Process(running.pid_of(MODEL))
    (second,) = [
        each for each in first.children() if "inflight_backend.ranks.worker" in each.cmdline()
    ]
    return [first, second]


def is_ready(running: ServeProcess) -> bool:
    """As a router asks; a server that is gone is not."""
    try:
        url = f"{running.http_url}/v2/models/{LLM_MODEL_NAME}/ready"
        return httpx.get(url, timeout=NOTICE_SECONDS).status_code == 200
    except httpx.TransportError:
        return False


class Load:
    """Streams without end, over both protocols, and how much of them has come."""

    def __init__(self, running: ServeProcess, pool: ThreadPoolExecutor) -> None:
        self.num_chunks = 0
        streams = [grpc_text(running, ENDLESS) for _ in range(3)]
        streams += [stream_text(running, PROMPT, ENDLESS)]
        self._readers: list[Future[tuple[BaseException | None, float]]] = [
            pool.submit(drained, self._counted(stream)) for stream in streams
        ]

    def _counted(self, stream: Iterator[str]) -> Iterator[str]:
        for chunk in stream:
            self.num_chunks += 1
            yield chunk

    def wait_for(self, num_chunks: int) -> None:
        deadline = time.monotonic() + 60
        while self.num_chunks < num_chunks:
            assert time.monotonic() < deadline, f"{self.num_chunks} chunks"
            time.sleep(0.002)

    def assert_ended_with_an_error(self, since: float, within: float) -> None:
        for reader in self._readers:
            error, at = reader.result(timeout=within + 30)
            assert error is not None, "a stream ended as if its answer were complete"
            assert at - since < within


@pytest.mark.timeout(240 + 60 * NUM_LOSSES)
@pytest.mark.parametrize("part", ["tensor", "pipeline"])
def test_ranks_that_are_lost_at_random_moments(serve: ServeFactory, part: str) -> None:
    """In some step of streams of different ages; ``RANK_LOSSES=20``: as often as that."""
    dice = random.Random(27)
    running = serve(
        settings={"stall_seconds": STALL_SECONDS},
        options=[f"--{part}-parallel-size", "2", "--verbose"],
    )
    try:
        lose_ranks(running, dice)
    except BaseException:
        _logger.warning("%s", running.stderr[-20_000:])  # which rank was lost, and how
        raise


def lose_ranks(running: ServeProcess, dice: random.Random) -> None:
    """One after the other, and at last all at once."""
    assert_serves(running)
    for turn in range(NUM_LOSSES):
        rank, number = WAYS[turn % len(WAYS)]
        ranks = ranks_of(running)
        within = NOTICE_SECONDS + (STALL_SECONDS if number == signal.SIGSTOP else 0)
        with ThreadPoolExecutor() as pool:
            load = Load(running, pool)
            load.wait_for(dice.randrange(1, 400))
            assert is_ready(running)
            lost = time.monotonic()
            ranks[rank].send_signal(number)
            while is_ready(running):
                assert time.monotonic() - lost < within, (rank, number, running.stderr)
                time.sleep(0.02)
            noticed = time.monotonic() - lost
            load.assert_ended_with_an_error(lost, within)
        wait_until_ready_again(running, turn + 1)
        _logger.warning("%d: rank %d, %s, after %.1f s", turn, rank, number.name, noticed)
        assert is_ready(running)
        assert_serves(running)
        assert not [each for each in ranks if is_alive(each)], (rank, number)
    ranks = ranks_of(running)
    assert running.stop() == 0
    psutil.wait_procs(ranks, timeout=NOTICE_SECONDS)
    assert not [each for each in ranks if is_alive(each)]


def is_alive(process: psutil.Process) -> bool:
    """Not gone, nor waiting to be told so to its parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_survives(running: ServeProcess, rank: psutil.Process) -> None:
    """The death of ``rank`` ends the streams; soon others are served."""
    assert_serves(running)
    with ThreadPoolExecutor() as pool:
        load = Load(running, pool)
        load.wait_for(20)
        rank.kill()
        load.assert_ended_with_an_error(time.monotonic(), NOTICE_SECONDS)
    wait_until_ready_again(running, 1)
    assert_serves(running)


def test_torchrun_starts_the_ranks_of_a_machine_again(serve: ServeFactory) -> None:
    """Where they meet is another place each time, whatever torchrun keeps between attempts."""
    (port,) = free_ports(1)
    place = ["--tp=4", "--nnodes=2", f"--master-addr={HOST}", f"--master-port={port}"]
    folder = Path(sys.executable).parent
    agent = psutil.Popen(
        [folder / "torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=3",
         "--no-python", folder / "inflight", "worker", "--node-rank=1", *place],
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    first: list[psutil.Process] = []
    try:
        running = serve(options=place)
        first = agent.children()
        assert len(first) == 2
        assert_survives(running, first[1])
        assert not [each for each in first if is_alive(each)]
        assert len(agent.children()) == 2
        assert running.stop() == 0
        assert agent.wait(60) == 0, "it was told to end"
    finally:
        for each in [*first, *(agent.children() if agent.is_running() else ()), agent]:
            if is_alive(each):
                each.kill()
        agent.wait()


_TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def test_ray_starts_the_ranks_of_another_node(
    serve: ServeFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And starts them again. The cluster has a process of its own: Ray forks, which gRPC's threads
    in this one do not survive for certain."""
    (port,) = free_ports(1)

    def workers() -> list[psutil.Process]:
        return [
            each
            for each in psutil.process_iter(["cmdline"])
            if {"inflight_backend.ranks.worker", str(port)} <= set(each.info["cmdline"] or ())
        ]

    folder = temporary_folder("ray")
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    cluster = subprocess.Popen(
        [sys.executable, "-c", _TWO_NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    try:
        address = cluster.stdout.readline().strip()
        running = serve(
            options=["--tp=2", "--nnodes=2", "--distributed-executor-backend=ray",
                     f"--master-addr={HOST}", f"--master-port={port}"],
            environment={"RAY_ADDRESS": address},
        )  # fmt: skip
        (worker,) = workers()
        assert_survives(running, worker)
        assert len(workers()) == 1
        assert running.stop() == 0
        psutil.wait_procs(workers(), timeout=NOTICE_SECONDS)
        assert workers() == []
    finally:
        cluster.stdin.close()
        cluster.wait(60)
        shutil.rmtree(folder)
