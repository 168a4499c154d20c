"""``inflight plan`` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_runner import run
from support.families import write_family

from inflight_backend.engine import EngineConfig
from inflight_backend.errors import ConfigurationError
from inflight_server.commands.plan import format_size, parse_size, plan
from inflight_server.serve.settings import DEMO_MODEL


def test_the_command_prints_a_table_and_json() -> None:
    done = run(plan, DEMO_MODEL, "--gpu-memory", "80GiB", "--max-batch-size", "64")
    assert done.exit_code == 0
    assert "KV per token" in done.stdout
    assert "guaranteed_no_evict" in done.stdout
    values = json.loads(run(plan, DEMO_MODEL, "--max-tokens", "640", "--json").stdout)
    assert values["num_blocks"] == 20
    assert values["pool_bytes"] == 20 * values["block_bytes"]
    assert values["concurrency"][0]["guaranteed"] == 2
    assert values["read_bandwidth"] > 1e8
    assert "a token alone" not in done.stdout, "nobody has measured that GPU"


@pytest.mark.parametrize("name", ["llama-linear", "llama", "mixtral"])
def test_what_a_token_alone_reads(tmp_path: Path, name: str) -> None:
    """The floor of a step: all, but an embedding that is no head, and of six experts two."""
    write_family(tmp_path, name)
    assert "a token alone    reads " in run(plan, tmp_path).stdout
    values = json.loads(run(plan, tmp_path, "--dtype", "float32", "--json").stdout)
    config = json.loads((tmp_path / "config.json").read_text())
    hidden, num_unread = config["hidden_size"], 0
    if name != "llama-linear":
        num_unread += config["vocab_size"] * hidden
    if name == "mixtral":
        layers, inner = config["num_hidden_layers"], config["intermediate_size"]
        num_unread += layers * 4 * 3 * hidden * inner
    assert values["weight_bytes"] - values["token_bytes"] == 4 * num_unread


def test_the_lines_of_the_table_and_the_reserve_add_up_to_the_memory() -> None:
    options = ["--gpu-memory", "1GiB", "--reserve", "900MiB", "--lora-rank", 16]
    text = run(plan, DEMO_MODEL, *options).stdout
    sizes = {line[:16].strip(): line[16:].partition("(")[0] for line in text.splitlines()}
    parts = ["weights", "adapters", "rope table", "kept for slots", "largest step"]
    parts.append("left on the GPU")
    assert " adapters of rank 16)" in text
    assert sum(parse_size(sizes[name]) for name in parts) == pytest.approx(124 * 2**20, abs=2**15)


def test_the_command_says_which_of_these_requests_no_server_takes() -> None:
    """The shapes of the demo model have up to 8,192 tokens: 6,554 and 1,638."""
    text = "takes several iterations.\nWhere contexts are not cut"
    assert text not in run(plan, DEMO_MODEL).stdout, "the default holds the longest request"
    assert text not in run(plan, DEMO_MODEL, "--max-num-tokens", "8191").stdout
    done = run(plan, DEMO_MODEL, "--max-num-tokens", "8190")
    assert f"max_num_tokens is 8,190: a longer prompt {text}" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-memory", "much"], "is no size: write 80GiB"),
        (["--max-seq-len", 100_000], "max_seq_len (100000) is above the checkpoint's max_positi"),
        (["--max-seq-len", 10**11], "max_seq_len (100000000000) is above the checkpoint's"),
        (["--gpu-memory", "9" * 400], "is above 1 EiB"),
        (["--gpu-memory", "80"], "--gpu-memory 80 is 80 bytes: write 80GiB"),
        (["--gpu-memory", "80 kb"], "--gpu-memory 80 kb is 80000 bytes: write 80GiB"),
        (["--reserve", "9" * 400], "is above 1 EiB"),
        (["--gpu-memory", "8g", "--reserve", "2"], "--reserve 2 is 2 bytes: write 2GiB"),
        (["--kv-cache-dtype", "int8"], "kv_cache_dtype int8 needs a scale for the keys and one"),
        (["--gpu-memory", "8g", "--quantization", "fp8"], "fp8 needs dtype bfloat16, not float32"),
    ],
)
def test_what_no_server_takes_is_refused(options: list[object], message: str) -> None:
    """In one line."""
    done = run(plan, DEMO_MODEL, *options)
    assert (done.exit_code, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 200


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    done = run(plan, tmp_path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "no config.json" in done.stderr


@pytest.mark.parametrize("option", ["--max-tokens", "--max-num-tokens", "--max-seq-len"])
def test_numbers_have_the_bounds_of_the_server(option: str) -> None:
    assert run(plan, DEMO_MODEL, option, 2**40 + 1).exit_code == 2
    with pytest.raises(ConfigurationError, match=f"between 1 and {2**40}"):
        EngineConfig(max_num_tokens=2**40 + 1)


def test_sizes() -> None:
    assert parse_size("80GiB") == 80 * 2**30
    assert parse_size("1.5 g") == 1_500_000_000
    assert parse_size("4096") == 4096
    assert format_size(80 * 2**30) == "80.00 GiB"
    assert format_size(1536) == "1.50 KiB"
    assert format_size(12) == "12 bytes"
