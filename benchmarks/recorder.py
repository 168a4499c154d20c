"""What the flight recorder costs, inside the real loop: the demo model on a CPU.

For each number of requests at once and each length of their prompts: the time an iteration takes,
the time the recorder's calls take in it (measured around each call, timers included), with the ring
alone and with a file. The prompts are the same, so all but the first are found in the cache: the
iterations are short. With block reuse also: what it costs to note the hashes of a request, which
the prefix cache has computed, and, once in 512 iterations, to remember what a full pool has cached.
And
with thousands of requests, which no CPU serves in time: the scheduler alone, without a model.

    python benchmarks/recorder.py --requests 1 8 64 256 --prompts 8 1000 4000 --tokens 150
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from inflight_backend import CapacitySchedulerPolicy
from inflight_backend.manager import batcher as inflight_batcher
from inflight_recorder.recorder import CHUNK_ITERATIONS, FlightRecorder
from inflight_recorder.settings import Settings, scheduler_of
from inflight_recorder.storage import RecordingFile, open_recording
from inflight_recorder.workload import read_workload
from inflight_scheduler import ActiveRequests, BatchPlanner, BlockManager, LlmRequest
from recorded_run import TimedRequest, run_recorded
from report import describe_run, write_result

CALLS = ("arrived", "decided", "carried_out", "ended", "finish_iteration")


class _NoFile(RecordingFile):
    """Takes iterations without formatting them until the end, as the ring alone would."""

    def _run(self) -> None:
        self._is_closing.wait()
        super()._run()


def timed_recorder(costs: list[int]) -> type[FlightRecorder]:
    """A recorder that adds the nanoseconds of each iteration's calls to ``costs``."""
    spent = 0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: FlightRecorder, *args: Any, **options: Any) -> Any:
            nonlocal spent
            start = time.perf_counter_ns()
            try:
                return method(self, *args, **options)
            finally:
                spent += time.perf_counter_ns() - start
                if method.__name__ == "finish_iteration" and self._number > len(costs):
                    costs.append(spent)
                    spent = 0

        return call

    methods = {name: timed(getattr(FlightRecorder, name)) for name in CALLS}
    return type("TimedRecorder", (FlightRecorder,), methods)


@contextmanager
def timed_collections(pauses: list[int]) -> Iterator[None]:
    """Add the nanoseconds of each garbage collection to ``pauses``, whatever caused it."""
    start = 0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal start
        if phase == "start":
            start = time.perf_counter_ns()
        else:
            pauses.append(time.perf_counter_ns() - start)

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


@contextmanager
def replaced(**attributes: Any) -> Iterator[None]:
    """Other attributes of the batcher's module for a while."""
    old = {name: getattr(inflight_batcher, name) for name in attributes}
    for name, value in attributes.items():
        setattr(inflight_batcher, name, value)
    yield
    for name, value in old.items():
        setattr(inflight_batcher, name, value)


def measure(
    num_requests: int, prompt_len: int, num_tokens: int, folder: Path, *, has_file: bool
) -> dict[str, Any]:
    """One run with so many requests at once, all from the start."""
    costs: list[int] = []
    path = folder / "recording.jsonl"
    requests = [TimedRequest(0.0, prompt_len, num_tokens - k % 50) for k in range(num_requests)]
    file = RecordingFile if has_file else _NoFile
    with replaced(FlightRecorder=timed_recorder(costs), RecordingFile=file):
        run_recorded(
            requests,
            path,
            CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            max_batch_size=num_requests,
            num_blocks=num_requests * -(-(num_tokens + prompt_len) // 16),
            max_num_tokens=max(512, prompt_len, 9 * num_requests),
            max_seq_len=max(512, prompt_len + num_tokens),
        )
    with open_recording(path) as reader:
        samples = read_workload(reader).samples
    turn = statistics.fmean(sample.microseconds for sample in samples)
    recorder = statistics.fmean(costs) / 1000
    return {
        "requests": num_requests,
        "prompt_tokens": prompt_len,
        "file": has_file,
        "iterations": len(costs),
        "iteration_us": round(turn, 1),
        "recorder_us": round(recorder, 2),
        "recorder_us_median": round(statistics.median(costs) / 1000, 2),
        "recorder_us_max": round(max(costs) / 1000, 2),
        "share_percent": round(100 * recorder / turn, 3),
        "bytes_per_iteration": round(path.stat().st_size / len(costs), 1),
    }


def measure_texts(prompt_len: int, num_requests: int = 64) -> dict[str, Any]:
    """What it costs to note the hashes of requests that generate 64 tokens.

    Each begins like all others, up to its last 8 prompt tokens.
    """
    manager = BlockManager(1024, 32, enable_reuse=True, may_copy_blocks=True)
    costs = []
    for number in range(num_requests):
        prompt = [*range(300, 300 + prompt_len - 8), *range(number, number + 8)]
        request = LlmRequest(number, prompt, 64)
        request.tokens.extend(range(64))
        num_blocks = (prompt_len + 63) // 32
        manager.block_hashes(request, 0, num_blocks)
        start = time.perf_counter_ns()
        manager.block_hashes(request, 0, prompt_len // 32)
        manager.block_hashes(request, prompt_len // 32, num_blocks)
        costs.append(time.perf_counter_ns() - start)
    median = statistics.median(costs) / 1000
    return {"prompt_tokens": prompt_len, "us_per_request_median": round(median, 1)}


def measure_cache_state(num_blocks: int, tokens_per_block: int = 32) -> dict[str, Any]:
    """The beginning of a segment with a full pool, half of it held by 64 requests."""
    manager = BlockManager(num_blocks, tokens_per_block, enable_reuse=True, may_copy_blocks=True)
    length = num_blocks // 128 * tokens_per_block
    requests = [LlmRequest(n, [n, *range(length)][:length], 8) for n in range(128)]
    for request in requests:
        manager.allocate(request.request_id, length)
        request.move_to_next_context_chunk()
        request.add_new_token(0)
        manager.store(request)
    for request in requests[64:]:
        manager.free(request.request_id)
    costs, num_kept = [], 0
    for _ in range(50):
        start = time.perf_counter_ns()
        state = manager.cache_state()
        assert state is not None
        costs.append(time.perf_counter_ns() - start)
        num_kept = sum(state.is_kept)
    median = statistics.median(costs) / 1000
    return {
        "blocks": num_blocks,
        "kept_blocks": num_kept,
        "us_median": round(median, 1),
        "us_per_iteration": round(median / CHUNK_ITERATIONS, 2),
    }


def measure_thousands(num_requests: int, num_iterations: int, *, reuse: bool) -> dict[str, Any]:
    """The loop of the server without its model: all generate, and in each iteration some end and
    as many come, so that an answer has 256 tokens.

    A garbage collection counts as the recorder's where it began in one of its calls.
    """
    settings = Settings(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        16 * num_requests,
        32,
        num_requests,
        enable_reuse=reuse,
        may_copy_blocks=reuse,
    )
    manager = BlockManager(16 * num_requests, 32, enable_reuse=reuse, may_copy_blocks=reuse)
    active = ActiveRequests(manager)
    planner = BatchPlanner(manager, num_requests, active)
    scheduler = scheduler_of(settings.policy, settings, planner)
    costs: list[int] = []
    recorder = timed_recorder(costs)(settings, manager)
    turns = []
    pauses: list[int] = []
    num_arrived = 0

    def turn() -> None:
        nonlocal num_arrived
        while len(active) < num_requests:
            num_new = 256 if num_arrived >= num_requests else 1 + num_arrived % 256
            prompt = [num_arrived % 100, num_arrived // 100, 3, 4]
            request = LlmRequest(num_arrived, prompt, num_new)
            active.add(request)
            recorder.arrived(request)
            num_arrived += 1
        lists = scheduler.schedule_request(active, ())
        recorder.decided(active, *lists)
        batch = planner.plan(*lists)
        recorder.carried_out(manager.num_free_blocks)
        for request in planner.update(batch, [7] * batch.num_drawn):
            if request.is_finished:
                planner.release(request)
                active.remove(request)
                recorder.ended(request)
        recorder.finish_iteration()

    with timed_collections(pauses):
        for _ in range(num_iterations):
            start = time.perf_counter_ns()
            turn()
            turns.append(time.perf_counter_ns() - start)
    return {
        "requests": num_requests,
        "reuse": reuse,
        "iterations": num_iterations,
        "turn_us_median": round(statistics.median(turns) / 1000, 1),
        "turn_us_mean": round(statistics.fmean(turns) / 1000, 1),
        "recorder_us_median": round(statistics.median(costs) / 1000, 1),
        "recorder_us_mean": round(statistics.fmean(costs) / 1000, 1),
        "recorder_us_p99": round(statistics.quantiles(costs, n=100)[-1] / 1000, 1),
        "recorder_us_max": round(max(costs) / 1000, 1),
        "share_percent": round(100 * sum(costs) / sum(turns), 1),
        "collections_us_mean": round(sum(pauses) / num_iterations / 1000, 1),
        "collections_us_max": round(max(pauses, default=0) / 1000, 1),
        "iterations_in_ring": sum(not line.startswith('{"inf') for line in recorder.lines()),
    }


def main() -> None:
    """Measure and write benchmarks/results/recorder.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 1000, 4000])
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--thousands", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        measure(1, 8, 60, Path(folder), has_file=False)  # warm
        for prompt_len, number, has_file in product(args.prompts, args.requests, (False, True)):
            rows.append(measure(number, prompt_len, args.tokens, Path(folder), has_file=has_file))
            print(rows[-1], flush=True)
    texts = [measure_texts(prompt_len) for prompt_len in (128, 1000, 4000, 16_000, 64_000)]
    states = [measure_cache_state(num_blocks) for num_blocks in (2048, 16_384, 65_536)]
    thousands = [
        measure_thousands(args.thousands, args.iterations, reuse=reuse) for reuse in (False, True)
    ]
    print(*texts, *states, *thousands, sep="\n")
    result = {**describe_run("torch", "inflight"), "rows": rows, "texts": texts}
    result["cache_states"] = states
    result["thousands"] = thousands
    print(write_result("recorder", result, args.output))


if __name__ == "__main__":
    main()
