"""Adapters on the real server: tensorrtllm_backend's client flow, and by name in every API."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
from e2e.conftest import ServeFactory
from support.adapters import LLAMA_LINEARS, greedy, to_wire, write_adapter
from support.calls import (
    WAIT_SECONDS,
    PeerClient,
    make_inputs,
    stats_of,
    stream_infer,
    tensors_of,
)
from support.front_process import FrontProcess
from support.plain_triton import repository_server
from support.server_process import ServeProcess
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from tritonclient.utils import InferenceServerException

from inflight_protocol import LORA_REQUESTS
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = pytest.mark.e2e

PROMPT, COUNT = "1 2 3", 10
TOKENIZER: Any = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
IDS: list[int] = TOKENIZER.encode(PROMPT).ids
CONFIGS: dict[str, dict[str, Any]] = {
    "first": {"r": 8, "lora_alpha": 16, "target_modules": LLAMA_LINEARS},
    "second": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "up_proj"]},
}


@dataclass(frozen=True)
class Adapters:
    """``answers``: tokens by the name of the adapter, "" for none; folders lie below ``root``."""

    server: ServeProcess
    root: Path
    answers: dict[str, list[int]]

    def text(self, name: str) -> str:
        return str(TOKENIZER.decode(self.answers[name]))


@pytest.fixture(scope="module")
def adapters(shared: ServeFactory, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """The first one is served by name, the second may be loaded."""
    root = tmp_path_factory.mktemp("adapters")
    answers = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        [answers[name]] = write_adapter(DEMO_MODEL, root / name, seed, [IDS], COUNT, **config)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    [answers[""]] = greedy(model, [IDS], COUNT)
    assert len(set(map(tuple, answers.values()))) == 3
    server = shared(
        settings={"lora_root": root},
        options=[f"--lora=mine={root / 'first'}", "--add=vllm_model"],
    )
    return Adapters(server, root, answers)


@pytest.mark.contract("tensorrt_llm input", "lora_task_id lora_weights lora_config")
@pytest.mark.contract("ensemble input", "lora_task_id lora_weights lora_config")
@pytest.mark.contract("tensorrt_llm of the LLM API input", "lora_name lora_path")
def test_weights_once_then_by_id(adapters: Adapters) -> None:
    """The error that clients match tells them to send the weights; two adapters and none in one
    batch."""
    values: dict[str, Any] = {"input_ids": IDS, "input_lengths": len(IDS)}
    values |= {"request_output_len": COUNT, "end_id": -1, "streaming": True}
    with PeerClient(adapters.server.grpc_url) as client:
        with pytest.raises(InferenceServerException) as refusal:
            client.ask(**values, lora_task_id=7)
        pattern = r"LoRA task (\d+) not found in cache. Please send LoRA weights with request"
        found = re.search(pattern, refusal.value.message())
        assert found is not None
        assert found[1] == "7"
    with (
        PeerClient(adapters.server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="name a loaded adapter"),
    ):
        client.ask(**values, lora_path="second")
    with PeerClient(adapters.server.grpc_url) as client:
        for task_id, name in ((7, "first"), (0, "second")):
            weights, config = to_wire(DEMO_MODEL, adapters.root / name, np.float16)
            tensors: dict[str, Any] = {"lora_weights": weights, "lora_config": config}
            answer = client.ask(**values, **tensors, lora_task_id=task_id)
            assert answer == adapters.answers[name]
        asked: list[tuple[str, dict[str, Any]]] = [
            ("first", {"lora_task_id": 7}),
            ("second", {"lora_task_id": 0}),
            ("", {}),
            ("first", {"lora_name": "mine"}),
        ]
        for name, more in asked * 3:
            assert client.ask(**values, **more) == adapters.answers[name]
        assert stats_of(adapters.server)["LoRA adapters on the host"] == 3


@pytest.mark.slow
def test_gateways_read_which_adapters_run(adapters: Adapters, tmp_path: Path) -> None:
    """On the page of OpenAI's side, one series at a time."""
    options = [f"--metrics-url={adapters.server.metrics_url}"]
    with FrontProcess(tmp_path, adapters.server.grpc_url, options) as front:
        url = f"{front.url}/metrics"

        def wait_for(labels: str) -> None:
            deadline = time.monotonic() + WAIT_SECONDS
            while True:
                page = httpx.get(url, trust_env=False).text
                lines = [
                    line for line in page.splitlines() if line.startswith(f"{LORA_REQUESTS}{{")
                ]
                assert len(lines) == 1
                if labels in lines[0]:
                    break
                assert time.monotonic() < deadline, lines
                time.sleep(0.05)
            assert "nv_trt_llm_request_metrics{" in page
            assert abs(float(lines[0].rpartition(" ")[2]) - time.time()) < WAIT_SECONDS

        values: dict[str, Any] = {"input_ids": IDS, "input_lengths": len(IDS), "end_id": -1}
        with PeerClient(adapters.server.grpc_url) as client:
            client.send("1", **values, request_output_len=2000, streaming=True, lora_name="mine")
            wait_for('running_lora_adapters="mine",waiting_lora_adapters=""')
            client.send("1", stop=True)
        wait_for('running_lora_adapters="",waiting_lora_adapters=""')


@pytest.mark.slow
def test_weights_in_the_type_of_the_model(adapters: Adapters) -> None:
    """A deployment may declare ``lora_weights`` so, and numpy does not know bfloat16."""
    weights, config = to_wire(DEMO_MODEL, adapters.root / "first", np.float32)
    expected = adapters.answers["first"]
    options = ["--model-control-mode=explicit"]
    with repository_server(server_options=options) as server:
        path = server.scratch / "models" / "tensorrt_llm" / "config.pbtxt"
        pattern = r'(name: "lora_weights"\s+data_type: )TYPE_FP16'
        text, count = re.subn(pattern, r"\1TYPE_BF16", path.read_text())
        assert count == 1
        path.write_text(text)
        server.control("load")
        values: dict[str, Any] = {"input_ids": IDS, "input_lengths": len(IDS), "end_id": -1}
        inputs = make_inputs(
            **tensors_of(**values, request_output_len=COUNT, streaming=False, lora_task_id=3),
            lora_config=config,
        )
        inputs.append(grpcclient.InferInput("lora_weights", weights.shape, "BF16"))
        inputs[-1].set_data_from_numpy(weights.astype(ml_dtypes.bfloat16))
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            client.start_stream(callback=lambda result, error: results.put(error or result))
            client.async_stream_infer("tensorrt_llm", inputs)
            result = results.get(timeout=WAIT_SECONDS)
            assert not isinstance(result, Exception), result
            tokens = result.as_numpy("output_ids").reshape(-1).tolist()
        # Rounded to 8 bits, the adapter still says what it said for the first tokens.
        assert tokens[len(IDS) :][:3] == expected[:3]


@pytest.mark.slow
def test_names_in_openais_api(adapters: Adapters, tmp_path: Path) -> None:
    with (
        FrontProcess(tmp_path, adapters.server.grpc_url, ["--allow-runtime-lora"]) as front,
        FrontProcess(tmp_path, adapters.server.grpc_url) as other,
    ):
        base = f"{front.url}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            ask: dict[str, Any] = {
                "prompt": PROMPT, "temperature": 0, "max_tokens": COUNT,
                "extra_body": {"ignore_eos": True},
            }  # fmt: skip
            model, mine = client.models.list().data
            assert (mine.id, mine.parent) == ("mine", model.id)  # type: ignore[attr-defined]
            done = client.completions.create(model="mine", **ask)
            assert (done.model, done.choices[0].text) == ("mine", adapters.text("first"))
            assert client.completions.create(model=model.id, **ask).choices[0].text == (
                adapters.text("")
            )
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="other", **ask)
            body = {"lora_name": "other", "lora_path": "second"}
            loaded = httpx.post(f"{base}/load_lora_adapter", json=body)
            assert (loaded.status_code, loaded.text) == (
                200,
                "Success: LoRA adapter 'other' added successfully",
            )
            for url in (base, f"{other.url}/v1"):  # a front hears of what another has loaded
                with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as one:
                    text = one.completions.create(model="other", **ask).choices[0].text
                    assert text == adapters.text("second")
            wrong = httpx.post(f"{base}/load_lora_adapter", json=body | {"lora_path": "../.."})
            assert wrong.status_code == 400
            assert "lora_root" in wrong.json()["error"]["message"]
            gone = httpx.post(f"{base}/unload_lora_adapter", json={"lora_name": "other"})
            assert gone.text == "Success: LoRA adapter 'other' removed successfully"
            again = httpx.post(f"{base}/unload_lora_adapter", json={"lora_name": "other"})
            assert again.status_code == 404
            assert again.json()["error"]["message"] == "The lora adapter 'other' cannot be found."
            assert [each.id for each in client.models.list().data] == [model.id, "mine"]
        assert httpx.post(f"{other.url}/v1/load_lora_adapter", json=body).status_code == 404


def test_names_in_vllms_api_and_on_the_command_line(adapters: Adapters) -> None:
    def ask(name: str) -> Any:
        settings = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "lora_name": name}
        tensors = {
            "text_input": np.array([PROMPT.encode()], dtype=np.object_),
            "sampling_parameters": np.array([json.dumps(settings).encode()], dtype=np.object_),
            "exclude_input_in_output": np.array([True]),
        }
        [answer] = stream_infer(adapters.server, "vllm_model", tensors)
        return answer

    assert ask("mine")["text_output"].item().decode() == adapters.text("first")
    error = ask("yours")["error"]
    assert "LoRA yours is not supported, we currently support ['mine']" in error
    [view] = stream_infer(adapters.server, "tensorrt_llm", tensors_of(live=True))
    about = json.loads(view["live"].item())["about"]  # of the last requests
    assert "mine" in {each.get("lora") for each in about.values()}
    command = [str(Path(sys.executable).parent / "inflight"), "generate", PROMPT, "--lora=mine"]
    command += [f"--max-tokens={COUNT}", f"--url={adapters.server.grpc_url}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    tokens = adapters.answers["first"]  # which go on behind the end that the model has learnt
    end = tokens.index(1) if 1 in tokens else COUNT
    assert done.stdout == TOKENIZER.decode(tokens[:end]) + "\n"
    assert done.stdout.strip() != adapters.text("").strip()


@pytest.mark.slow
def test_an_adapter_that_cannot_be_served_fails_the_start(
    serve: ServeFactory, tmp_path: Path
) -> None:
    write_adapter(DEMO_MODEL, tmp_path / "it", 0, r=4, target_modules=["q_proj"])
    config = tmp_path / "it" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bias": "all"}))
    ended = serve(options=[f"--lora=it={tmp_path / 'it'}"], wait_for="")
    assert ended.wait() == 1
    assert "bias is 'all', which is not supported" in ended.stderr
    shutil.rmtree(tmp_path / "it")
