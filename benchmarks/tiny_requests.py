"""Very many requests of one token through the whole glue and batch manager: is memory flat?

The engine counts instead of computing, and Triton is the stand-in of the tests: what is left is
`TritonPythonModel` with its threads, the scheduler, the KV books and the recorder.

    python benchmarks/tiny_requests.py --requests 1000000

What is judged is memory in use: what malloc has given out, less the recorder's ring, whose
iterations are the larger the more requests share one, and the number of Python's small objects.
Resident memory follows the ring, too, and keeps the places that it left; it is bounded here by what
the ring may take. Exit code 1 if memory grows; ``failures`` in the report says by how much.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from report import describe_run, write_result
from soak_parts.server import footprint

_CROWD = 50  # requests at once
_NUM_SAMPLES = 20
# The recorder's ring holds at most 8,192 iterations: these are more, however many share one.
_NUM_WARM_REQUESTS = 9000 * _CROWD
_MAX_BYTES_PER_REQUEST = 2.0  # in use; a pointer that is kept takes 8
_MAX_OBJECTS_PER_REQUEST = 0.01
_MAX_RESIDENT_GROWTH_MB = 32.0
_WAIT_SECONDS = 120.0


class _Sample(NamedTuple):
    num_requests: int
    resident_mb: float
    recorder_mb: float  # of these: the recorder's ring, which is bounded
    in_use_mb: float  # of malloc, without the recorder's ring
    python_blocks: int


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")
    _fields_ = tuple(
        (name, ctypes.c_size_t) for name in (*_names, "uordblks", "fordblks", "keepcost")
    )


def serve_tiny(num_requests: int, num_warm: int) -> dict[str, Any]:
    """Memory over ``num_requests``, after a warm-up of ``num_warm``, and ``failures``."""
    from support.triton_harness import Server
    from support.triton_stub import CountingEngine, FakePbUtils

    from inflight_backend.manager import gpt_manager
    from inflight_backend.triton import model as triton_model

    sys.modules["triton_python_backend_utils"] = FakePbUtils  # type: ignore[assignment]
    vars(triton_model)["exit_with_parent"] = lambda model: None
    engine = CountingEngine()
    vars(gpt_manager)["load_engine"] = lambda *args: engine
    samples: list[_Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), engine, max_batch_size=str(_CROWD))
        _send(server, engine, num_warm)
        began = time.monotonic()
        samples.append(_sample(server, 0))
        for number in range(_NUM_SAMPLES):
            _send(server, engine, num_requests // _NUM_SAMPLES)
            samples.append(_sample(server, (number + 1) * (num_requests // _NUM_SAMPLES)))
            print(*samples[-1], flush=True)
        seconds = time.monotonic() - began
        num_active = server.model._manager.get_num_active_requests()
        num_used = server.model._manager._batcher.block_manager.num_used_blocks
        server.model.finalize()
    first, last = samples[0], samples[-1]
    resident_growth = last.resident_mb - first.resident_mb
    per_request = (last.in_use_mb - first.in_use_mb) * 2**20 / num_requests
    objects_per_request = (last.python_blocks - first.python_blocks) / num_requests
    failures = [f"{num_active} active, {num_used} blocks used"] if num_active or num_used else []
    if per_request > _MAX_BYTES_PER_REQUEST:
        failures.append(f"{per_request:.1f} bytes are kept of each request")
    if objects_per_request > _MAX_OBJECTS_PER_REQUEST:
        failures.append(f"{objects_per_request:.3f} objects are kept of each request")
    if resident_growth > _MAX_RESIDENT_GROWTH_MB:
        failures.append(f"resident memory grew by {resident_growth:.0f} MB")
    return {
        "requests": num_requests,
        "requests_per_second": round(num_requests / seconds),
        "resident_mb": [round(sample.resident_mb, 1) for sample in samples],
        "recorder_mb": [round(sample.recorder_mb, 1) for sample in samples],
        "in_use_mb": [round(sample.in_use_mb, 2) for sample in samples],
        "python_blocks": [sample.python_blocks for sample in samples],
        "growth_mb": round(resident_growth, 1),
        "growth_bytes_per_request": round(per_request, 2),
        "failures": failures,
    }


def _send(server: Any, engine: Any, number: int) -> None:
    """Crowd after crowd; each request must end with its one final response."""
    for start in range(0, number, _CROWD):
        senders = [
            server.send(f"{start + i}", input_ids=[i], request_output_len=1, streaming=True)
            for i in range(_CROWD)
        ]
        for sender in senders:
            if not sender.is_final.wait(_WAIT_SECONDS):
                raise RuntimeError("a request did not end")
        _forget(engine)


def _forget(engine: Any) -> None:
    """Empty what the stand-ins of engine and Triton remember for the tests: that is not ours."""
    from support.triton_stub import FakePbUtils

    engine.batches.clear()
    FakePbUtils.Logger.lines.clear()
    for family in FakePbUtils.families.values():
        family.observed.clear()


def _sample(server: Any, num_requests: int) -> _Sample:
    gc.collect()
    ring = _ring_bytes(server.model._manager._batcher.recorder) / 2**20
    return _Sample(
        num_requests,
        footprint(os.getpid()).resident_mb,
        ring,
        _given_out() - ring,
        sys.getallocatedblocks(),
    )


def _ring_bytes(recorder: Any) -> int:
    """What is held for the iterations in the ring."""
    return sum(int(chunk.num_bytes) for chunk in recorder._ring)


def _given_out() -> float:
    """What malloc has given out, in MB: all but objects of up to 512 bytes, which Python counts."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return float(info.uordblks + info.hblkhd) / 2**20


def main() -> int:
    """Run and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--warm-up", type=int, default=_NUM_WARM_REQUESTS, help="requests")
    parser.add_argument("-o", "--output", type=Path, help="default: results/tiny_requests.json")
    options = parser.parse_args()
    result = describe_run("numpy")
    result.update(serve_tiny(options.requests, options.warm_up))
    path = write_result("tiny_requests", result, options.output)
    print(f"{path.name}: {result['growth_bytes_per_request']} bytes per request")
    for failure in result["failures"]:
        print(f"  {failure}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
