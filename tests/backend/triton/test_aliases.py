"""vLLM's JSON of settings and the parameters of public benchmark clients, as tensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from inflight_backend.errors import InvalidRequest
from inflight_backend.triton_io.aliases import expand, with_benchmark_parameters
from inflight_backend.triton_io.inputs import RequestHead
from inflight_protocol import DTYPE_TO_NUMPY, INPUT_BY_NAME


def request(content: Any, **more: Any) -> dict[str, Any]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return {"sampling_parameters": np.array([[text]], dtype=np.object_), **more}


@pytest.mark.contract("tensorrt_llm input", "random_seed")
@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({}, {}),
        ({"max_tokens": 5}, {"request_output_len": [[5]]}),
        (
            {"max_tokens": "5", "temperature": "0.5"},
            {"request_output_len": [[5]], "temperature": [[0.5]]},
        ),
        ({"top_p": 0.5, "top_k": -1}, {"runtime_top_p": [[0.5]], "runtime_top_k": [[0]]}),
        ({"top_k": 5, "min_p": 0.25}, {"runtime_top_k": [[5]], "min_p": [[0.25]]}),
        (
            {"seed": 2**64 - 1, "n": 2},
            {"random_seed": [[2**64 - 1]], "num_return_sequences": [[2]]},
        ),
        ({"seed": -(2**63)}, {"random_seed": [[2**63]]}),
        ({"seed": "-2"}, {"random_seed": [[2**64 - 2]]}),
        ({"seed": -1}, {}),  # none, as in vLLM
        ({"skip_special_tokens": True, "include_stop_str_in_output": False}, {}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": [[False]]}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": [[True]]}),
        (
            {"top_p": 0, "top_k": 50},  # 0 is off on the wire, and 50 tokens would be drawn among
            {"runtime_top_p": [[float(np.float32(1e-6))]], "runtime_top_k": [[50]]},
        ),
        ({"stop": "x"}, {"stop_words": [[b"x"]]}),
        ({"stop_token_ids": [7, 5]}, {"stop_token_ids": [[7, 5]]}),
        ({"stop": ["x", "ü"]}, {"stop_words": [[b"x", "ü".encode()]]}),
        ({"ignore_eos": True}, {"end_id": [[-1]]}),
        ({"ignore_eos": False, "seed": None}, {}),
        ({"best_of": 1, "use_beam_search": False, "skip_special_tokens": True}, {}),
        ({"best_of": "1"}, {}),
        ({"length_penalty": "1.0"}, {}),
        ({"logprobs": False}, {}),
        ({"stop_token_ids": [], "bad_words": [], "logit_bias": {}, "detokenize": True}, {}),
        (
            {"length_penalty": 1.0, "presence_penalty": 0.0, "stop": None},
            {"presence_penalty": [[0.0]]},
        ),
        (
            {"presence_penalty": 0.5, "frequency_penalty": -1, "temperature": 0.25},
            {
                "presence_penalty": [[2.0]],
                "frequency_penalty": [[-4.0]],
                "temperature": [[0.25]],
                "prompt_ignore_length": [[2**31 - 1]],
            },
        ),
        (
            {"frequency_penalty": 1.5, "temperature": 1e-7},
            {
                "frequency_penalty": [[1.5]],
                "temperature": [[0.0]],
                "prompt_ignore_length": [[2**31 - 1]],
            },
        ),
    ],
)
def test_settings_become_tensors(content: dict[str, Any], wanted: dict[str, Any]) -> None:
    tensors = expand(request(content))
    wanted = {"runtime_top_p": [[1.0]], **wanted}
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == wanted
    for name, tensor in tensors.items():
        assert tensor.dtype == np.dtype(DTYPE_TO_NUMPY[INPUT_BY_NAME[name].dtype])


def test_a_search_draws_nothing() -> None:
    for width, drawn in ((2, {}), (1, {"runtime_top_p": [[1.0]]})):
        beam_width = np.array([[width]], dtype=np.int32)
        tensors = expand(request({"max_tokens": 5}, beam_width=beam_width))
        del tensors["beam_width"], tensors["request_output_len"]
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == drawn


def test_penalties_heed_what_is_sent_as_a_tensor() -> None:
    sent = {
        "temperature": np.array([[0.5]], dtype=np.float32),
        "prompt_ignore_length": np.array([[3]], dtype=np.int32),
    }
    tensors = expand(request({"presence_penalty": 1}, **sent))
    assert tensors["presence_penalty"].tolist() == [[2.0]]
    assert {name: tensors[name] for name in sent} == sent
    own = {"presence_penalty": np.array([[1.0]], dtype=np.float32), **sent}  # TensorRT-LLM's rule
    assert expand(request({"max_tokens": 1}, **own))["presence_penalty"].tolist() == [[1.0]]
    odd = expand(request({"presence_penalty": 1}, temperature=np.ones((1, 2), dtype=np.float64)))
    assert odd["presence_penalty"].tolist() == [[1.0]], "validation says what is wrong with it"


def test_a_penalty_that_counts_the_prompt_stands_beside_no_other() -> None:
    """One number of the request says for both how much of the prompt counts."""
    one = np.array([[1.0]], dtype=np.float32)
    with pytest.raises(InvalidRequest, match="'presence_penalty' counts the prompt, frequency_pe"):
        expand(request({"frequency_penalty": 1}, presence_penalty=one))
    length = np.array([[3]], dtype=np.int32)
    for more in (
        {"presence_penalty": one, "prompt_ignore_length": length},
        {"presence_penalty": one * 0},
    ):
        assert expand(request({"frequency_penalty": 1}, **more)).items() >= more.items()
    assert "prompt_ignore_length" not in expand(
        request({"frequency_penalty": 0}, presence_penalty=one)
    )


def test_a_filter_sent_as_a_tensor_counts() -> None:
    given = np.array([[0.25]], dtype=np.float32)
    assert expand(request({"temperature": 2}, runtime_top_p=given))["runtime_top_p"] is given


def test_requests_without_settings_pass_untouched() -> None:
    inputs = {"end_id": np.ones((1, 1), dtype=np.int32)}
    assert expand(inputs) is inputs


@pytest.mark.case(39, 40)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 60_000, "not valid JSON"),
        ([], "must be a JSON object"),
        (b'{"max_tokens": 2, "max_tokens": 4}', "has the key 'max_tokens' twice"),
        (b'{"stop": [{"a": 1, "a": 1}]}', "has the key 'a' twice"),
        ({"surprise": 1}, "'surprise' is not supported; known are"),
        ({"best_of": 2}, "'best_of' is not supported, but for 1"),
        ({"best_of": "2"}, "'best_of' is not supported, but for 1"),
        ({"best_of": "1.0"}, "'best_of' is not supported, but for 1"),
        ({"length_penalty": "1.5"}, "'length_penalty' is not supported, but for 1.0"),
        ({"presence_penalty": 2.5, "temperature": 1e-5}, "presence_penalty is 2.5, outside -2..2"),
        ({"best_of": True}, "'best_of' is not supported, but for 1"),
        ({"best_of": [1]}, "'best_of' is not supported, but for 1"),
        ({"logprobs": "0"}, "'logprobs' is not supported, but for false"),
        ({"logprobs": 0}, "'logprobs' is not supported, but for false"),
        ({"use_beam_search": True}, "'use_beam_search' is not supported, but for false"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"max_tokens": None}, "max_tokens must be a whole number, or left out"),
        ({"stop_token_ids": 1}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids must be a list of token ids"),
        ({"bad_words": ["x"]}, "'bad_words' is not supported, but for \\[\\]"),
        ({"max_tokens": "many"}, "max_tokens must be a whole number"),
        ({"max_tokens": 2**31}, "max_tokens is outside"),
        ({"seed": -(2**63) - 1}, "seed is outside -9223372036854775808..18446744073709551615"),
        ({"temperature": "nan"}, "temperature must be a number"),
        ({"temperature": [1]}, "temperature must be a number"),
        ({"stop": 5}, "stop must be a string"),
        ({"stop": ["\ud800"]}, "stop is not valid Unicode"),
        ({"stop": ["x"] * 65}, "at most 64"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
    ],
)
def test_bad_settings_are_named(content: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        expand(request(content))


@pytest.mark.case(40)
@pytest.mark.parametrize("kind", [bytes, str])
def test_too_much_json_is_refused_unread(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read 10 MB takes a second, and nobody else gets a token meanwhile."""
    monkeypatch.setattr("json.loads", lambda *args, **options: pytest.fail("read"))
    text = '{"stop": "' + "x" * 10_000_000 + '"}'
    content = np.array([[text if kind is str else text.encode()]], dtype=np.object_)
    with pytest.raises(InvalidRequest, match="has 10000012 bytes, more than 65536"):
        expand({"sampling_parameters": content})


@pytest.mark.case(40)
@pytest.mark.parametrize("depth", [1000, 6000])
def test_deep_json_is_refused_by_name(depth: int) -> None:
    with pytest.raises(InvalidRequest, match="'sampling_parameters'"):
        expand(request(b'{"stop": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"))


def test_a_setting_that_is_also_a_tensor_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="temperature is given twice"):
        expand(request({"temperature": 1}, temperature=np.ones((1, 1), dtype=np.float32)))
    two = np.array([[b"{}", b"{}"]], dtype=np.object_)
    with pytest.raises(InvalidRequest, match="must hold one string"):
        expand({"sampling_parameters": two})


def test_a_tensor_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="has type bool, expected STRING"):
        expand({"sampling_parameters": np.array([[True]])})


IDS = {"input_ids": np.array([[5, 6]], np.int32)}

TEXTS = {"text_input": np.array([["1 2"], ["3"]], dtype=object)}


def end_ids(inputs: Any, **settings: Any) -> Any:
    """What the request ends at after all; None for what the model ends at."""
    found = with_benchmark_parameters(RequestHead(settings=settings), inputs)
    assert {name: found[name] for name in inputs} == inputs
    assert set(found) - set(inputs) <= {"end_id"}
    return found["end_id"].tolist() if "end_id" in found else None


def test_nothing_ends_an_answer_in_any_row() -> None:
    assert end_ids(IDS, ignore_eos=True) == [[-1]]
    assert end_ids(TEXTS, ignore_eos=1) == [[-1], [-1]]
    assert end_ids({"text_input": np.array(["1 2"], dtype=object)}, ignore_eos=True) == [[-1]]
    assert end_ids({}, ignore_eos=True) == [[-1]]  # a stop, which ends whatever it says


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
