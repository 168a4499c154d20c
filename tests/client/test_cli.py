"""The command line against a local server."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from client.conftest import Local
from typer.testing import CliRunner

from inflight_client.cli import add_plugins, app
from inflight_client.terminal.chat import Chat, Conversation

COMMAND = [sys.executable, "-m", "inflight_client.cli"]
WAIT_SECONDS = 60.0


def server_options(local: Local) -> list[str]:
    return ["--url", local.url, *(["--http"] if local.protocol == "http" else [])]


def run(*arguments: str) -> Any:
    """The command in this process, which is much quicker than a process of its own."""
    return CliRunner().invoke(app, arguments)


def test_chat_keeps_thoughts_out_of_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are shown; a message that was refused is not kept, and tells by the exit code."""
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        if len(bodies) == 2:
            return httpx.Response(400, json={"error": {"message": "no"}})
        deltas = [
            {"reasoning_content": "Hm"},
            {"reasoning": "."},
            {"content": "A"},
            {"content": "B"},
        ]
        events = [json.dumps({"choices": [{"delta": each}]}) for each in deltas]
        return httpx.Response(
            200, text="".join(f"data: {each}\n\n" for each in [*events, "[DONE]"])
        )

    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    shown: list[str] = []
    told: list[str] = []
    client = httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer))
    assert not Chat(client, Conversation("m"), shown.append, told.append).run()
    assert "".join(shown) == "Hm.\n\nAB\n" * 2
    assert "error: no" in told
    said = [(each["role"], each["content"]) for each in bodies[-1]["messages"]]
    assert said == [("user", "one"), ("assistant", "AB"), ("user", "three")]


def test_generate_prints_the_text(local: Local) -> None:
    done = run("generate", "count", "--max-tokens", "4", *server_options(local))

    assert (done.exit_code, done.stdout, done.stderr) == (0, " 1 2 3 4\n", "")
    assert local.triton.arrivals[0].values["stream"] is True
    done = run("generate", "count", "--max-tokens=4", "--json", *server_options(local))
    told = json.loads(done.stdout)
    assert (told["text"], told["finish"]) == (" 1 2 3 4", "length")


def test_a_guide_is_a_kind_or_a_kind_with_a_file(local: Local, tmp_path: Path) -> None:
    run("generate", "count", "--max-tokens=2", "--guide=json", *server_options(local))
    (arrival,) = local.triton.arrivals
    assert arrival.values["guided_decoding_guide_type"] == "json"
    assert "guided_decoding_guide" not in arrival.values
    file = tmp_path / "none"
    done = run("generate", "count", f"--guide=regex={file}", *server_options(local))
    assert done.exit_code == 1
    assert f"--guide: {file} cannot be read" in done.stderr


def test_generate_passes_its_options_on(local: Local, tmp_path: Path) -> None:
    options = [
        *("--temperature=0.5", "--top-k=3", "--top-p=0.25", "--seed=7", "--min-p=0.125"),
        *("--repetition-penalty=1.5", "--presence-penalty=0.5", "--frequency-penalty=-0.5"),
        *("--stop-word=x", "--stop-word=y z", "--bad-word=q", "--bad-word=r"),
        *("--stop-token-id=11", "--stop-token-id=12", "--priority=0.75", "--cache-salt=me"),
        *("--max-queue-time-ms=9", "--allotted-time-ms=10"),
    ]
    pattern = tmp_path / "pattern"
    pattern.write_text("[é-ü]+ \n", encoding="utf-8")
    options += ["--guide", f"regex={pattern}"]
    done = run(
        "generate", "count", "--max-tokens=2", "--no-stream", "--request-id=mine", *options,
        *server_options(local),
    )  # fmt: skip

    assert done.stdout == " 1 2\n"
    (arrival,) = local.triton.arrivals
    assert arrival.request_id == "mine"
    assert arrival.values == {
        "text_input": "count",
        "max_tokens": 2,
        "stream": False,
        "return_finish_reason": True,
        "stop_words": ["x", "y z"],
        "stop_token_ids": [11, 12],
        "bad_words": ["q", "r"],
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "exclude_input_in_output": True,
        "temperature": 0.5,
        "runtime_top_k": 3,
        "runtime_top_p": 0.25,
        "random_seed": 7,
        "priority": 0.75,
        "cache_salt": "me",
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "[é-ü]+ ",
        "max_queue_time_ms": 9,
        "allotted_time_ms": 10,
    }


def test_text_comes_as_it_is_made(local_grpc: Local) -> None:
    command = [*COMMAND, "generate", "count", "--max-tokens=10000", "--url", local_grpc.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 2) == b" 1"
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(WAIT_SECONDS) == 130


@pytest.mark.fast(1)
@pytest.mark.parametrize("prompt", ["count", "silent"])
def test_ctrl_c_cancels_the_request(prompt: str, local: Local) -> None:
    command = [*COMMAND, "generate", prompt, "--max-tokens=10000", *server_options(local)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + WAIT_SECONDS
        while not local.triton.arrivals and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)

    assert process.returncode == 130
    assert stderr.decode().strip() == ""
    arrival = local.triton.arrivals[0]
    assert arrival.request_id in local.triton.stops or arrival.is_left.wait(WAIT_SECONDS)


def test_reader_that_leaves_early_is_no_traceback(local_grpc: Local) -> None:
    command = " ".join([*COMMAND, "generate", "count", "--max-tokens=300", "--url", local_grpc.url])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 4"], capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.stderr) == (" 1 2", "")


def test_control_characters_do_not_reach_a_terminal() -> None:
    script = "from inflight_client import cli; cli._write('a\\x1b[31mb\\nc')"
    primary, secondary = pty.openpty()
    subprocess.run([sys.executable, "-c", script], stdout=secondary, check=True)
    os.close(secondary)
    shown = os.read(primary, 100)
    os.close(primary)

    assert shown == b"a[31mb\r\nc"


def test_stop(local: Local) -> None:
    done = run("stop", "mine", *server_options(local))

    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    assert local.triton.stops == {"mine"}


def test_why(local: Local) -> None:
    done = run("why", "mine", *server_options(local))
    expected = "waiting (place 2 of 7): waiting for KV blocks: needs 5, free 3\n"
    assert (done.exit_code, done.stdout) == (0, expected)
    done = run("why", "mine", "--json", *server_options(local))
    assert json.loads(done.stdout)["place"] == 2
    done = run("why", "second", *server_options(local))
    assert done.stdout.startswith("waiting (sequence 2 of 4, place 2 of 7): waiting for KV")


def test_why_of_a_request_that_is_not_there_fails(local: Local) -> None:
    done = run("why", "gone", *server_options(local))
    expected = (1, "", "not in flight: no such request\n")
    assert (done.exit_code, done.stdout, done.stderr) == expected
    done = run("why", "gone", "--json", *server_options(local))
    assert (done.exit_code, done.stderr) == (1, "")
    assert json.loads(done.stdout)["state"] == "not in flight"


def test_record(local: Local, tmp_path: Path) -> None:
    done = run("record", "-o", str(tmp_path / "r.jsonl"), *server_options(local))
    assert (done.exit_code, done.stdout) == (0, "")
    assert (tmp_path / "r.jsonl").read_text() == '{"inflight_recording": 1}\n'
    assert run("record", "-o", "-", *server_options(local)).stdout.startswith("{")
    done = run("record", "-o", str(tmp_path / "no" / "r"), *server_options(local))
    assert done.exit_code == 1
    assert "cannot be written: No such file" in done.stderr


def test_stats_once(local: Local) -> None:
    done = run("stats", *server_options(local))

    assert done.exit_code == 0
    assert "iteration" in done.stdout
    assert run("stats", "--json", *server_options(local)).stdout == '{"Iteration Counter": 1}\n'


def test_stats_followed_into_a_pipe_are_json_lines(local: Local) -> None:
    command = [*COMMAND, "stats", "--follow", *server_options(local)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.stdout.read()

    assert [line["Iteration Counter"] for line in lines] == [1, 2, 3]
    assert process.returncode == 130
    assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)


def test_stats_followed_on_a_terminal_are_a_table_in_place(local_grpc: Local) -> None:
    primary, secondary = pty.openpty()
    command = [*COMMAND, "stats", "--follow", "--url", local_grpc.url]
    shown = b""
    with subprocess.Popen(
        command, stdout=secondary, stderr=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(secondary)
        # The cursor goes up to draw the table of a later iteration over that of an earlier one.
        while b"\x1b[1A" not in shown or b"3" not in shown.rpartition(b"\x1b[1A")[2]:
            shown += os.read(primary, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 130
    os.close(primary)


def test_health(local: Local, free_port: int) -> None:
    ready = run("health", *server_options(local))
    assert (ready.exit_code, ready.stdout) == (0, "ready\n")

    local.triton.refusal = "the server is shutting down"
    refusing = run("health", *server_options(local))
    assert (refusing.exit_code, refusing.stdout.partition(":")[0]) == (1, "not ready")

    gone = run("health", "--url", f"127.0.0.1:{free_port}")
    assert (gone.exit_code, gone.stdout) == (1, "")
    assert gone.stderr.startswith(f"error: no server answers at grpc://127.0.0.1:{free_port} (")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "refuse"], "error: 'text_input' is refused: say something else\n"),
        (["generate", "break"], "after 2 responses"),
        (["generate", "count", "--max-tokens=4294967296"], "error: max_tokens = 4294967296"),
        (["stop", ""], "error: request_id is empty"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, local: Local) -> None:
    done = run(*arguments, *server_options(local))

    assert done.exit_code == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_url_of_http_chooses_http(local_http: Local) -> None:
    assert run("health", "--url", f"http://{local_http.url}").exit_code == 0


def test_version() -> None:
    assert run("--version").output == f"inflight {version('inflight')}\n"


def plugin_app(value: str) -> typer.Typer:
    other = typer.Typer(callback=lambda: None)
    add_plugins(other, [EntryPoint("serve", value, "inflight.commands")])
    return other


def test_command_of_another_package_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = 'def serve(port: int = 1) -> None:\n    """Serve things."""\n    print("on", port)\n'
    (tmp_path / "server_side.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    other = plugin_app("server_side:serve")

    assert "Serve things." in CliRunner().invoke(other, ["--help"]).output
    assert CliRunner().invoke(other, ["serve", "--port", "7"]).output == "on 7\n"


def test_command_whose_package_is_missing_says_what_to_install() -> None:
    other = plugin_app("no_such_package.command:serve")

    assert "serve" in CliRunner().invoke(other, ["--help"]).output
    result = CliRunner().invoke(other, ["serve", "--model", "folder", "--help"])
    assert result.exit_code == 1
    assert "needs the package no_such_package." in result.output
    assert "in a clone of inflight: pip install '.[server]'" in result.output
