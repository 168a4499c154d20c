"""`inflight serve` for real: it starts, says so, serves, refuses, drains, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpc
from e2e.conftest import ServeFactory
from support.calls import (
    assert_counts,
    assert_counts_in_part,
    generate_stream,
    make_inputs,
    stats_of,
    stream_text,
    tensors_of,
    wait_for_active,
)
from support.hub import COMMIT, Hub, serving
from support.promql import selectors_of
from support.server_process import HOST, MODEL, ServeProcess

from inflight_client import InflightClient, InflightError
from inflight_protocol import ERRORS, METRICS, VLLM_METRICS
from inflight_server.serve.settings import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.e2e

PROMPT = "1 2 3 4"
SHORT = 300  # tokens (bytes, for the demo model): what a stopping server still finishes
LONG = 8000  # far more than it generates until a test has stopped it
# The server itself needs up to 3 s without requests, 5 s with a stream that stays open.
BOUND_SECONDS = 30


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=10, trust_env=False)


def ask_until_refused(running: ServeProcess) -> None:
    """Ask again and again: the model looks for the wish to stop only ten times a second."""
    while True:
        list(stream_text(running, PROMPT, 1))


def remaining(first: str, stream: Iterator[str]) -> str:
    return first + "".join(stream)


# What a running server shows and does.


def test_block_names_what_runs_and_what_to_type(server: ServeProcess) -> None:
    for part in (
        server.http_url,
        server.grpc_url,
        server.metrics_url,
        "float32 on CPU",
        "guaranteed_no_evict",
        f"inflight generate {json.dumps(PROMPT)} --max-tokens 40 --url {server.grpc_url}",
        "generate_stream",
    ):
        assert part in server.stdout
    assert "Traceback" not in server.stderr


def ask_ready(running: ServeProcess) -> httpx.Response:
    """The probe that tells the truth on every Triton: 24.10 says ready whatever the model does."""
    url = f"{running.http_url}/v2/models/tensorrt_llm/generate"
    return httpx.post(url, json={"ready": True}, timeout=10, trust_env=False)


def test_server_and_both_models_are_ready(server: ServeProcess) -> None:
    for path in ("health", "models/tensorrt_llm", "models/ensemble"):
        assert get(f"{server.http_url}/v2/{path}/ready").status_code == 200
    assert ask_ready(server).status_code == 200


@pytest.mark.contract("ensemble input", "text_input max_tokens stream")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_text_streams_over_http(server: ServeProcess, model: str) -> None:
    pieces = list(stream_text(server, PROMPT, 60, model=model))
    assert len(pieces) > 1
    assert "".join(pieces).startswith(" 5 6 7 8 9 10")
    assert_counts(PROMPT, "".join(pieces), 60)


@pytest.mark.contract("tensorrt_llm input", "random_seed")
@pytest.mark.contract(
    "ensemble input",
    "end_id pad_id top_k top_p temperature length_penalty repetition_penalty "
    "presence_penalty frequency_penalty random_seed",
)
def test_settings_of_the_ensemble_reach_the_model(server: ServeProcess) -> None:
    pieces = stream_text(server, PROMPT, 30, temperature=1.0, top_k=1, random_seed=7, min_length=4)
    assert_counts(PROMPT, "".join(pieces), 30)


@pytest.mark.contract("ensemble input", "min_tokens seed")
def test_newer_names_reach_the_model_through_the_ensemble(server: ServeProcess) -> None:
    """`seed` is `random_seed`, `min_tokens` is `min_length`; both of a pair are too much."""

    def ask(**settings: Any) -> str:
        return "".join(stream_text(server, PROMPT, 30, temperature=50.0, top_p=1.0, **settings))

    assert ask(seed=8) == ask(random_seed=8) != ask(seed=9)
    for new, old in (("seed", "random_seed"), ("min_tokens", "min_length")):
        with pytest.raises(RuntimeError, match=f"'{old}' is given twice"):
            ask(**{new: 8, old: 8})
    with pytest.raises(RuntimeError, match="'min_tokens' is 31, outside 0"):
        ask(min_tokens=31)


@pytest.mark.slow
def test_a_model_asked_for_is_served_with_its_own_setting(serve: ServeFactory) -> None:
    running = serve(options=["--add", "tensorrt_llm_bls"], settings={"accumulate_tokens": "true"})
    *_, whole = stream_text(running, PROMPT, 30, model="tensorrt_llm_bls")
    assert_counts(PROMPT, whole, 30)
    assert running.stop() == 0


def test_the_ensemble_names_what_is_not_supported_or_missing(server: ServeProcess) -> None:
    with pytest.raises(RuntimeError, match="beam_width"):
        list(stream_text(server, PROMPT, 30, beam_width=2))
    url = f"{server.http_url}/v2/models/ensemble/generate_stream"
    answer = httpx.post(url, json={"text_input": PROMPT}, timeout=10, trust_env=False)
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]


def values_of(page: str) -> dict[tuple[str, str], float]:
    """(family, value of the label that tells its metrics apart, or le) -> number."""
    values = {}
    for family, labels, number in re.findall(
        r"^(nv_(?:trt_)?llm_\w+|inflight_\w+)\{(.*)\} (\S+)$", page, re.M
    ):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        own = {name: value for name, value in pairs.items() if name not in ("model", "version")}
        values[family, own.get("le") or next(iter(own.values()))] = float(number)
    return values


@pytest.mark.contract("metric", "*")
def test_metrics_page_shows_the_batch_manager(server: ServeProcess) -> None:
    """Integer for integer what the statistics say, once nothing moves; and lengths, and errors."""
    assert "".join(stream_text(server, "1 2 3", 20))
    refused = (ERRORS.name, "INVALID_ARG")
    num_refused = values_of(get(server.metrics_url).text)[refused]
    with pytest.raises(RuntimeError, match="temperature"):
        "".join(stream_text(server, "1 2 3", 20, temperature=-1.0))
    deadline = time.monotonic() + BOUND_SECONDS
    while True:
        stats = stats_of(server)
        page = get(server.metrics_url).text
        shown = values_of(page)
        is_counted = shown[refused] > num_refused  # Triton itself counts it as a success
        expected = {
            (family.name, value): stats[key]
            for family in METRICS
            for value, key in family.values.items()
            # Memory in use moves by itself.
            if isinstance(stats.get(key), int) and not key.startswith("Runtime")
        }
        if is_counted and {place: shown.get(place) for place in expected} == expected:
            break
        assert time.monotonic() < deadline, (expected, page)
    assert len(expected) == 15  # those of adapters come with the first one
    for family in METRICS:
        assert f"# TYPE {family.name} {family.kind}" in page
    for family in VLLM_METRICS:
        assert f"# TYPE {family.name} {family.kind}" in page
    while not re.search(r'vllm:request_success_total\{[^}]*"length"[^}]*\} [1-9]', page):
        assert time.monotonic() < deadline, page
        page = get(server.metrics_url).text
    assert re.search(r'vllm:time_to_first_token_seconds_bucket\{[^}]*le="\+Inf"[^}]*\} [1-9]', page)
    assert re.search(r"vllm:inter_token_latency_seconds_sum\{[^}]*\} [0-9.e-]*[1-9]", page)
    counts = [shown["nv_llm_output_token_len_bucket", le] for le in ("10", "50", "+Inf")]
    assert counts == sorted(counts)
    assert counts[1] > counts[0]  # 20 tokens


def test_every_expression_of_the_dashboard_finds_a_series(server: ServeProcess) -> None:
    """On the page of a real server; those of GPUs are Triton's, where there is one."""
    assert "".join(stream_text(server, "1 2 3", 5))
    page = get(server.metrics_url).text
    board = json.loads((ROOT / "deploy/grafana/dashboards/inflight.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for expression in expressions:
        for family, labels in selectors_of(expression):
            if family.startswith("nv_gpu_"):
                continue
            pairs = "".join(rf'(?=[^}}]*\b{name}="{value}")' for name, value in labels.items())
            name = rf"{family}(_sum|_count)?"
            assert re.search(rf"^{name}\{{{pairs}", page, re.MULTILINE), expression


def test_the_metrics_page_is_never_behind_an_answer_that_was_read(server: ServeProcess) -> None:
    """Nor behind an error: it is read as soon as the client has the end of either."""
    counted = ("nv_llm_output_token_len_count", "total_output_tokens")
    refused, active = (ERRORS.name, "INVALID_ARG"), ("nv_trt_llm_request_metrics", "active")
    shown = values_of(get(server.metrics_url).text)
    num_answers, num_errors = shown[counted], shown[refused]
    with InflightClient(server.grpc_url) as client:
        for number in range(12):
            if number % 4 == 3:
                with pytest.raises(InflightError, match="temperature"):
                    client.generate(PROMPT, 5, temperature=-1.0)
                num_errors += 1
            elif number % 2:
                assert list(client.stream(PROMPT, 10 + number))
                num_answers += 1
            else:
                client.generate(PROMPT, 10 + number)
                num_answers += 1
            shown = values_of(get(server.metrics_url).text)
            assert (shown[counted], shown[refused], shown[active]) == (num_answers, num_errors, 0)


# A start that cannot work: one line, exit code 1, nothing left.


def assert_refused(running: ServeProcess, *parts: str) -> None:
    assert running.wait() == 1
    assert running.stdout == ""
    (line,) = running.error_lines
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


def num_wakeups(pid: int) -> int:
    """How often the threads of a process have gone to sleep so far."""
    key = "\nvoluntary_ctxt_switches:"
    texts = [(each / "status").read_text() for each in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(text.partition(key)[2].split()[0]) for text in texts)


@pytest.mark.slow
@pytest.mark.case(109)
def test_an_idle_server_sleeps(server: ServeProcess) -> None:
    """The launcher woke up 20 times in a second, the model process 260 times; now it is 2 and 10.

    What benchmarks/idle.py measures, without a clock of the processor."""
    wait_for_active(server, 0)
    bounds = {server.process.pid: 6, server.pid_of(MODEL): 40}
    deadline = time.monotonic() + BOUND_SECONDS
    while True:
        before = {pid: num_wakeups(pid) for pid in bounds}
        time.sleep(1.0)
        found = {pid: num_wakeups(pid) - before[pid] for pid in bounds}
        if all(found[pid] <= bounds[pid] for pid in bounds):
            return
        assert time.monotonic() < deadline, (found, bounds)


@pytest.mark.slow
def test_two_servers_on_one_host(server: ServeProcess, serve: ServeFactory) -> None:
    """The second one starts, streams and ends beside streams of the first."""

    def count(running: ServeProcess) -> None:
        assert_counts(PROMPT, "".join(stream_text(running, PROMPT, SHORT)), SHORT)

    with ThreadPoolExecutor(2) as pool:
        second = serve()
        for each in [pool.submit(count, running) for running in (server, second)]:
            each.result(timeout=60)
        first = pool.submit(count, server)
        assert second.stop() == 0
        first.result(timeout=60)
    count(server)


def listening_on(port: int) -> set[str]:
    """The addresses of IPv6 on which somebody listens at ``port``, as the kernel writes them."""
    entries = map(str.split, Path("/proc/net/tcp6").read_text().splitlines())
    return {
        entry[1][:32] for entry in entries if entry[1][32:] == f":{port:04X}" and entry[3] == "0A"
    }


@pytest.mark.slow
def test_a_name_on_the_hub_is_fetched_and_served(serve: ServeFactory, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir() if path.is_file()}
    with serving(Hub({"some/counting": files})) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        running = serve(options=["--model=some/counting@main"], environment=environment)
    assert f"some/counting, commit {COMMIT}" in running.stderr
    assert "model      some/counting, " in running.stdout
    assert_counts(PROMPT, "".join(stream_text(running, PROMPT, 20)), 20)


@pytest.mark.slow
def test_an_ipv6_address_is_all_that_is_listened_on(serve: ServeFactory) -> None:
    """Triton's HTTP takes one that it cannot read for all there are."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    running = serve(options=["--host", "::1"])
    for port in (running.http_port, running.grpc_port, running.metrics_port):
        assert listening_on(port) == {"1000000".rjust(32, "0")}


def with_numpy_2(tmp_path: Path) -> dict[str, Any]:
    """What the check reads, the installed metadata, as an environment with numpy 2 has it."""
    metadata = tmp_path / "numpy-2.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n")
    return {"environment": {"PYTHONPATH": str(tmp_path)}}


def with_another_architecture(tmp_path: Path) -> dict[str, Any]:
    checkpoint = Path(shutil.copytree(DEMO_MODEL, tmp_path / "checkpoint"))
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    return {"model": checkpoint}


def with_truncated_weights(tmp_path: Path) -> dict[str, Any]:
    checkpoint = Path(shutil.copytree(DEMO_MODEL, tmp_path / "checkpoint"))
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return {"model": checkpoint}


@pytest.mark.fast(1)
@pytest.mark.case(102, 108)
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (with_another_architecture, ["MambaForCausalLM", "LlamaForCausalLM"]),
        (with_truncated_weights, ["model.safetensors"]),
        (with_numpy_2, ["numpy 2.1.0 is too new", "'numpy<2'"]),
        (lambda tmp_path: {"model": tmp_path / "nowhere"}, ["/nowhere", "does not exist"]),
        (
            lambda _: {"settings": {"max_batchsize": 4}},
            ["max_batchsize", "did you mean max_batch_size?"],
        ),
        (
            lambda _: {"settings": {"max_batch_size": 0}},
            ["max_batch_size is 0", "between 1 and 65536"],
        ),
    ],
)
def test_a_start_that_cannot_work_is_one_line(
    serve: ServeFactory,
    tmp_path: Path,
    arguments: Callable[[Path], dict[str, Any]],
    parts: list[str],
) -> None:
    assert_refused(serve(wait_for="", **arguments(tmp_path)), *parts)


@pytest.mark.slow
def test_port_in_use(serve: ServeFactory) -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        for option in ("--http-port", "--grpc-port", "--metrics-port"):
            running = serve(wait_for="", options=[f"{option}={port}"])
            assert_refused(running, f"{option} {port}", HOST)


# Stopping, asked for or not.


@pytest.mark.slow
@pytest.mark.case(100)
def test_sigterm_lets_streams_finish_and_an_idle_grpc_stream_does_not_block_it(
    serve: ServeFactory,
) -> None:
    running = serve(options=["--drain-seconds=120"])
    idle = grpc.InferenceServerClient(running.grpc_url)
    idle.start_stream(callback=lambda result, error: None)
    prompts = [f"{n} {n + 1} {n + 2}" for n in (1, 10, 100)]
    streams = [stream_text(running, prompt, SHORT) for prompt in prompts]
    with ThreadPoolExecutor() as pool:
        firsts = list(pool.map(next, streams))
        begin = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        texts = list(pool.map(remaining, firsts, streams))
    finished = time.monotonic()
    assert running.wait() == 0
    for prompt, text in zip(prompts, texts, strict=True):
        assert_counts(prompt, text, SHORT)
    assert finished - begin < BOUND_SECONDS
    assert time.monotonic() - finished < BOUND_SECONDS
    idle.close()


@pytest.mark.slow
@pytest.mark.case(100)
def test_a_launcher_whose_reader_is_gone_drains_alike(serve: ServeFactory) -> None:
    """As after Ctrl-C to ``inflight serve 2>&1 | tee log``: `tee` is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    running = serve(wait_for="", output=writer, environment={"PYTHONUNBUFFERED": ""})
    os.close(writer)
    wait_until_it_answers(running)
    stream = stream_text(running, PROMPT, SHORT)
    first = next(stream)
    running.process.send_signal(signal.SIGINT)
    assert_counts(PROMPT, remaining(first, stream), SHORT)
    assert running.wait() == 0


def wait_until_it_answers(running: ServeProcess) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while running.process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if ask_ready(running).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"not ready, exit code {running.process.poll()}")


@pytest.mark.slow
@pytest.mark.case(100, 126)
def test_second_ctrl_c_ends_streams_with_an_error(serve: ServeFactory) -> None:
    running = serve(options=["--drain-seconds=300"])
    stream = stream_text(running, PROMPT, LONG)
    pieces = [next(stream)]
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(pieces.extend, stream)
        running.process.send_signal(signal.SIGINT)
        with pytest.raises(RuntimeError, match="shutting down"):
            ask_until_refused(running)
        probe = ask_ready(running)
        assert (probe.status_code, "shutting down" in probe.text) == (400, True)
        running.process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="this answer is not complete"):
            rest.result()
    assert running.wait() == 0
    assert time.monotonic() - begin < BOUND_SECONDS
    assert_counts_in_part(PROMPT, "".join(pieces), LONG)


@pytest.mark.slow
@pytest.mark.case(100, 126)
def test_the_drain_limit_ends_a_stream_with_an_error(serve: ServeFactory) -> None:
    """Also one that is relayed: there Triton 24.10 loses errors behind a first response."""
    running = serve(options=["--drain-seconds=1", "--add=tensorrt_llm_bls"])
    streams = [
        stream_text(running, PROMPT, LONG, model=m) for m in ("ensemble", "tensorrt_llm_bls")
    ]
    pieces = [[next(stream)] for stream in streams]
    running.process.send_signal(signal.SIGTERM)
    for got, stream in zip(pieces, streams, strict=True):
        with pytest.raises(RuntimeError, match="this answer is not complete"):
            got.extend(stream)
        assert_counts_in_part(PROMPT, "".join(got), LONG)
    assert running.wait() == 0


@pytest.mark.slow
def test_sigterm_while_loading(serve: ServeFactory) -> None:
    running = serve(wait_for="starting tritonserver")
    begin = time.monotonic()
    assert running.stop() == 0
    assert time.monotonic() - begin < BOUND_SECONDS
    assert running.error_lines == []


@contextmanager
def unread(running: ServeProcess, body: dict[str, object]) -> Iterator[None]:
    """A stream over HTTP from which nothing is read."""
    content = json.dumps(body).encode()
    head = f"POST /v2/models/tensorrt_llm/generate_stream HTTP/1.1\r\nHost: {HOST}\r\n"
    with socket.create_connection((HOST, running.http_port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


@pytest.mark.slow
@pytest.mark.case(71, 119)
def test_unread_streams_end_and_so_does_a_launcher_whose_server_died(serve: ServeFactory) -> None:
    """The kernel and Triton take all that is sent: only the age of a connection ends it over gRPC,
    and a limit of the request's own over HTTP."""
    running = serve(options=["--max-restarts=0", "--max-connection-seconds=1.5"])
    is_over, is_cut = threading.Event(), threading.Event()

    def hold(result: object, error: object) -> None:
        is_over.wait()
        if error is not None:
            is_cut.set()

    client = grpc.InferenceServerClient(running.grpc_url)
    client.start_stream(callback=hold)
    tensors = tensors_of(text_input=PROMPT, max_tokens=LONG)
    client.async_stream_infer("tensorrt_llm", make_inputs(**tensors))
    with unread(running, {"text_input": PROMPT, "max_tokens": LONG, "stream": True}):
        wait_for_active(running, 2)
        wait_for_active(running, 0)
    is_over.set()
    assert is_cut.wait(20), "the limit of the request leaves the gRPC stream open"
    client.stop_stream(cancel_requests=True)
    client.close()
    running.kill_tritonserver()
    assert running.wait() == 1
    (line,) = running.error_lines
    assert line.startswith("error: tritonserver ended (killed by SIGKILL)")


def ask_often(running: ServeProcess, client: int) -> None:
    """Three answers each to several questions; calls that are refused at once come between them."""
    prompt = f"{100 * client + 100} {100 * client + 101}"
    settings = {"max_tokens": 40, "temperature": 0, "n": 3}
    body = {"text_input": prompt, "stream": True, "sampling_parameters": json.dumps(settings)}
    bad = body | {"sampling_parameters": json.dumps(settings | {"top_p": 7})}
    for _ in range(3):
        events = generate_stream(running, "vllm_model", **body)
        pieces = zip(*(event["text_output"] for event in events), strict=True)
        for text in map("".join, pieces):
            assert_counts(prompt, text, 40)
        for _ in range(10):
            (event,) = generate_stream(running, "vllm_model", **bad)
            assert "'top_p' is 7" in event["error"]


@pytest.mark.slow
@pytest.mark.case(118)
def test_streams_that_are_relayed_side_by_side_come_to_their_ends(serve: ServeFactory) -> None:
    """Triton's own way from model to model stood still within seconds: where a second response to a
    call came while another began."""
    running = serve(options=["--add=vllm_model"], settings={"stall_seconds": 5})
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask_often, running, client) for client in range(16)]
        errors = [error for each in asked if (error := each.exception())]
    assert not errors, running.stderr
    assert "starting again" not in running.stderr
    assert running.stop() == 0
