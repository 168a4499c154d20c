"""The request parameters of public benchmark clients: taken where text or tokens are generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.triton_harness import WAIT, Server, text_of
from support.triton_stub import CountingEngine, FakePbUtils, FakeRequest

from inflight_backend.errors import InvalidRequest
from inflight_backend.triton_io.aliases import with_benchmark_parameters
from inflight_backend.triton_io.inputs import RequestHead
from inflight_backend.triton_models.text_base import respond
from inflight_protocol.tensors import make_inputs

MakeServer = Callable[..., Server]

IDS = {"input_ids": np.array([[5, 6]], np.int32)}
TEXTS = {"text_input": np.array([["1 2"], ["3"]], dtype=object)}


def end_ids(inputs: Any, **settings: Any) -> Any:
    """What the request ends at after all; None for what the model ends at."""
    found = with_benchmark_parameters(RequestHead(settings=settings), inputs)
    assert {name: found[name] for name in inputs} == inputs
    assert set(found) - set(inputs) <= {"end_id"}
    return found["end_id"].tolist() if "end_id" in found else None


def test_a_client_that_accumulates_by_itself_may_say_so() -> None:
    for said in (True, False, 1, 0):
        assert end_ids(IDS, accumulate_tokens=said) is None


def test_nothing_ends_an_answer_in_any_row() -> None:
    assert end_ids(IDS, ignore_eos=True) == [[-1]]
    assert end_ids(TEXTS, ignore_eos=1) == [[-1], [-1]]
    assert end_ids({"text_input": np.array(["1 2"], dtype=object)}, ignore_eos=True) == [[-1]]
    assert end_ids({}, ignore_eos=True) == [[-1]]  # a stop, which ends whatever it says


def test_false_leaves_it_to_the_inputs() -> None:
    assert end_ids(IDS, ignore_eos=False) is None
    assert end_ids({"end_id": np.array([[7]])}, ignore_eos=False) == [[7]]


def test_both_ways_to_say_it_may_be_used_if_they_agree() -> None:
    none = np.array([[-1], [-1]])
    assert end_ids({**TEXTS, "end_id": none}, ignore_eos=True) == none.tolist()
    with pytest.raises(InvalidRequest, match=r"^request parameter 'ignore_eos' must not be true"):
        end_ids({**TEXTS, "end_id": np.array([[-1], [7]])}, ignore_eos=True)


@pytest.mark.parametrize("name", ["accumulate_tokens", "ignore_eos"])
@pytest.mark.parametrize("said", ["true", 2, 0.5])
def test_what_is_neither_true_nor_false_is_refused(name: str, said: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^request parameter '{name}' must be true or false"):
        end_ids(IDS, **{name: said})


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ({"accumulate_tokens": True}, "5 6 7"),
        ({"ignore_eos": False}, "5 6 7"),
        ({"ignore_eos": True}, "5 6 7 8 9 10 11"),
    ],
)
def test_the_llm_takes_them(
    make_server: MakeServer, tokenizer: None, tmp_path: Path, said: dict[str, Any], answer: str
) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 8}')
    server = make_server(CountingEngine())
    tensors = make_inputs({"text_input": "5", "max_tokens": 6})
    request = FakeRequest(tensors, parameters=json.dumps(said))
    server.model.execute([request])
    assert request.sender.is_final.wait(WAIT)
    assert text_of(request.sender) == answer


@pytest.mark.parametrize("name", ["accumulate_tokens", "ignore_eos"])
def test_models_that_generate_nothing_refuse_them(name: str) -> None:
    tensors = {"QUERY": np.array([["1"]], dtype=object)}
    request = FakeRequest(tensors, parameters=f'{{"{name}":true}}')
    [response] = respond(FakePbUtils, [request], lambda inputs: dict(inputs))
    assert str(response.error).startswith(f"'{name}' came as a request parameter")
