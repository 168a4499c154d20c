"""Very many requests of one token through the whole glue and batch manager: is memory flat?

The engine counts instead of computing, and Triton is the stand-in of the tests: what is left is
`TritonPythonModel` with its threads, the scheduler, the KV books and the recorder.

    python benchmarks/tiny_requests.py --requests 1000000

Exit code 1 if memory grows; ``failures`` in the report says by how much.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import describe_run, write_result
from soak_parts.server import footprint

_CROWD = 50  # requests at once
_NUM_SAMPLES = 20
# The recorder keeps 8,192 iterations, some 40 MB: so many are more, however many share one.
_NUM_WARM_REQUESTS = 9000 * _CROWD
_MAX_BYTES_PER_REQUEST = 10.0
_WAIT_SECONDS = 120.0


def serve_tiny(num_requests: int) -> dict[str, Any]:
    """Memory over ``num_requests``, after a warm-up, and ``failures``."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from fakes import CountingEngine, FakePbUtils
    from triton_harness import Server

    from inflight_backend import gpt_manager, triton_model

    sys.modules["triton_python_backend_utils"] = FakePbUtils  # type: ignore[assignment]
    vars(triton_model)["exit_with_parent"] = lambda model: None
    engine = CountingEngine()
    vars(gpt_manager)["load_engine"] = lambda *args: engine
    samples: list[tuple[int, float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), engine, max_batch_size=str(_CROWD))
        _send(server, engine, _NUM_WARM_REQUESTS)
        began = time.monotonic()
        samples.append(_sample(0))
        for number in range(_NUM_SAMPLES):
            _send(server, engine, num_requests // _NUM_SAMPLES)
            samples.append(_sample((number + 1) * (num_requests // _NUM_SAMPLES)))
            print(*samples[-1], flush=True)
        seconds = time.monotonic() - began
        num_active = server.model._manager.get_num_active_requests()
        num_used = server.model._manager._batcher.block_manager.num_used_blocks
        server.model.finalize()
    growth = samples[-1][1] - samples[0][1]
    per_request = growth * 2**20 / num_requests
    failures = [f"{num_active} active, {num_used} blocks used"] if num_active or num_used else []
    if per_request > _MAX_BYTES_PER_REQUEST:
        failures.append(f"{per_request:.1f} bytes are kept of each request")
    return {
        "requests": num_requests,
        "requests_per_second": round(num_requests / seconds),
        "resident_mb": [round(mb, 1) for _, mb, _ in samples],
        "python_blocks": [blocks for _, _, blocks in samples],
        "growth_mb": round(growth, 1),
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
    from fakes import FakePbUtils

    engine.batches.clear()
    FakePbUtils.Logger.lines.clear()
    for family in FakePbUtils.families.values():
        family.observed.clear()


def _sample(num_requests: int) -> tuple[int, float, int]:
    gc.collect()
    return num_requests, footprint(os.getpid()).resident_mb, sys.getallocatedblocks()


def main() -> int:
    """Run and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("-o", "--output", type=Path, help="default: results/tiny_requests.json")
    options = parser.parse_args()
    result = describe_run("numpy")
    result.update(serve_tiny(options.requests))
    path = write_result("tiny_requests", result, options.output)
    print(f"{path.name}: {result['growth_bytes_per_request']} bytes per request")
    for failure in result["failures"]:
        print(f"  {failure}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
