"""From the body of a request to a `GenerationJob`: every field honoured, forwarded, or refused.

Sampling fields become tensors of the wire (`inflight_client.protocol`); whether the server honours
one is for the server to say, and its refusal comes back under OpenAI's name of the field.

All of it may take seconds (large bodies, long texts, slow chat templates): call it from a thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_client import penalties
from inflight_client.openai.chat_messages import read_messages
from inflight_client.openai.chat_template import RESERVED
from inflight_client.openai.errors import ApiError, bad_field, model_not_found, unsupported
from inflight_client.openai.fields import Body, checked_text
from inflight_client.openai.prompts import PromptReader
from inflight_client.openai.settings import (
    MAX_PROMPTS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOG_PROBS,
)

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat has none."""

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

_NUMBERS: Mapping[str, tuple[str, float, float]] = {
    "temperature": ("temperature", 0.0, 2.0),
    "top_p": ("runtime_top_p", 0.0, 1.0),
    "presence_penalty": ("presence_penalty", -2.0, 2.0),
    "frequency_penalty": ("frequency_penalty", -2.0, 2.0),
    "repetition_penalty": ("repetition_penalty", 1e-3, 1e3),
    "min_p": ("min_p", 0.0, 1.0),
}
"""Field -> tensor and bounds; the last two are no fields of OpenAI's but common among servers."""

_LOWEST_TOP_P = 1e-6
"""Leaves the likeliest token, as OpenAI's 0 does: that one alone has more. The server's 0 leaves
all of them."""

_INTEGERS: Mapping[str, tuple[str, int, int]] = {
    "top_k": ("runtime_top_k", -1, _INT32_MAX),
    "min_tokens": ("min_length", 0, _INT32_MAX),
}

_LABELS = ("user", "safety_identifier", "prompt_cache_key")
"""Who asks, and which requests begin alike: told in the client's own words. The first was divided
into the other two. Nothing in an answer depends on them, and equal beginnings are found anyway."""

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "moderation": (),
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    # Those of vLLM: programs that measure servers send them with its defaults.
    "allowed_token_ids": (),
    "bad_words": ([],),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields of both calls that are not supported -> values that ask for nothing."""

_NEUTRAL_COMPLETION: Mapping[str, Sequence[Any]] = {
    **_NEUTRAL,
    "add_special_tokens": (True,),
    "best_of": (1,),
    "suffix": ("",),
}
_NEUTRAL_CHAT: Mapping[str, Sequence[Any]] = {
    **_NEUTRAL,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request: prompts as ids, and the tensors that go with each of them.

    ``includes_usage``: the stream ends with it; ``has_running_usage``: every event tells it so far.
    ``echoes``: texts of the prompts, if every answer is to begin with its own.
    """

    is_chat: bool
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    values: Mapping[str, object]
    num_answers: int
    is_streaming: bool
    includes_usage: bool
    has_log_probs: bool
    num_top_log_probs: int = 0
    has_running_usage: bool = False
    echoes: tuple[str, ...] = ()


def parse_completion(body: Body, reader: PromptReader) -> GenerationJob:
    """The job of ``/v1/completions``."""
    _check_model(body, reader)
    given = _split_prompts(body.take("prompt"))
    prompts = [_completion_prompt(each, reader) for each in given]
    max_tokens = body.integer("max_tokens", 1, _INT32_MAX) or DEFAULT_COMPLETION_TOKENS
    log_probs = body.integer("logprobs", 0, MAX_TOP_LOG_PROBS)
    is_echoing = body.flag("echo")
    if is_echoing and log_probs is not None:
        raise unsupported("echo", "not together with logprobs: those of prompts are not told")
    job = _job(body, reader, prompts, max_tokens, log_probs, _NEUTRAL_COMPLETION)
    if not is_echoing:
        return job
    texts = (each if isinstance(each, str) else reader.decode(each) for each in given)
    return replace(job, echoes=tuple(texts))


def parse_chat(body: Body, reader: PromptReader, default_max_tokens: int | None) -> GenerationJob:
    """The job of ``/v1/chat/completions``."""
    _check_model(body, reader)
    variables = _template_variables(body)
    prompt = tuple(reader.encode_messages(read_messages(body.take("messages")), variables))
    old = body.integer("max_tokens", 1, _INT32_MAX)
    new = body.integer("max_completion_tokens", 1, _INT32_MAX)
    if old is not None and new is not None and old != new:
        raise bad_field("max_tokens", "given twice, also as max_completion_tokens")
    room = max(1, reader.limits.max_seq_len - len(prompt))
    max_tokens = old or new or min(room, default_max_tokens or room)
    num_top = body.integer("top_logprobs", 0, MAX_TOP_LOG_PROBS)
    has_log_probs = body.flag("logprobs")
    if num_top and not has_log_probs:
        raise bad_field("top_logprobs", "only together with logprobs = true")
    log_probs = (num_top or 0) if has_log_probs else None
    return _job(body, reader, [prompt], max_tokens, log_probs, _NEUTRAL_CHAT, is_chat=True)


def _template_variables(body: Body) -> Mapping[str, Any]:
    name = "chat_template_kwargs"
    variables = body.mapping(name)
    for each in RESERVED:
        if each in variables:
            raise bad_field(f"{name}.{each}", "the server sets it itself")
    return variables


def _job(
    body: Body,
    reader: PromptReader,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    num_log_probs: int | None,
    neutral: Mapping[str, Sequence[Any]],
    is_chat: bool = False,
) -> GenerationJob:
    """Everything that the two calls have in common; ends with the check that nothing is left.

    ``num_log_probs``: likeliest tokens to tell in each place; None for no log probabilities.
    """
    values = _sampling(body, reader)
    num_answers = body.integer("n", 1, MAX_PROMPTS) or 1
    if num_answers > 1:
        values["num_return_sequences"] = num_answers
    if len(prompts) * num_answers > MAX_PROMPTS:
        raise bad_field("n", f"prompts x n may be at most {MAX_PROMPTS}")
    if num_log_probs is not None:
        values["return_log_probs"] = True
    if num_log_probs:
        values["num_top_log_probs"] = num_log_probs
    values |= _guide(body.take("response_format"))
    for label in _LABELS:
        body.text(label)
    is_streaming = body.flag("stream")
    includes_usage, has_running_usage = _stream_options(body.take("stream_options"), is_streaming)
    body.accept_neutral(neutral)
    body.check_empty()
    for prompt in prompts:
        reader.limits.check(len(prompt), max_tokens, "messages" if is_chat else "prompt")
    return GenerationJob(
        is_chat,
        tuple(prompts),
        max_tokens,
        values,
        num_answers,
        is_streaming,
        includes_usage,
        num_log_probs is not None,
        num_log_probs or 0,
        has_running_usage,
    )


def _sampling(body: Body, reader: PromptReader) -> dict[str, object]:
    numbers: dict[str, float] = {}
    for field, (tensor, low, high) in _NUMBERS.items():
        if (number := body.number(field, low, high)) is not None:
            numbers[tensor] = number
    values: dict[str, object] = {**numbers, **penalties.to_wire(numbers)}
    # OpenAI's default. Without any filter the server takes the likeliest token, whatever the
    # temperature, whose default is 1 with both.
    values["runtime_top_p"] = max(numbers.get("runtime_top_p", 1.0), _LOWEST_TOP_P)
    for field, (tensor, lowest, highest) in _INTEGERS.items():
        if (integer := body.integer(field, lowest, highest)) is not None:
            values[tensor] = max(integer, 0)  # -1 is vLLM's top_k for all tokens
    seed = body.integer("seed", -_INT64_MAX - 1, _INT64_MAX)
    if seed is not None:
        values["random_seed"] = seed % 2**64
    values |= _ends(body, reader)
    if stop := _stop_strings(body.take("stop")):
        values["stop_words"] = stop
    if (salt := body.text("cache_salt")) is not None:
        values["cache_salt"] = salt
    bias = body.take("logit_bias", {})
    if bias != {}:
        values["embedding_bias"] = _embedding_bias(bias, reader.limits.vocab_size)
    return values


def _embedding_bias(value: Any, vocab_size: int) -> npt.NDArray[np.float32]:
    """A bias for every token ``[vocab_size]`` from an object of token ids and biases."""
    if not isinstance(value, dict):
        raise bad_field("logit_bias", "expected an object of token ids and numbers")
    result = np.zeros(vocab_size, dtype=np.float32)
    for key, bias in value.items():
        # Only digits: int() would also read blanks, signs and underscores.
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise bad_field("logit_bias", f"keys are token ids from 0 to {vocab_size - 1}")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or abs(bias) > 100:
            raise bad_field("logit_bias", "values are numbers from -100 to 100")
        result[int(key)] = bias
    return result


def _stop_strings(value: Any) -> list[str]:
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise bad_field("stop", "expected a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_field("stop", f"{len(strings)} strings, at most {MAX_STOP_STRINGS} are taken")
    if "" in strings:
        raise bad_field("stop", "an empty string would stop everything")
    return [checked_text("stop", each) for each in strings]


def _ends(body: Body, reader: PromptReader) -> dict[str, object]:
    """The tokens that end the answer: those of the model, unless they are to be ignored, and those
    the client names, as vLLM's may."""
    limits, values = reader.limits, dict[str, object]()
    stop_token_ids = _stop_token_ids(body.take("stop_token_ids", []), limits.vocab_size)
    if not body.flag("ignore_eos"):
        values["end_id"] = limits.end_id
        stop_token_ids |= set(limits.stop_token_ids)
    if stop_token_ids:
        values["stop_token_ids"] = sorted(stop_token_ids)
    return values


def _stop_token_ids(ids: Any, vocab_size: int) -> set[int]:
    if not isinstance(ids, list) or not all(_is_id(i) and 0 <= i < vocab_size for i in ids):
        raise bad_field(
            "stop_token_ids", f"expected a list of token ids from 0 to {vocab_size - 1}"
        )
    return set(ids)


def _guide(value: Any) -> dict[str, object]:
    """``response_format`` as the tensors of guided decoding."""
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        # The server's own json allows arrays as well; OpenAI promises an object. Its schema may
        # stand right here, as other servers have it.
        schema = value.get("schema")
        if not isinstance(schema, (dict, NoneType)):
            raise bad_field("response_format", "schema must be an object")
        return _schema_guide({"type": "object"} if schema is None else schema)
    if kind == "json_schema":
        holder = value.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise bad_field("response_format", "json_schema.schema must be an object")
        return _schema_guide(schema)
    raise bad_field("response_format", "type must be text, json_object or json_schema")


def _schema_guide(schema: dict[str, Any]) -> dict[str, object]:
    try:
        guide = json.dumps(schema, separators=(",", ":"))
    except RecursionError:  # it was read with a few frames more to go
        raise bad_field("response_format", "the schema is nested too deeply") from None
    return {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": guide}


def _stream_options(value: Any, is_streaming: bool) -> tuple[bool, bool]:
    """Whether the stream ends with its usage, and whether every event tells it so far."""
    if value is None:
        return False, False
    if not is_streaming:
        raise bad_field("stream_options", "only together with stream = true")
    given = value if isinstance(value, dict) else {"": value}
    options = {name: each for name, each in given.items() if each is not None}
    ends, runs = (options.pop(name, False) for name in ("include_usage", "continuous_usage_stats"))
    if options.pop("include_obfuscation", False) or options or {type(ends), type(runs)} != {bool}:
        raise bad_field("stream_options", 'expected {"include_usage": true or false}')
    return ends, ends and runs  # the second is of vLLM, and nothing there without the first


def _check_model(body: Body, reader: PromptReader) -> None:
    name = body.text("model")
    if name is None:
        raise ApiError(400, "you must provide a model parameter", "model", "missing_parameter")
    if name != reader.name:
        raise model_not_found(reader.name)


def _split_prompts(value: Any) -> list[Any]:
    """One prompt or several: a string, ids, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad_field("prompt", "expected a string, a list of token ids, or a list of either")
    if len(value) > MAX_PROMPTS:
        raise bad_field("prompt", f"{len(value)} prompts, at most {MAX_PROMPTS} are taken")
    return value


def _completion_prompt(value: Any, reader: PromptReader) -> tuple[int, ...]:
    if isinstance(value, list):
        if not value or not all(_is_id(each) and 0 <= each <= _INT32_MAX for each in value):
            raise bad_field("prompt", "a list of token ids holds whole numbers from 0")
        return tuple(value)
    text = checked_text("prompt", value)
    ids = reader.encode(text, "prompt", add_special_tokens=True)
    if not ids:
        raise bad_field("prompt", "empty: a prompt needs at least one token")
    return tuple(ids)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
