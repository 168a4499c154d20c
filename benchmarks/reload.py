"""Load, use and unload the model again and again on a plain tritonserver: what grows?

    python benchmarks/reload.py --times 100

Exit code 1 if anything does; ``failures`` in the report says what.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from report import describe_run, write_result
from servers import repository_server
from soak_parts import judge
from soak_parts.server import Footprint, footprint

_WARM = 5  # what a server needs once it has by then
_MAX_MORE = 2  # threads or descriptors: those of a connection that was just closed
_MAX_MB_PER_RELOAD = 0.5


def reload_models(times: int) -> dict[str, Any]:
    """What each reload took and left, and ``failures``."""
    seconds: list[float] = []
    prints: list[Footprint] = []
    loads: list[float] = []
    with repository_server(server_options=["--model-control-mode=explicit"]) as triton:
        body = {"text_input": "1 2 3", "max_tokens": 20, "stream": False}
        url = f"{triton.http_url}/v2/models/tensorrt_llm/generate"
        for _ in range(times):
            began = time.monotonic()
            triton.control("load")
            seconds.append(time.monotonic() - began)
            answer = httpx.post(url, json=body, timeout=120, trust_env=False)
            answer.raise_for_status()
            prints.append(footprint(triton.process.pid))
            loads.append(os.getloadavg()[0])
            triton.control("unload")
            triton.wait_for("UNAVAILABLE", seconds=120.0)
        regions = len(triton.shared_memory())
    warm, last = prints[min(_WARM, times - 1)], prints[-1]
    growth = last.resident_mb - warm.resident_mb
    threads = last.num_threads - warm.num_threads
    descriptors = last.num_descriptors - warm.num_descriptors
    failures = [f"{regions} regions of shared memory left"] if regions else []
    if threads > _MAX_MORE or descriptors > _MAX_MORE:
        failures.append(f"{threads} more threads, {descriptors} more descriptors")
    if growth > max(20.0, _MAX_MB_PER_RELOAD * times):
        failures.append(f"the server grew by {growth:.0f} MB in {times} reloads")
    return {
        "reloads": times,
        "load_average": judge.loads(loads),
        "load_seconds_p50": round(statistics.median(seconds), 2),
        "resident_mb": [round(each.resident_mb, 1) for each in prints],
        f"growth_mb_since_reload_{_WARM}": round(growth, 1),
        "more_threads": threads,
        "more_descriptors": descriptors,
        "regions_left": regions,
        "failures": failures,
    }


def main() -> int:
    """Reload and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--note", default="", help="put into the report: what else the machine did")
    parser.add_argument("-o", "--output", type=Path, help="default: results/reload.json")
    options = parser.parse_args()
    result = describe_run("torch", "numpy", "nvidia-pytriton")
    result["note"] = options.note
    result.update(reload_models(options.times))
    path = write_result("reload", result, options.output)
    print(f"{path.name}: {len(result['failures'])} failures")
    for failure in result["failures"]:
        print(f"  {failure}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
