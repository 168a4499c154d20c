"""What the launcher prints, and that output which cannot be written changes nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gguf
import pytest
import typer

from inflight_backend.status import ModelStatus
from inflight_client.front_options import FrontOptions
from inflight_server.commands.serve import serve
from inflight_server.serve.console import LoadingDisplay, ready_block, say
from inflight_server.serve.settings import DEMO_MODEL, ServeSettings

READY = ModelStatus(
    "ready",
    1,
    {
        "model": "llama",
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 64,
        "tokens_per_block": 32,
        "policy": "guaranteed_no_evict",
        "max_batch_size": 256,
        "max_seq_len": 512,
        "max_num_tokens": 8192,
    },
)
LOADING = ModelStatus("loading", 1, {"loaded_bytes": 5, "total_bytes": 10})


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"http_port": 9000, "grpc_port": 9001, "metrics_port": 9002},
            (
                "http://127.0.0.1:9000",
                "127.0.0.1:9001",
                "http://127.0.0.1:9002/metrics",
                "llama, float32 on cpu",
                "64 blocks x 32 = 2048 tokens",
                "scheduler  guaranteed_no_evict, max batch 256, up to 512 tokens",
                "Hello",
                "--max-tokens 40 --url 127.0.0.1:9001\n",
            ),
        ),
        (
            {"parameters": {"scheduler_class": "mine:Shortest"}},
            ("scheduler  mine:Shortest, max batch 256",),
        ),
        (
            {"model": DEMO_MODEL},
            (
                '  inflight generate "1 2 3 4" --max-tokens 40\n',
                "OpenAI     http://127.0.0.1:9000/v1\n",
                """  curl http://127.0.0.1:9000/v1/chat/completions -d '{"model": "llama", """,
                'openai.OpenAI(base_url="http://127.0.0.1:9000/v1", api_key="none").chat.',
            ),
        ),
        (
            {"openai_port": 9009, "api_key": "x", "front": FrontOptions(served_name="m")},
            (
                '9009/v1/chat/completions -H "Authorization: Bearer $INFLIGHT_API_KEY" -d ',
                'api_key="KEY")',
                '"model": "m"',
            ),
        ),
        (
            {"host": "::1", "openai_port": 0},
            ("--max-tokens 40 --url [::1]:8001\n", "curl -N http://[::1]:8000/v2/models"),
        ),
        (
            {"is_decoupled": False},
            ("--max-tokens 40 --no-stream\n", "/ensemble/generate -d", '"stream": false'),
        ),
        (
            {"host": "0.0.0.0"},
            ("listening on 0.0.0.0: open to other machines", "http://127.0.0.1:8000"),
        ),
    ],
)
def test_block_names_endpoints_model_and_what_to_type(
    tmp_path: Path, settings: dict[str, Any], parts: tuple[str, ...]
) -> None:
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "chat_template.jinja").touch()
    block = ready_block(ServeSettings(**{"model": tmp_path, **settings}), READY)
    for part in parts:
        assert part in block
    assert ("open to other machines" in block) == (settings.get("host") == "0.0.0.0")


@pytest.mark.parametrize("has_template", [True, False])
def test_block_chats_with_a_gguf_file_that_has_a_template(
    tmp_path: Path, has_template: bool
) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    if has_template:
        writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    block = ready_block(ServeSettings(model=file), READY)
    assert ("/v1/chat/completions" in block) == has_template


def test_a_model_without_tokenizer_gets_token_ids(tmp_path: Path) -> None:
    block = ready_block(ServeSettings(model=tmp_path), READY)
    assert "no tokenizer: send token ids" in block
    assert "inflight generate" not in block
    (tmp_path / "tokenizer.model").touch()
    assert "inflight generate" in ready_block(ServeSettings(model=tmp_path), READY)


def test_off_a_terminal_loading_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with LoadingDisplay(ServeSettings(model=Path("llama"))) as display:
        display.update(LOADING)
        display.update(READY)
    assert capfd.readouterr() == ("", "starting tritonserver with llama ...\n")


@pytest.mark.parametrize("force_color", ["1", ""])  # makes rich believe in a terminal
def test_loading_goes_on_when_nobody_sees_it(
    force_color: str,
    nobody_hears: AbstractContextManager[None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rich would end the process."""
    monkeypatch.setenv("FORCE_COLOR", force_color)
    with nobody_hears, LoadingDisplay(ServeSettings(model=Path("llama"))) as display:
        display.update(LOADING)


def test_a_mistake_that_nobody_hears_of_ends_alike(
    nobody_hears: AbstractContextManager[None],
) -> None:
    with nobody_hears:
        with pytest.raises(typer.Exit) as ended:
            serve(model="nowhere")
        sys.stderr.flush()  # as Python does at its end: nothing may be left
    assert ended.value.exit_code == 1


SAYS_AND_ENDS = """
import sys
from inflight_server.serve.console import say
say("ready")
say("stopping", err=True)
sys.exit(int(sys.argv[1]))
"""
SAYS_AND_DRAWS_MUCH = """
import sys
from inflight_server.serve import console
console._PATIENCE_SECONDS = 0.01
drawing = console.ForgivingStream(sys.stderr)
for size in [900] * 100:
    console.say("x" * size)
    drawing.write("x" * size)
    drawing.flush()
sys.exit(3)
"""
SHOWS_OUTPUT_OF_ANOTHER = """
import subprocess, sys
from inflight_server.serve import console
console._PATIENCE_SECONDS = float(sys.argv[1])
command = [sys.executable, "-c", "print('x' * 3_000_000); print('done')"]
with console.shown() as output:
    ended = subprocess.run(command, stdout=output, stderr=output, timeout=15)
sys.exit(ended.returncode)
"""
OPENS_WITH_STDERR_CLOSED = """
import os, sys
from inflight_server.serve.console import occupy_standard_descriptors
os.close(0)
os.close(2)
occupy_standard_descriptors()
for number in range(3):
    print(os.readlink(f"/proc/self/fd/{number}"), flush=True)
print(os.open("/dev/zero", os.O_RDONLY) > 2)
"""
everything_unheard = pytest.mark.parametrize(
    "unheard",
    ["the reader is gone", "the reader does not read", "the disk is full"],
    indirect=True,
)


@pytest.mark.slow
@everything_unheard
def test_a_server_whose_log_nobody_reads_does_not_wait(unheard: int) -> None:
    """Not with each piece of it either."""
    command = [sys.executable, "-c", SHOWS_OUTPUT_OF_ANOTHER, "0.5"]
    assert subprocess.run(command, stdout=unheard, stderr=unheard, timeout=90).returncode == 0


def test_the_log_of_a_server_is_shown_to_its_end() -> None:
    command = [sys.executable, "-c", SHOWS_OUTPUT_OF_ANOTHER, "20"]
    ended = subprocess.run(command, capture_output=True, timeout=90)
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert ended.stderr == b"x" * 3_000_000 + b"\ndone\n"


def test_a_line_goes_where_it_should(capfd: pytest.CaptureFixture[str]) -> None:
    say("ready")
    say("stopping", err=True)
    assert capfd.readouterr() == ("ready\n", "stopping\n")


@pytest.mark.slow
@everything_unheard
@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_is_the_one_that_was_meant(unheard: int, code: int) -> None:
    """Python ends with 120 when there is something left that it cannot write."""
    command = [sys.executable, "-c", SAYS_AND_ENDS, str(code)]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # nothing is ever left without a buffer
    ended = subprocess.run(command, env=environment, stdout=unheard, stderr=unheard, timeout=60)
    assert ended.returncode == code


def test_a_terminal_that_stands_still_holds_nobody_up() -> None:
    """A connection to far away that hangs: such a terminal has room and yet does not take a line,
    other than a pipe without a reader."""
    far_end, terminal = pty.openpty()
    try:
        command = [sys.executable, "-c", SAYS_AND_DRAWS_MUCH]
        ended = subprocess.run(command, stdout=terminal, stderr=terminal, timeout=60)
        assert ended.returncode == 3
        assert os.read(far_end, 900), "what it took is there"
    finally:
        os.close(terminal)
        os.close(far_end)


def test_no_file_takes_the_place_of_a_stderr_that_is_closed() -> None:
    told = subprocess.run(
        [sys.executable, "-c", OPENS_WITH_STDERR_CLOSED], stdout=subprocess.PIPE, check=True
    ).stdout.split()
    assert told[0] == told[2] == b"/dev/null"
    assert told[1].startswith(b"pipe:")
    assert told[3] == b"True"
