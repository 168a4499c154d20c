"""What clients see, byte for byte: a change of the code that is meant to change nothing shows here.

Each input of `tensorrt_llm` and of `ensemble` is sent with some values, right and wrong, and so are
bodies of OpenAI's API; the command line shows its help. After a change that is meant,
``WRITE_GOLDEN=1 pytest tests/golden`` writes the new answers: read the difference.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.front_process import FrontProcess
from support.server_process import ServeProcess, start_serve, temporary_folder
from typer.testing import CliRunner

from inflight_client.cli import PLUGIN_GROUP, add_plugins, app

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).parent
VALUES: dict[str, tuple[Any, ...]] = {
    "TYPE_INT32": (-1, 0, 2, 2**31 - 1),
    "TYPE_INT64": (0, 3),
    "TYPE_UINT64": (0, 42),
    "TYPE_FP32": (-0.5, 0.0, 0.5, 1e9),
    "TYPE_BOOL": (True, False),
    "TYPE_STRING": ("", "5", '{"type": "integer"}'),
}
"""By type of the tensor. (Triton reads no FP16 and no UINT8 from JSON.)"""
BASE: dict[str, dict[str, Any]] = {
    "tensorrt_llm": {"input_ids": [40, 42, 44, 46], "request_output_len": 6},
    "ensemble": {"text_input": "1 2 3", "max_tokens": 6},
}
NOT_SENT = {
    *("stats", "describe", "ready", "why", "recording", "live", "shared", "stop"),  # no generation
    *("stream", "streaming"),  # more than one response
    *("allotted_time_ms", "max_queue_time_ms"),  # how fast is this machine?
}
TOGETHER: tuple[dict[str, Any], ...] = (
    {"temperature": 30.0, "top_k": 40, "random_seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "random_seed": 7, "return_log_probs": True},
    {"beam_width": 2, "length_penalty": 2.0, "return_log_probs": True},
    {"stop_words": ["6"], "end_id": 7},
    {"bad_words": ["4"], "min_length": 3},
    {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{3} [a-c]"},
    {"guided_decoding_guide_type": "json", "guided_decoding_guide": "{"},
    {"embedding_bias_words": ["9"], "embedding_bias_weights": [50.0]},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    {"exclude_input_in_output": True, "return_finish_reason": True},
)
OPENAI: tuple[tuple[str, dict[str, Any]], ...] = (
    ("completions", {"prompt": "1 2 3"}),
    ("completions", {"prompt": ["1 2", "7 8"], "n": 2, "temperature": 0}),
    ("completions", {"prompt": [40, 41], "logprobs": 2, "echo": True}),
    ("completions", {"prompt": "1", "best_of": 3}),
    ("completions", {"prompt": "1", "max_tokens": 0}),
    ("completions", {"prompt": "1", "top_k": -3}),
    ("completions", {"prompt": "1", "stop": ["4"], "include_stop_str_in_output": True}),
    ("completions", {"prompt": "1", "response_format": {"type": "json_object"}}),
    ("completions", {"prompt": "1", "use_beam_search": True}),
    ("completions", {"prompt": "1", "frobnicate": 1, "lora_path": None}),
    ("completions", {}),
    ("completions", {"prompt": "1", "model": "other"}),
    ("chat/completions", {"messages": [{"role": "user", "content": "1 2 3"}], "max_tokens": 6}),
    ("chat/completions", {"messages": [{"role": "root", "content": "1"}]}),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("chat/completions", {"messages": []}),
    ("chat/completions", {"messages": [{"role": "user", "content": "1"}], "tools": [{}]}),
    ("chat/completions", {"messages": [{"role": "user", "content": "1"}], "guided_regex": "[5-7]"}),
    ("chat/completions", {"messages": [{"role": "user", "content": "1"}], "guided_json": 5}),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "1"}],
            "max_tokens": 3,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    """One of its own: what others have asked would change the statistics and the block reuse."""
    scratch = temporary_folder("golden")
    running = start_serve(
        scratch, settings={"max_beam_width": 2, "max_batch_size": 8, "max_seq_len": 256}
    )
    try:
        running.wait_until_printed("inflight is ready")
        yield running
    finally:
        running.stop()
    shutil.rmtree(scratch)


def check(name: str, found: dict[str, Any]) -> None:
    """Compare with the file, or write it."""
    path = FOLDER / f"{name}.json"
    if os.environ.get("WRITE_GOLDEN"):
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    expected = json.loads(path.read_text())
    assert found.keys() == expected.keys()
    different = {
        key: (value, expected[key])
        for key, value in json.loads(json.dumps(found)).items()
        if not is_same(value, expected[key])
    }
    assert not different


def is_same(value: Any, expected: Any) -> bool:
    """Equal, but for the last digit of a number that is rounded."""
    if isinstance(value, float) and isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=2e-4, abs_tol=2e-4)
    if isinstance(value, dict) and isinstance(expected, dict):
        keys = value.keys()
        return keys == expected.keys() and all(is_same(value[key], expected[key]) for key in keys)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(is_same, value, expected))
    return bool(value == expected)


def ask(server: ServeProcess, model: str, values: dict[str, Any]) -> Any:
    """The answer without what is 0 or empty, and without times."""
    url = f"{server.http_url}/v2/models/{model}/generate"
    answer = httpx.post(url, json=BASE[model] | values, timeout=60, trust_env=False).json()
    return {
        name: rounded(value)
        for name, value in answer.items()
        if is_set(value) and not name.endswith("_ns") and not name.startswith("model_")
    }


def is_set(value: Any) -> bool:
    """False for 0, what is empty, and lists of nothing else."""
    return any(map(is_set, value)) if isinstance(value, list) else bool(value)


def rounded(value: Any) -> Any:
    """To four decimals, five significant digits: sums may be taken in another order."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{round(value, 4):.5g}") if isinstance(value, float) else value


@pytest.mark.slow
@pytest.mark.parametrize("model", BASE)
def test_each_input_alone(server: ServeProcess, model: str) -> None:
    config = httpx.get(f"{server.http_url}/v2/models/{model}/config", trust_env=False).json()
    found = {}
    for tensor in config["input"]:
        if tensor["name"] in NOT_SENT or tensor["data_type"] not in VALUES:
            continue
        is_scalar = tensor["dims"] in ([1], ["1"])
        for value in VALUES[tensor["data_type"]]:
            values = {tensor["name"]: value if is_scalar else [value, value]}
            found[json.dumps(values)] = ask(server, model, values)
    check(model, found)


def test_inputs_together_and_the_statistics_behind_them(server: ServeProcess) -> None:
    found = {json.dumps(values): ask(server, "ensemble", values) for values in TOGETHER}
    url = f"{server.http_url}/v2/models/tensorrt_llm/generate"
    answer = httpx.post(url, json={"stats": True, "streaming": False}, trust_env=False).json()
    stats = json.loads(answer["stats"])
    for name in list(stats):
        if "Memory" in name or name in ("Timestamp", "Iteration Counter", "Max LoRA pages"):
            del stats[name]
    check("together", found | {"statistics": stats})


def test_openai(server: ServeProcess, tmp_path: Path) -> None:
    found = {}
    with FrontProcess(tmp_path, server.grpc_url, ["--served-model-name=golden"]) as front:
        for path, body in OPENAI:
            named = {"model": "golden", "temperature": 0, **body}
            answer = httpx.post(f"{front.url}/v1/{path}", json=named, timeout=60, trust_env=False)
            content = rounded(answer.json())
            content.pop("id", None)
            content.pop("created", None)
            found[f"{path} {json.dumps(body)}"] = [answer.status_code, content]
    check("openai", found)


def test_help() -> None:
    whole = copy.copy(app)
    whole.registered_commands = list(app.registered_commands)
    add_plugins(whole, tuple(entry_points(group=PLUGIN_GROUP)))
    runner = CliRunner(env={"COLUMNS": "100"})
    pages = {"": runner.invoke(whole, ["--help"]).output}
    for name in re.findall(r"^  ([a-z-]+)  ", pages[""].partition("Commands:")[2], re.MULTILINE):
        pages[name] = runner.invoke(whole, [name, "--help"]).output
    assert len(pages) > 10
    check("help", {name: page.splitlines() for name, page in pages.items()})
