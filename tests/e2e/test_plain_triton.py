"""What operators get who run tritonserver themselves: load, unload and reload."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from e2e.harness import assert_counts, temporary_folder

from inflight_client import InflightClient

if TYPE_CHECKING:
    from soak_parts.plain_triton import PlainTriton

pytestmark = pytest.mark.e2e

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

PROMPT = "1 2 3 4"
NUM_RELOADS = 3  # benchmarks/reload.py does it a hundred times


@pytest.fixture(scope="module")
def triton() -> Iterator[PlainTriton]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from soak_parts.plain_triton import plain_triton
    scratch = temporary_folder("plain")
    with plain_triton(scratch) as running:
        yield running
    shutil.rmtree(scratch)


def stream(running: PlainTriton, max_tokens: int) -> Iterator[str]:
    body = {"text_input": PROMPT, "max_tokens": max_tokens, "stream": True}
    url = f"{running.http_url}/v2/models/tensorrt_llm/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
        for line in response.iter_lines():
            content = json.loads(line.removeprefix("data:")) if line.strip() else {}
            assert "error" not in content, content
            if "text_output" in content:
                yield content["text_output"]


@pytest.mark.case(99)
def test_unload_lets_streams_finish_and_refuses_new_requests(triton: PlainTriton) -> None:
    triton.control("load")
    running = stream(triton, 250)
    with InflightClient(triton.grpc_url) as client, ThreadPoolExecutor() as pool:
        other = client.stream("10 11 12", 250)
        texts = [next(running), next(other).text]
        triton.control("unload")
        with pytest.raises(AssertionError, match="no available versions"):
            next(stream(triton, 1))
        rests = [
            pool.submit(lambda: "".join(running)),
            pool.submit(lambda: "".join(chunk.text for chunk in other)),
        ]
        texts = [text + rest.result(60) for text, rest in zip(texts, rests, strict=True)]
    assert_counts(PROMPT, texts[0], 250)
    assert_counts("10 11 12", texts[1], 250)
    triton.wait_for("UNAVAILABLE")
    triton.control("load")
    assert_counts(PROMPT, "".join(stream(triton, 40)), 40)
    triton.control("unload")
    triton.wait_for("UNAVAILABLE")


@pytest.mark.case(101)
def test_reloading_does_not_grow(triton: PlainTriton) -> None:
    footprints, regions = [], []
    for _ in range(NUM_RELOADS):
        triton.control("load")
        assert_counts(PROMPT, "".join(stream(triton, 30)), 30)
        footprints.append(triton.footprint())
        regions.append(triton.num_regions())
        triton.control("unload")
        triton.wait_for("UNAVAILABLE")
    first, last = footprints[1], footprints[-1]
    assert len(set(regions)) == 1
    assert abs(last.num_threads - first.num_threads) <= 2
    assert abs(last.num_descriptors - first.num_descriptors) <= 2
    assert last.resident_mb - first.resident_mb < 3.0
    assert triton.num_regions() == 0
