"""What operators get who run tritonserver themselves: load, unload and reload."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.calls import assert_counts, stream_text
from support.plain_triton import PlainServer, repository_server

from inflight_client import InflightClient
from soak_parts.server import footprint

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLS = "tensorrt_llm_bls"
PROMPT = "1 2 3 4"
NUM_RELOADS = 3  # benchmarks/reload.py does it a hundred times

# A server without models: each is loaded by name.
started = partial(
    repository_server, f"--add={BLS}", server_options=["--model-control-mode=explicit"]
)


@pytest.fixture(scope="module")
def triton() -> Iterator[PlainServer]:
    with started() as running:
        yield running


def stream(running: PlainServer, max_tokens: int, model: str = "tensorrt_llm") -> Iterator[str]:
    return stream_text(running, PROMPT, max_tokens, model=model)


def unload(running: PlainServer, *models: str) -> None:
    for model in models or ("tensorrt_llm",):
        running.control("unload", model)
        running.wait_for("UNAVAILABLE", model)


@pytest.mark.case(99)
def test_unload_lets_streams_finish_and_refuses_new_requests(triton: PlainServer) -> None:
    triton.control("load")
    running = stream(triton, 250)
    with InflightClient(triton.grpc_url) as client, ThreadPoolExecutor() as pool:
        other = client.stream("10 11 12", 250)
        texts = [next(running), next(other).text]
        triton.control("unload")
        with pytest.raises(RuntimeError, match="no available versions"):
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
    unload(triton)


@pytest.mark.case(99)
def test_unload_and_reload_let_relayed_streams_finish(triton: PlainServer) -> None:
    """Triton does not know that they are of the model that is unloaded."""
    triton.control("load")
    triton.control("load", BLS)
    before = stream(triton, 250, BLS)
    text = next(before)
    (triton.scratch / "models/tensorrt_llm/config.pbtxt").touch()
    triton.control("load")  # the new one is there before the old one goes
    assert_counts(PROMPT, text + "".join(before), 250)
    running = stream(triton, 250, BLS)
    text = next(running)
    triton.control("unload")
    assert_counts(PROMPT, text + "".join(running), 250)
    triton.wait_for("UNAVAILABLE")
    with pytest.raises(RuntimeError, match="the model 'tensorrt_llm' is not loaded"):
        next(stream(triton, 1, BLS))
    triton.control("load")
    assert_counts(PROMPT, "".join(stream(triton, 40, BLS)), 40)
    unload(triton, BLS, "tensorrt_llm")


@pytest.mark.case(101)
def test_reloading_does_not_grow(triton: PlainServer) -> None:
    footprints, regions = [], []
    for _ in range(NUM_RELOADS):
        triton.control("load")
        assert_counts(PROMPT, "".join(stream(triton, 30)), 30)
        footprints.append(footprint(triton.process.pid))
        regions.append(len(triton.shared_memory()))
        unload(triton)
    first, last = footprints[1], footprints[-1]
    assert len(set(regions)) == 1
    assert abs(last.num_threads - first.num_threads) <= 2
    assert abs(last.num_descriptors - first.num_descriptors) <= 2
    assert last.resident_mb - first.resident_mb < 3.0
    assert triton.shared_memory() == []


def test_an_ensemble_is_loaded_without_its_model_and_a_bad_config_changes_nothing(
    triton: PlainServer,
) -> None:
    """Python writes nothing beside model.py, which Triton would take for a change (server#7489)."""
    triton.control("load")
    loaded = models_of(triton)
    triton.control("load", "ensemble")
    assert models_of(triton) == loaded
    config = httpx.get(f"{triton.http_url}/v2/models/tensorrt_llm/config", trust_env=False).json()
    config["instance_group"][0]["count"] = 2
    url = f"{triton.http_url}/v2/repository/models/tensorrt_llm/load"
    body = {"parameters": {"config": json.dumps(config)}}
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "instance_group asks for 2 instances" in answer.text
    assert models_of(triton) == loaded
    assert_counts(PROMPT, "".join(stream(triton, 5, "ensemble")), 5)
    unload(triton, "ensemble", "tensorrt_llm")


def models_of(running: PlainServer) -> list[int]:
    """The processes of its models, which have its folder in their command lines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program, *words = (entry / "cmdline").read_text(errors="replace").split("\0")
            if program.endswith("_stub") and any(str(running.scratch) in word for word in words):
                found.append(int(entry.name))
    return found


@pytest.mark.case(124)
def test_no_model_outlives_a_server_that_is_killed_amid_streams() -> None:
    """A call of Triton's that waits for the server with Python's lock would keep it for ever."""
    with started() as running, ThreadPoolExecutor(8) as pool:
        for model in ("tensorrt_llm", BLS):
            running.control("load", model)
        streams = [stream(running, 3000, BLS) for _ in range(8)]
        for each in streams:
            next(each)
        ends = [pool.submit(list, each) for each in streams]
        assert len(models_of(running)) == 2
        os.kill(running.process.pid, signal.SIGKILL)
        for end in ends:
            assert isinstance(end.exception(30), httpx.TransportError)
        deadline = time.monotonic() + 30
        while (left := models_of(running)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
