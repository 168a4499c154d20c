"""Bodies and tensors that no client of ours would send: refused fast, and the server lives."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc as grpcclient
from e2e.conftest import ServeFactory
from support.calls import assert_counts, stream_infer, stream_text
from support.server_process import TRITONSERVER, ServeProcess
from tritonclient.utils import InferenceServerException

from inflight_server.serve.repository import DEFAULT_MODELS, OPTIONAL_MODELS
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "1 2 3"
DEEP = '{"text_input": "1 2 3", "max_tokens": 4, "x": ' + "[" * 1000 + "]" * 1000 + "}"
HUGE = json.dumps({"text_input": "1 2 3 " * 1_750_000, "max_tokens": 4})
DOUBLED = '{"text_input": "1 2 3", "max_tokens": 4, "max_tokens": 5}'


def post(server: ServeProcess, body: str) -> httpx.Response:
    url = f"{server.http_url}/v2/models/tensorrt_llm/generate"
    return httpx.post(url, content=body, timeout=60, trust_env=False)


@pytest.mark.case(40)
@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (DEEP, {400}),
        (HUGE, {400}),
        (DOUBLED, {400}),
        # What Triton cannot parse it answers with 500.
        ("{", {500}),
        ("[]", {500}),
        ('{"text_input": {"a": 1}, "max_tokens": 4}', {500}),
        ('{"text_input": "1", "max_tokens": 1e99}', {500}),
        ('{"stop": []}', {400}),  # no row
        ('{"request_output_len": []}', {400}),
    ],
    ids=["deep", "huge", "doubled", "cut off", "list", "object", "overflow", "no row", "none"],
)
def test_odd_json_is_refused_fast(server: ServeProcess, body: str, statuses: set[int]) -> None:
    began = time.monotonic()
    answer = post(server, body)
    assert time.monotonic() - began < 20.0
    assert answer.status_code in statuses, answer.text[:300]
    assert "Traceback" not in answer.text
    assert_counts(PROMPT, "".join(stream_text(server, PROMPT, 20)), 20)


@pytest.mark.case(40)
@pytest.mark.parametrize(
    "path",
    [
        "models/tensorrt_llm/infer",
        "models/tensorrt_llm/generate",
        "models/ensemble/generate_stream",
        "repository/index",
        "repository/models/tensorrt_llm/load",
    ],
)
@pytest.mark.parametrize(
    "body", ["[" * 260_000, '{"text_input": ' + "[" * 500_000 + "]" * 500_000 + "}"]
)
def test_deep_json_ends_no_server(server: ServeProcess, path: str, body: str) -> None:
    """130,000 levels of the first kind did, 32,000 of the second, whatever the endpoint."""
    before = server.pid_of(TRITONSERVER)
    url = f"{server.http_url}/v2/{path}"
    answer = httpx.post(url, content=body, timeout=60, trust_env=False)
    assert "Traceback" not in answer.text
    assert server.pid_of(TRITONSERVER) == before
    assert_counts(PROMPT, "".join(stream_text(server, PROMPT, 20)), 20)


def test_a_client_cannot_make_the_server_log_more(server: ServeProcess) -> None:
    """Verbose logging fills a disk."""
    url = f"{server.http_url}/v2/logging"
    answer = httpx.post(url, json={"log_verbose_level": 1}, timeout=60, trust_env=False)
    reason = "the-log-is-set-where-inflight-serve-is-started"
    assert answer.status_code == 403
    assert reason in answer.text
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match=reason),
    ):
        client.update_log_settings({"log_verbose_level": 1})


def test_a_client_cannot_reach_the_memory_that_server_and_model_share(server: ServeProcess) -> None:
    """Its name is in an error of Triton 24.10, and who registers it can write there."""
    region = next(each for each in Path("/dev/shm").iterdir() if each.name.startswith("inflight-"))
    url = f"{server.http_url}/v2/systemsharedmemory/region/mine/register"
    body = {"key": f"/{region.name}", "offset": 0, "byte_size": 1024}
    reason = "inflight-serve-has-no-shared-memory-for-clients.send-tensors-in-requests"
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert answer.status_code == 403
    assert reason in answer.text
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match=reason),
    ):
        client.register_system_shared_memory("mine", f"/{region.name}", 1024)


def test_no_path_of_the_machine_is_in_what_triton_tells_of_the_models(
    serve: ServeFactory, tmp_path: Path
) -> None:
    """Every client can read the configuration of a model."""
    paths = {"record_file": tmp_path / "recording", "tokenizer_dir": DEMO_MODEL}
    running = serve(options=[f"--add={name}" for name in OPTIONAL_MODELS], settings=paths)
    for model in (*DEFAULT_MODELS, *OPTIONAL_MODELS):
        for what in ("", "/config"):
            url = f"{running.http_url}/v2/models/{model}{what}"
            told = httpx.get(url, timeout=60, trust_env=False)
            assert told.status_code == httpx.codes.OK
            assert not re.search(r'"/|inflight-serve-|demo_model', told.text), told.text
    for model in ("ensemble", "tensorrt_llm_bls"):
        pieces = stream_text(running, PROMPT, 20, model=model)
        assert_counts(PROMPT, "".join(pieces), 20)
    assert (tmp_path / "recording").exists()


@pytest.mark.case(39)
def test_an_unknown_input_is_refused_by_name(server: ServeProcess) -> None:
    tensors = {"text_input": [[PROMPT]], "temprature": [[0.5]]}
    (answer,) = stream_infer(server, "tensorrt_llm", tensors)
    assert "temprature" in answer["error"]


@pytest.mark.case(65)
def test_an_id_of_a_megabyte_is_refused(server: ServeProcess) -> None:
    body = {"text_input": PROMPT, "max_tokens": 4, "id": "x" * 1_000_000}
    answer = post(server, json.dumps(body))
    assert answer.status_code == 400
    assert "1000000 characters, more than 1024" in answer.text
