"""The block that a user sees when the server is ready."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from inflight_backend.status import ModelStatus
from inflight_server.serve.console import LoadingDisplay, ready_block
from inflight_server.serve.settings import ServeSettings

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


def test_block_names_endpoints_model_cache_and_policy() -> None:
    block = ready_block(ServeSettings(http_port=9000, grpc_port=9001, metrics_port=9002), READY)
    for part in (
        "http://127.0.0.1:9000",
        "127.0.0.1:9001",
        "http://127.0.0.1:9002/metrics",
        "llama, float32 on cpu",
        "64 blocks x 32 = 2048 tokens",
        "guaranteed_no_evict, max batch 256, up to 512 tokens",
    ):
        assert part in block


def test_a_scheduler_of_ones_own_is_named() -> None:
    settings = ServeSettings(parameters={"scheduler_class": "mine:ShortestFirst"})
    block = ready_block(settings, READY)
    assert "scheduler  mine:ShortestFirst, max batch 256" in block
    assert "guaranteed_no_evict" not in block


def test_who_has_an_old_tokenizer_alone_is_told_how_to_convert_it(tmp_path: Path) -> None:
    settings = ServeSettings(model=tmp_path)
    assert "tokenizer.model" not in ready_block(settings, READY)
    (tmp_path / "tokenizer.model").touch()
    assert "or convert its tokenizer.model: AutoTokenizer" in ready_block(settings, READY)


def test_demo_is_told_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    settings = ServeSettings(parameters={"tokenizer_dir": str(tmp_path)})
    block = ready_block(settings, READY)
    assert '  inflight generate "1 2 3 4" --max-tokens 40\n' in block
    assert "curl -N http://127.0.0.1:8000/v2/models/ensemble/generate_stream" in block
    assert "other machines" not in block


def test_other_port_is_part_of_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    block = ready_block(ServeSettings(model=tmp_path, grpc_port=9001), READY)
    assert '  inflight generate "Hello" --max-tokens 40 --url 127.0.0.1:9001\n' in block
    block = ready_block(ServeSettings(model=tmp_path, host="::1"), READY)
    assert '  inflight generate "Hello" --max-tokens 40 --url [::1]:8001\n' in block
    assert "curl -N http://[::1]:8000/v2/models" in block


def test_what_to_type_without_streams(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    block = ready_block(ServeSettings(model=tmp_path, is_decoupled=False), READY)
    assert '  inflight generate "Hello" --max-tokens 40 --no-stream\n' in block
    assert "/ensemble/generate -d" in block
    assert '"stream": false' in block


def test_model_without_tokenizer_and_public_host_are_said(tmp_path: Path) -> None:
    block = ready_block(ServeSettings(model=tmp_path, host="0.0.0.0"), READY)
    assert "no tokenizer.json" in block
    assert "inflight generate" not in block
    assert "listening on 0.0.0.0: open to other machines" in block
    assert "http://127.0.0.1:8000" in block


def test_off_a_terminal_loading_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    loading = ModelStatus("loading", 1, {"loaded_bytes": 5, "total_bytes": 10})
    with LoadingDisplay(ServeSettings(model=Path("llama"))) as display:
        display.update(None)
        display.update(loading)
        display.update(READY)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == "starting tritonserver with llama ...\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_loading_goes_on_when_nobody_sees_it(
    is_terminal: bool,
    nobody_hears: AbstractContextManager[None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rich would end the process. Off a terminal, FORCE_COLOR makes it believe in one."""
    monkeypatch.setenv("FORCE_COLOR", "1" if is_terminal else "")
    with nobody_hears, LoadingDisplay(ServeSettings(model=Path("llama"))) as display:
        assert display._progress.disable != is_terminal
        display.update(ModelStatus("loading", 1, {"loaded_bytes": 5, "total_bytes": 10}))
        display._progress.refresh()
