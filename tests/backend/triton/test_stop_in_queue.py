"""A request that is stopped before it starts ends like any other: with all it asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import WAIT, Gate, Server, wait_until_queued
from support.triton_stub import FakeSender

import inflight_backend
from inflight_backend.engine import Engine, EngineConfig

DEMO = Path(inflight_backend.__file__).parent / "demo_model"
PROMPT = [5, 6, 7]
TIMES = ("first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")


@pytest.fixture
def server(make_server: MakeServer, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The demo model behind a gate."""
    config = EngineConfig(
        device="cpu", max_batch_size=3, max_beam_width=3, max_tokens_in_paged_kv_cache=1024
    )
    engine: Any = Engine.load(DEMO, config)
    execute = engine.execute

    def wait_and_execute(batch: Any) -> Any:
        gate(batch)
        return execute(batch)

    monkeypatch.setattr(engine, "execute", wait_and_execute)
    return make_server(engine, max_beam_width="3", tokenizer_dir=str(DEMO))


def tensors_of(sender: FakeSender) -> dict[str, Any]:
    """Those of the only response."""
    [response] = sender.responses
    assert response.error is None
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors}


@pytest.mark.parametrize(
    "wants",
    [
        {"return_perf_metrics": True},
        {"return_num_input_tokens": True, "return_num_output_tokens": True},
        {"return_log_probs": True},
        {"return_log_probs": True, "num_top_log_probs": 2, "return_log_prob_ranks": True},
        {"return_context_logits": True},
        {"return_generation_logits": True},
        {"return_finish_reason": True},
        {"return_log_probs": True, "return_perf_metrics": True, "beam_width": 3},
        {"beam_width": 3},
        {"return_log_probs": True, "return_num_output_tokens": True, "stop_words": ["9 1"]},
    ],
    ids=lambda wants: "-".join(wants),
)
def test_it_has_every_output_it_asked_for(
    server: Server, gate: Gate, wants: dict[str, Any]
) -> None:
    values = {"input_ids": PROMPT, "request_output_len": 3, **wants}
    whole = tensors_of(server.ask(**values))
    gate.close_after(0)
    busy = server.send(input_ids=[5], request_output_len=2)
    assert gate.is_reached.wait(WAIT)
    late = server.send("late", **values)
    wait_until_queued(server, 1)
    server.ask("late", stop=True)
    assert late.is_final.wait(WAIT)
    gate.set()
    assert busy.is_final.wait(WAIT)
    sent = tensors_of(late)
    assert sent.keys() == whole.keys()
    for name, tensor in sent.items():
        assert tensor.dtype == whole[name].dtype, name
        assert tensor.ndim == whole[name].ndim, name
    num_beams = wants.get("beam_width", 1)
    assert sent["output_ids"].tolist() == [[PROMPT] * num_beams], "as of any whole answer"
    assert sent["sequence_length"].tolist() == [[len(PROMPT)] * num_beams]
    num_new = whole["output_ids"].shape[2] - len(PROMPT)
    assert whole["output_log_probs"].shape == (1, num_beams, num_new)
    assert sent["output_log_probs"].shape == (1, num_beams, 0)
    assert sent["cum_log_probs"].tolist() == [[0] * num_beams]
    for name in ("top_log_probs", "output_log_prob_ranks"):
        assert sent.get(name, sent["output_ids"][:, :, :0]).size == 0
    for name in ("context_logits", "generation_logits"):
        assert sent[name].size == (0 if f"return_{name}" in wants else 1)
    if "num_input_tokens" in sent:
        assert sent["num_input_tokens"].tolist() == [[len(PROMPT)]]
    if "num_output_tokens" in sent:
        assert sent["num_output_tokens"].tolist() == [[0]]
    if "arrival_time_ns" in sent:
        assert sent["arrival_time_ns"].item() > whole["last_token_time_ns"].item()
        assert [sent[name].item() for name in TIMES] == [0, 0, 0]
    if "finish_reason" in sent:
        assert sent["finish_reason"].tolist() == [[b"cancelled"]]
