"""Request formats of other clients, translated to tensors: vLLM's JSON and benchmark parameters.

``sampling_parameters`` is the JSON object of vLLM's clients. Names, meanings and defaults are those
of vLLM's ``SamplingParams``: a request that sets neither temperature nor filters samples from the
model's own distribution. Numbers may be strings, as its samples send them. A name without a
counterpart is refused, unless its value is neutral.

Public benchmark clients send request parameters beside the inputs of a generation, which
TensorRT-LLM's backend ignores. Here `BENCHMARK_PARAMETERS` are honoured and all others refused by
name: a setting that silently does nothing is worse than an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import Array
from inflight_backend.requests.outputs import MAX_TOP_LOG_PROBS
from inflight_backend.requests.values import read_json_object
from inflight_backend.triton_io.inputs import RequestHead
from inflight_protocol import (
    ACCUMULATE_PARAMETER,
    DTYPE_TO_NUMPY,
    IGNORE_EOS_PARAMETER,
    INPUT_BY_NAME,
)
from inflight_protocol import aliases as penalties
from inflight_scheduler.sampling import SETTINGS

BENCHMARK_PARAMETERS = (ACCUMULATE_PARAMETER, IGNORE_EOS_PARAMETER)
_NO_END = -1


def with_benchmark_parameters(
    head: RequestHead, inputs: Mapping[str, Array]
) -> Mapping[str, Array]:
    """``inputs`` and what `BENCHMARK_PARAMETERS` add to them, in each row of the prompt.

    `InvalidRequest` for one that is neither true nor false, or not what the inputs say.
    """
    head.read_switch(ACCUMULATE_PARAMETER)
    if not head.read_switch(IGNORE_EOS_PARAMETER):
        return inputs
    end_id = inputs.get("end_id")
    if end_id is not None:
        if (end_id != _NO_END).any():
            raise InvalidRequest(
                f"request parameter '{IGNORE_EOS_PARAMETER}' must not be true if 'end_id' names "
                "a token"
            )
        return inputs
    prompt = inputs.get("input_ids", inputs.get("text_input"))
    num_rows = 1 if prompt is None or prompt.ndim < 2 else len(prompt)
    return {**inputs, "end_id": np.full((num_rows, 1), _NO_END, dtype=np.int32)}


_NAME = "sampling_parameters"
_LOG_PROBS = "logprobs"
_KEY_TO_TENSOR = {
    "max_tokens": "request_output_len",
    "min_tokens": "min_length",
    "n": "num_return_sequences",
} | {
    setting.option: setting.tensor
    for setting in SETTINGS.values()
    if setting.option and not setting.is_option_only
}
TENSOR_TO_KEY: Mapping[str, str] = {
    tensor: key for key, tensor in _KEY_TO_TENSOR.items() if tensor != key
} | {"stop_words": "stop"}
"""Inputs that have another name in the JSON object."""
_FLAGS = ("include_stop_str_in_output", "skip_special_tokens")
_LORA_NAME = "lora_name"
_NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "seed": -1,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "bad_words": [],
    "logit_bias": {},
    "detokenize": True,
    _LOG_PROBS: False,
    "use_beam_search": False,
    "early_stopping": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
}
"""Key -> the value that asks for nothing, as vLLM's default does; Triton's OpenAI frontend sends
``best_of`` and ``logprobs``."""
_DRAW = np.array([[1.0]], dtype=np.float32)  # vLLM's top_p when none is given
_MAX_STOP_STRINGS = 64
_INT32_MAX = 2**31 - 1
_IGNORED = "prompt_ignore_length"
_MAX_PENALTY = 2.0  # vLLM's and OpenAI's
_ALL_TOKENS = -1  # vLLM's top_k for "off", which is 0 on our wire
_LOWEST_TOP_P = 1e-6  # leaves the likeliest token; 0 is "off" on our wire
_LOWEST_SEED = -(2**63)  # vLLM's and OpenAI's have a sign


def read_num_log_probs(inputs: Mapping[str, Array]) -> int | None:
    """``logprobs``, of how many of the likeliest tokens log probabilities are wanted beside those
    of each new one; None for none at all.

    `InvalidRequest` for more than can be told.
    """
    tensor = inputs.get(_NAME)
    value = None if tensor is None else _read_object(tensor).get(_LOG_PROBS)
    if value is None or _is_neutral(_LOG_PROBS, value):
        return None
    num = int(_number(_LOG_PROBS, "INT32", value).item())
    if not 0 <= num <= MAX_TOP_LOG_PROBS:
        raise InvalidRequest(f"'{_NAME}': {_LOG_PROBS} is {num}, outside 0..{MAX_TOP_LOG_PROBS}")
    return num


def expand(inputs: Mapping[str, Array], *, has_log_probs: bool = False) -> Mapping[str, Array]:
    """``inputs`` with the JSON object replaced by the tensors it stands for.

    ``has_log_probs``: the caller reads ``logprobs``, which no tensor stands for.
    `InvalidRequest` names the key that is unknown, doubled, of the wrong kind, or also sent as a
    tensor.
    """
    tensor = inputs.get(_NAME)
    if tensor is None:
        return inputs
    result = {name: value for name, value in inputs.items() if name != _NAME}
    content = _read_object(tensor)
    if content.get("max_tokens", 0) is None:
        raise InvalidRequest(
            f"'{_NAME}': max_tokens must be a whole number, or left out: null, no limit, is not "
            "supported"
        )
    for key, value in content.items():
        if value is None or _is_neutral(key, value) or (has_log_probs and key == _LOG_PROBS):
            continue
        name, expanded = _expand(key, value)
        if name in result:
            raise InvalidRequest(f"'{_NAME}': {key} is given twice, also as '{name}'")
        result[name] = expanded
    _translate_penalties(result, [key for key in penalties.NAMES if content.get(key) is not None])
    if not has_beams(result):
        # Without any filter our wire has the likeliest token, whatever the temperature.
        result.setdefault("runtime_top_p", _DRAW)
    return result


def with_request_parameters(
    inputs: dict[str, Array], parameters: Mapping[str, Any]
) -> dict[str, Array]:
    """``inputs`` with the parameters of the Triton request as the JSON object, vLLM's other way.

    vLLM's sample sends both. `InvalidRequest` names the key that is not the same in the two.
    """
    if not parameters:
        return inputs
    if _NAME in inputs:
        content = _read_object(inputs[_NAME])
        for key, value in parameters.items():
            if key not in content or content[key] != value:
                raise InvalidRequest(f"parameter {key[:100]!r} is not what '{_NAME}' says")
        return inputs
    text = json.dumps(parameters).encode()
    return {**inputs, _NAME: np.array([text], dtype=np.object_)}


def _translate_penalties(tensors: dict[str, Array], names: Sequence[str]) -> None:
    """Have those of ``names``, which are vLLM's, count and weigh as they do there.

    `InvalidRequest` names one outside vLLM's bounds: scaled, it would be another number.
    """
    values = {name: tensors[name].item() for name in names}
    for name, value in values.items():
        if abs(value) > _MAX_PENALTY:
            raise InvalidRequest(
                f"'{_NAME}': {name} is {value:g}, outside {-_MAX_PENALTY:g}..{_MAX_PENALTY:g}"
            )
    temperature = tensors.get("temperature")
    if temperature is not None and temperature.size == 1 and temperature.dtype == np.float32:
        values["temperature"] = temperature.item()  # else validation names what is wrong with it
    translated = penalties.to_wire(values)
    if _IGNORED in tensors:
        translated.pop(_IGNORED, None)
    elif _IGNORED in translated:
        _check_no_other_penalty(tensors, names)
    for name, value in translated.items():
        tensors[name] = np.array([[value]], dtype=DTYPE_TO_NUMPY[INPUT_BY_NAME[name].dtype])


def _check_no_other_penalty(tensors: Mapping[str, Array], names: Sequence[str]) -> None:
    """Refuse one sent as a tensor, which counts the prompt, where it is to be left out."""
    for name in penalties.NAMES:
        if name not in names and name in tensors and tensors[name].any():
            raise InvalidRequest(
                f"'{name}' counts the prompt, {names[0]} of '{_NAME}' does not: give both in "
                f"'{_NAME}', or 'prompt_ignore_length' for both"
            )


def _is_neutral(key: str, value: Any) -> bool:
    neutral = _NEUTRAL.get(key)
    if type(neutral) in (int, float):  # which may be a string: vLLM's backend calls that kind
        try:
            dtype = "INT32" if type(neutral) is int else "FP32"
            return bool(_number(key, dtype, value) == neutral)
        except InvalidRequest:
            return False
    # Not 0 for false or the reverse: ``"logprobs": 0`` asks for log probabilities.
    return neutral is not None and type(value) is type(neutral) and bool(value == neutral)


def _read_object(tensor: Array) -> dict[str, Any]:
    if tensor.size != 1:
        raise InvalidRequest(f"'{_NAME}' must hold one string, got {tensor.size}")
    text = tensor.reshape(-1)[0]
    if not isinstance(text, (bytes, str)):
        raise InvalidRequest(f"'{_NAME}' has type {tensor.dtype}, expected STRING")
    return read_json_object(_NAME, text)


def _expand(key: str, value: Any) -> tuple[str, Array]:
    if key == "stop":
        return "stop_words", _strings(value)
    if key == "stop_token_ids":
        return key, _ids(value)
    if key == "ignore_eos":
        if value is not True:
            raise InvalidRequest(f"'{_NAME}': ignore_eos must be true or false")
        return "end_id", np.array([[-1]], dtype=np.int32)
    if key == _LORA_NAME:
        if not isinstance(value, str):
            raise InvalidRequest(f"'{_NAME}': {key} must be a string")
        return key, np.array([[value.encode()]], dtype=np.object_)
    if key in _FLAGS:
        if not isinstance(value, bool):
            raise InvalidRequest(f"'{_NAME}': {key} must be true or false")
        return key, np.array([[value]])
    if key not in _KEY_TO_TENSOR:
        others = ("stop", "stop_token_ids", "ignore_eos", _LORA_NAME)
        known = ", ".join([*_KEY_TO_TENSOR, *_FLAGS, *others])
        value_only = f", but for {json.dumps(_NEUTRAL[key])}" if key in _NEUTRAL else ""
        raise InvalidRequest(
            f"'{_NAME}': {key[:100]!r} is not supported{value_only}; known are {known}"
        )
    name = _KEY_TO_TENSOR[key]
    return name, _number(key, INPUT_BY_NAME[name].dtype, value)


def _number(key: str, dtype: str, value: Any) -> Array:
    kind = DTYPE_TO_NUMPY[dtype]
    is_whole = issubclass(kind, np.integer)
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        number = int(value) if is_whole else float(value)
        if not math.isfinite(number) or (is_whole and isinstance(value, float) and value % 1):
            raise ValueError
    except (ValueError, OverflowError):
        expected = "a whole number" if is_whole else "a number"
        raise InvalidRequest(f"'{_NAME}': {key} must be {expected}") from None
    if key == "top_k" and number == _ALL_TOKENS:
        number = 0
    if key == "top_p" and number == 0:
        number = _LOWEST_TOP_P
    if is_whole:
        limits = np.iinfo(dtype.lower())
        is_seed = kind is np.uint64
        lowest = _LOWEST_SEED if is_seed else int(limits.min)
        if not lowest <= number <= limits.max:
            raise InvalidRequest(f"'{_NAME}': {key} is outside {lowest}..{limits.max}")
        if is_seed:
            number %= 2**64
    return np.array([[number]], dtype=kind)


def _ids(value: Any) -> Array:
    is_list = isinstance(value, list) and all(type(each) is int for each in value)
    if not is_list or any(abs(each) > _INT32_MAX for each in value):
        raise InvalidRequest(f"'{_NAME}': stop_token_ids must be a list of token ids")
    return np.array([value], dtype=np.int32)


def _strings(value: Any) -> Array:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise InvalidRequest(f"'{_NAME}': stop must be a string or a list of strings")
    if len(strings) > _MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"'{_NAME}': stop has {len(strings)} strings, at most {_MAX_STOP_STRINGS} are taken"
        )
    try:
        return np.array([[each.encode() for each in strings]], dtype=np.object_)
    except UnicodeEncodeError:
        raise InvalidRequest(f"'{_NAME}': stop is not valid Unicode") from None


def has_beams(inputs: Mapping[str, Array]) -> bool:
    """True for a request that searches; what is wrong with its width is said later."""
    width = inputs.get("beam_width")
    if width is None or width.size != 1 or width.dtype != np.int32:
        return False  # validation names what is wrong with it
    return bool(width.reshape(-1)[0] > 1)
