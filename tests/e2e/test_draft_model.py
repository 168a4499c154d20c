"""A draft model beside its target in one real server: the answers are those of the target alone."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from e2e.conftest import ServeFactory
from safetensors.torch import load_file, save_file
from support.calls import WAIT_SECONDS, generate, stats_of
from support.server_process import ServeProcess

from inflight_server.serve.settings import DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLS = "tensorrt_llm_bls"


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with noise in its weights: it guesses right now and then."""
    folder = tmp_path_factory.mktemp("draft") / "checkpoint"
    shutil.copytree(DEMO_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        spread = 0.001 * tensor.float().std()
        tensor += (spread * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
        weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["1", "2"], ids=["alone", "ranks"])
def server(shared: ServeFactory, draft_model: Path, request: pytest.FixtureRequest) -> ServeProcess:
    """The target alone or on two ranks."""
    size = f"--tensor-parallel-size={request.param}"
    return shared(options=["--draft-model", str(draft_model), size])


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "with its prompt": {"exclude_input_in_output": False},
    "without its prompt": {"exclude_input_in_output": True},
    "seeded": {"temperature": 1.3, "top_p": 0.95, "random_seed": 5},
    "log probs": {"return_log_probs": True, "return_num_output_tokens": True},
    "minimum": {"min_length": 20, "return_finish_reason": True},
    "stop words": {"stop_words": ["6 1"], "return_finish_reason": True},
    "one token": {"max_tokens": 1},
    "penalty": {"repetition_penalty": 1.2},  # the target alone
    "beams": {"beam_width": 1},
    "logits": {"return_generation_logits": True},
    "too long": {"max_tokens": 100_000},
    "guided": {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9 ]+"},
}


@pytest.mark.contract("tensorrt_llm_bls input", "num_draft_tokens use_draft_logits")
@pytest.mark.contract("tensorrt_llm_bls parameter", "tensorrt_llm_draft_model_name")
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_answer_is_that_of_the_target_alone(
    server: ServeProcess, settings: dict[str, Any]
) -> None:
    asked = {"text_input": "1 2 3 4 5", "max_tokens": 40, **settings}
    alone = generate(server, BLS, **asked)
    for drafts in ({"num_draft_tokens": 4}, {"num_draft_tokens": 8, "use_draft_logits": True}):
        drafted = generate(server, BLS, **asked, **drafts)
        assert drafted.keys() == alone.keys()
        for name, value in alone.items():
            if isinstance(value, str):
                assert drafted[name] == value, name
            else:
                np.testing.assert_allclose(drafted[name], value, atol=1e-4, err_msg=name)


def test_guesses_are_verified_in_the_target(server: ServeProcess) -> None:
    """Some are right, so there were rounds; the draft model alone has answered in some of them."""
    answer = generate(
        server,
        BLS,
        text_input="1 2 3 4 5",
        max_tokens=40,
        num_draft_tokens=4,
        return_perf_metrics=True,
        return_num_output_tokens=True,
    )
    assert 0 < answer["total_accepted_draft_tokens"] < answer["total_draft_tokens"]
    share = answer["total_accepted_draft_tokens"] / answer["total_draft_tokens"]
    assert answer["acceptance_rate"] == pytest.approx(share)
    assert answer["num_output_tokens"] == 40
    assert answer["arrival_time_ns"] < answer["first_token_time_ns"] < answer["last_token_time_ns"]
    page = httpx.get(server.metrics_url, trust_env=False).text
    assert page.count("vllm:num_requests_running{") == 1, "those of the target"
    assert 'model="tensorrt_llm_draft"' in page


REFUSED = {
    "stream": ({"stream": True}, "'stream' is not supported together with 'num_draft_tokens'"),
    "logits": ({"return_context_logits": True}, "'return_context_logits' is not supported"),
    "negative": ({"num_draft_tokens": -1}, "'num_draft_tokens' must be 0 or above"),
    "many": ({"num_draft_tokens": 9}, "'num_draft_tokens' is 9, outside 0..8 (max_draft_len)"),
    "sampling": ({"temperature": -1.0}, "'temperature' is -1"),
}


@pytest.mark.parametrize(("settings", "error"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_do_is_refused_by_name(
    server: ServeProcess, settings: dict[str, Any], error: str
) -> None:
    body = {"text_input": "1 2", "max_tokens": 5, "num_draft_tokens": 4, **settings}
    assert error in generate(server, BLS, **body)["error"]


def test_one_that_has_begun_ends_while_the_server_drains(
    serve: ServeFactory, draft_model: Path
) -> None:
    """Round by round, though the server takes no new request; it leaves nothing behind."""
    running = serve(options=["--draft-model", str(draft_model)])
    asked = {"text_input": "1 2 3 4 5", "max_tokens": 300}
    alone = generate(running, BLS, **asked)
    answers: list[dict[str, Any]] = []
    call = threading.Thread(
        target=lambda: answers.append(generate(running, BLS, **asked, num_draft_tokens=4))
    )
    before = stats_of(running)["Iteration Counter"]
    call.start()
    deadline = time.monotonic() + WAIT_SECONDS
    while stats_of(running)["Iteration Counter"] < before + 10:  # some rounds
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert call.is_alive()
    running.process.send_signal(signal.SIGTERM)
    call.join()
    assert answers == [alone]
    assert running.wait() == 0
