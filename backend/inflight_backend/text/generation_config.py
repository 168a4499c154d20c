"""Sampling settings of requests that name none: the server's, else those of the checkpoint.

What a request says comes first, then ``default_sampling`` of the server, then the checkpoint's
generation_config.json, then the defaults of the wire (`SamplingParams`). As for `transformers`, the
numbers of generation_config.json that shape a draw count where it says ``do_sample``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.text.tokenizer_files import read_json
from inflight_scheduler.sampling import SETTINGS

_NAME = "generation_config.json"
_PARAMETER = "default_sampling"
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_OTHERS = ("repetition_penalty", "no_repeat_ngram_size")
_ALL_TOKENS = -1  # some files' top_k for "off", which is 0 on our wire

DRAWING_INPUTS = frozenset(SETTINGS[name].tensor for name in _DRAWING)
"""Inputs that a search with beams, which draws nothing, does without."""


def read_default_sampling(
    checkpoint: Path, *, reads_checkpoint: bool, overrides: str | None
) -> dict[str, float]:
    """Field of `SamplingParams` -> its value for requests with text that do not say.

    ``overrides``: settings of the server, as a JSON object. `CheckpointError` or
    `ConfigurationError` names a value outside its bounds.
    """
    content = read_json(checkpoint, _NAME) if reads_checkpoint else {}
    draws = content.get("do_sample") is True
    try:
        found = _settings(content, (*_DRAWING, *_OTHERS) if draws else _OTHERS)
    except ValueError as error:
        raise CheckpointError(
            f"{_NAME}: {error}; generation_config=none serves without the file"
        ) from None
    chosen = {} if overrides is None else _read_overrides(overrides)
    found |= chosen
    draws = draws or not chosen.keys().isdisjoint(_DRAWING)
    if draws and not any(found.get(name) for name in ("top_k", "top_p", "min_p")):
        found["top_p"] = 1.0  # without any filter the wire means the likeliest token
    return found


def to_inputs(settings: Mapping[str, float]) -> dict[str, float]:
    """The same by the names of the input tensors."""
    return {SETTINGS[name].tensor: value for name, value in settings.items()}


def _read_overrides(text: str) -> dict[str, float]:
    names = (*_DRAWING, *_OTHERS)
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it must be a JSON object")
        for name in content:
            if name not in names:
                raise ValueError(f"{name[:100]!r} is not one of {', '.join(names)}")
        return _settings(content, names)
    except (ValueError, RecursionError) as error:
        example = '{"temperature": 0.7, "top_p": 0.9}'
        raise ConfigurationError(
            f"{_PARAMETER} is {text[:100]!r}: {error}; write, for example, {example}"
        ) from None


def _settings(content: Mapping[str, object], names: tuple[str, ...]) -> dict[str, float]:
    """Those of ``names`` that say anything; ``ValueError`` for one that no request could send."""
    return {name: _checked(name, content[name]) for name in names if content.get(name) is not None}


def _checked(name: str, value: object) -> float:
    setting = SETTINGS[name]
    is_whole = setting.dtype != "FP32"
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        raise ValueError(f"{name} must be {'a whole ' if is_whole else 'a '}number")
    if name == "top_k" and value == _ALL_TOKENS:
        return 0
    low, high = setting.minimum, setting.maximum
    assert not isinstance(low, str)  # none of ours has a bound that the request sets
    assert not isinstance(high, str)
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} is {value}, outside {low}..{high}")
    return value
