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


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (NOISE + LOAD_FAILED + DEPENDENT + NOISE, "ModuleNotFoundError: No module named 'nosuch'"),
        (
            NOISE + PORT,
            "failed to start GRPC service: Unavailable - Socket '127.0.0.1:8001' already in use",
        ),
        (LOADER, LOADER.strip()),
        (NOISE + DEPENDENT, "error: creating server: Internal - failed to load all models"),
        (NOISE, ""),
        ("", ""),
    ],
)
def test_reason_is_one_clean_line(tmp_path: Path, log: str, reason: str) -> None:
    file = tmp_path / "server.log"
    file.write_text(log)
    assert explain(file) == reason


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(PORT + "x" * 100 + "\n" + "idle\n" * 20_000)
    assert explain(file) == ""


def test_no_log_explains_nothing(tmp_path: Path) -> None:
    assert explain(tmp_path / "server.log") == ""


@pytest.mark.parametrize(
    "said",
    [
        ["terminate called after throwing an instance of 'std::system_error'", "  what():  no"],
        ["tritonserver: a.cc:7: int f(): Assertion `x > 0' failed."],
        ["malloc(): unaligned tcache chunk detected"],
        ["double free or corruption (out)"],
        ["Fatal glibc error: pthread_mutex_lock.c:94: assertion failed"],
    ],
)
def test_what_an_abort_says_is_told(tmp_path: Path, said: list[str]) -> None:
    file = tmp_path / "server.log"
    file.write_text(NOISE + "\n".join(said) + "\n" + NOISE)
    assert explain_abort(file) == " ".join(line.strip() for line in said)


def test_a_log_without_an_abort(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(NOISE + PORT + LOADER + DEPENDENT)
    assert explain_abort(file) == ""


def test_what_was_said_just_before_the_log_was_cut_is_told(tmp_path: Path) -> None:
    """An abort may write a core for seconds: its last words are those of a living server."""
    file = tmp_path / "server.log"
    file.write_text("x" * MAX_BYTES + "\ndouble free or corruption (out)\n")
    keep_small(file)
    assert file.stat().st_size == 0
    assert explain_abort(file) == "double free or corruption (out)"
    file.write_text("idle\n" * 20_000)
    assert explain_abort(file) == "", "long ago"
