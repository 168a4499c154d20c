"""Real log lines of tritonserver, and the one line made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight_server.serve.log_file import MAX_BYTES, explain, explain_abort, keep_small

NOISE = (
    'E1121 03:10:06.023510 7499 server.cc:241] "CudaDriverHelper has not been initialized."\n'
    'I1121 03:10:06.026453 7499 model_lifecycle.cc:472] "loading: tensorrt_llm:1"\n'
    "Error: Failed to initialize NVML\n"
)
LOAD_FAILED = (
    "E1121 03:10:07.865621 7531 model_lifecycle.cc:642] \"failed to load 'tensorrt_llm' version 1: "
    "Internal: ModuleNotFoundError: No module named 'nosuch'\\n\\nAt:\\n  /models/tensorrt_llm/1/"
    'model.py(1): <module>\\n"\n'
)
DEPENDENT = (
    'E1121 03:10:07.865753 7531 model_repository_manager.cc:703] "Invalid argument: ensemble '
    "'ensemble' depends on 'tensorrt_llm' which has no loaded version.\"\n"
    "error: creating server: Internal - failed to load all models\n"
)
PORT = (
    'E1121 03:10:16.733352 7680 main.cc:245] "failed to start GRPC service: Unavailable - '
    "Socket '127.0.0.1:8001' already in use \"\n"
)
LOADER = "tritonserver: error while loading shared libraries: libb64.so.0d: cannot open\n"
ABORT = "double free or corruption (out)"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (NOISE + LOAD_FAILED + DEPENDENT + NOISE, "ModuleNotFoundError: No module named 'nosuch'"),
        (
            NOISE + PORT,
            "failed to start GRPC service: Unavailable - Socket '127.0.0.1:8001' already in use",
        ),
        (LOADER, LOADER.strip()),
        (NOISE + DEPENDENT, "error: creating server: Internal - failed to load all models"),
        (NOISE, ""),
        (PORT + "x" * 100 + "\n" + "idle\n" * 20_000, ""),  # only the end is read
    ],
)
def test_reason_is_one_clean_line(log: Path, text: str, reason: str) -> None:
    assert explain(log) == "", "no log"
    log.write_text(text)
    assert explain(log) == reason


@pytest.mark.parametrize(
    "said",
    [
        ["terminate called after throwing an instance of 'std::system_error'", "  what():  no"],
        ["tritonserver: a.cc:7: int f(): Assertion `x > 0' failed."],
        ["malloc(): unaligned tcache chunk detected"],
        [ABORT],
        ["Fatal glibc error: pthread_mutex_lock.c:94: assertion failed"],
        [],
    ],
)
def test_the_message_of_an_abort_is_told(log: Path, said: list[str]) -> None:
    log.write_text(NOISE + "\n".join(said) + "\n" + PORT + LOADER + DEPENDENT)
    assert explain_abort(log) == " ".join(line.strip() for line in said)


def test_a_message_just_before_the_log_was_cut_is_told(log: Path) -> None:
    """An abort may write a core for seconds: its last words are those of a living server."""
    log.write_text("x" * MAX_BYTES + f"\n{ABORT}\n")
    keep_small(log)
    assert log.stat().st_size == 0
    assert explain_abort(log) == ABORT
    log.write_text("idle\n" * 20_000)
    assert explain_abort(log) == "", "long ago"
