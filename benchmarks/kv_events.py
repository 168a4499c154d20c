"""What KV events cost the loop in an iteration: blocks stored and removed, the batch handed over.

The prefix cache of the scheduler with a publisher as its listener, and without; the publisher has
no consumer, one that reads, or one that never does. Time is that of the loop's thread, and includes
what the publisher's thread takes from it (Python runs one at a time).

    python benchmarks/kv_events.py --blocks 8 --iterations 5000
"""

from __future__ import annotations

import argparse
import resource
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from inflight_backend.kv_events import KvEventPublisher
from inflight_scheduler import LlmRequest
from inflight_scheduler.kv.prefix_cache import ReuseIndex
from report import describe_run, write_result
from servers import HOST, free_ports

TOKENS_PER_BLOCK = 32
PERIOD_SECONDS = 0.001  # between iterations, so that the publisher's thread has its turn


@contextmanager
def consumer(endpoint: str, kind: str) -> Iterator[None]:
    """Subscribed to all events; one that "reads" does so on a thread of its own."""
    if kind == "none":
        yield
        return
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            if socket.poll(50):
                socket.recv_multipart()

    thread = threading.Thread(target=read)
    if kind == "reads":
        thread.start()
    time.sleep(0.5)
    yield
    is_over.set()
    if kind == "reads":
        thread.join()
    context.destroy(linger=0)


def measure(kind: str, num_blocks: int, num_iterations: int) -> dict[str, float]:
    """Microseconds of one iteration: a text of ``num_blocks`` enters, the one before leaves."""
    [port] = free_ports(1)
    endpoint = f"tcp://{HOST}:{port}"
    publisher = None if kind == "off" else KvEventPublisher(endpoint, TOKENS_PER_BLOCK)
    index = ReuseIndex(TOKENS_PER_BLOCK, listener=publisher)
    times = []
    with consumer(endpoint, "none" if kind == "off" else kind):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(num_iterations):
            request = LlmRequest(number, [number] * (num_blocks * TOKENS_PER_BLOCK), 1)
            index.hashes(request, 0, num_blocks)  # known before, in a server
            start = time.perf_counter()
            index.add(request, range(num_blocks))
            index.forget(range(num_blocks))
            if publisher is not None:
                publisher.end_iteration()
            times.append(1e6 * (time.perf_counter() - start))
            time.sleep(PERIOD_SECONDS)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if publisher is not None:
        publisher.close()
    ordered = sorted(times)
    return {
        "median_us": round(statistics.median(times), 2),
        "p99_us": round(ordered[len(ordered) * 99 // 100], 1),
        "memory_growth_mb": round(grown / 1024, 1),
    }


def main() -> None:
    """Measure all and write benchmarks/results/kv_events.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result = describe_run("inflight", "pyzmq", "msgspec")
    result["workload"] = {"blocks": args.blocks, "iterations": args.iterations}
    result["iteration"] = {
        kind: measure(kind, args.blocks, args.iterations)
        for kind in ("off", "none", "reads", "never_reads")
    }
    print(write_result("kv_events", result, args.output))


if __name__ == "__main__":
    main()
