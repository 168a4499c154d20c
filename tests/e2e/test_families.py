"""A family of each kind of layer through the real server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e.conftest import ServeFactory
from support.calls import stream_infer, tensors_of
from support.families import write_family

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(
    "name",
    ["gpt2", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next"],
    ids=["positions", "windows", "experts and sinks", "latent cache", "recurrence"],
)
def test_logits_of_a_prompt_are_those_of_transformers(
    serve: ServeFactory, tmp_path: Path, name: str
) -> None:
    tokens, expected = write_family(tmp_path / name, name)
    running = serve(model=tmp_path / name)
    asked = {"input_ids": tokens.tolist(), "request_output_len": 1, "return_context_logits": True}
    wanted = ("output_ids", "context_logits")
    (answer,) = stream_infer(running, "tensorrt_llm", tensors_of(**asked), wanted)
    found = torch.from_numpy(answer["context_logits"][0])
    assert float((found - expected).abs().max()) < 1e-3 * max(1.0, float(expected.std()))
    assert answer["output_ids"].flatten()[-1] == int(expected[-1].argmax())
