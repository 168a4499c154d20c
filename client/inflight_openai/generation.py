"""From the body of a request to a `GenerationRequest`: prompts as token ids, sampling as tensors.

Whether the server supports a tensor is for the server to say; its refusal comes back under the name
of the field (`inflight_openai.errors`). Parsing may take seconds (large bodies, long texts, slow
chat templates): call it from a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_openai.chat import RESERVED, read_messages
from inflight_openai.errors import (
    ApiError,
    bad_field,
    checked_text,
    kind_of,
    model_not_found,
    unsupported,
)
from inflight_openai.prompts import PromptReader
from inflight_openai.schema import (
    CHAT,
    COMPLETION,
    INT32_MAX,
    Body,
    UnknownFields,
    is_empty,
    read_body,
    shown_number,
)
from inflight_openai.settings import MAX_PROMPTS, FrontSettings
from inflight_protocol import aliases as penalties
from inflight_protocol.sampling import SAMPLING_OPTIONS

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat has none."""

_MAX_REQUEST_ID = 128  # characters
_THINKING_VARIABLES = ("enable_thinking", "thinking")  # of Qwen3's and GLM's templates; DeepSeek's

_FIELD_TO_TENSOR = {
    **{field: tensor for field, tensor in SAMPLING_OPTIONS.items() if field != "seed"},
    "min_tokens": "min_length",
    "stop": "stop_words",
    "bad_words": "bad_words",
    "cache_salt": "cache_salt",
}
"""Fields whose value is the tensor's."""

_LOWEST_TOP_P = 1e-6
"""Leaves the likeliest token, as OpenAI's 0 does; the server's 0 leaves all tokens."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP request: prompts as ids, and the tensors that go with each of them.

    ``includes_usage``: the stream ends with the usage; ``has_running_usage``: so does every event.
    ``echoes``: texts of the prompts, if every answer is to begin with its own.
    ``request_id``: the client's own. ``has_token_ids``: answers include their ids and the prompts';
    ``shows_ids``: log probabilities name tokens by id.
    ``guide_field``: the field of the body that held the guide.
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
    request_id: str | None = None
    has_token_ids: bool = False
    shows_ids: bool = False
    guide_field: str = "response_format"


def parse_completion(
    raw: bytes, reader: PromptReader, unknown: UnknownFields, settings: FrontSettings
) -> GenerationRequest:
    """The request to ``/v1/completions``; `ApiError` names what is wrong."""
    body = read_body(raw, COMPLETION, unknown)
    _check_model(body, reader)
    given = _split_prompts(body.prompt)
    _template_variables(body)  # checked, though there is no template
    max_tokens = _max_tokens(body) or DEFAULT_COMPLETION_TOKENS
    adds_special = body.add_special_tokens is not False
    ids = [_completion_prompt(each, reader, adds_special) for each in given]
    prompts = _truncated(body, reader, ids, max_tokens)
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "not together with logprobs: prompts have no log probabilities")
    request = _request(body, COMPLETION, reader, prompts, max_tokens, body.logprobs, unknown)
    if not body.echo:
        return request
    texts = (each if isinstance(each, str) else reader.decode(each) for each in given)
    return replace(request, echoes=tuple(texts))


def parse_chat(
    raw: bytes, reader: PromptReader, unknown: UnknownFields, settings: FrontSettings
) -> GenerationRequest:
    """The request to ``/v1/chat/completions``; `ApiError` names what is wrong."""
    body = read_body(raw, CHAT, unknown)
    _check_model(body, reader)
    messages, variables = read_messages(body.messages), _template_variables(body)
    ids = reader.encode_messages(
        messages, variables, add_special_tokens=bool(body.add_special_tokens)
    )
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "only together with logprobs = true")
    log_probs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = _max_tokens(body)
    [prompt] = _truncated(body, reader, [ids], max_tokens or 1)
    room = max(1, reader.limits.max_seq_len - len(prompt))
    max_tokens = max_tokens or min(room, settings.default_max_tokens or room)
    return _request(body, CHAT, reader, [prompt], max_tokens, log_probs, unknown)


def _max_tokens(body: Body) -> int | None:
    """OpenAI's newer name of ``max_tokens`` wins, as with other servers."""
    max_tokens: int | None = body.max_completion_tokens or body.max_tokens
    return max_tokens


def _truncated(
    body: Body, reader: PromptReader, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[int, ...]]:
    """The prompts, or their last ``truncate_prompt_tokens``, as vLLM has it."""
    name, num_kept, limits = "truncate_prompt_tokens", body.truncate_prompt_tokens, reader.limits
    if num_kept is None:
        return [tuple(prompt) for prompt in prompts]
    if not -1 <= num_kept <= limits.max_seq_len:
        raise bad_field(name, f"{shown_number(num_kept)} is outside -1..{limits.max_seq_len}")
    if num_kept == 0:
        raise bad_field(name, "0 leaves no prompt; -1 keeps what fits")
    if num_kept == -1:
        num_kept = max(1, min(limits.max_input_len, limits.max_seq_len - max_tokens))
    return [tuple(prompt[-num_kept:]) for prompt in prompts]


def _request(
    body: Body,
    call: str,
    reader: PromptReader,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    num_log_probs: int | None,
    unknown: UnknownFields,
) -> GenerationRequest:
    """What the two calls have in common.

    ``num_log_probs``: likeliest tokens in each place; None for no log probabilities.
    """
    is_chat = call == CHAT
    _check_tools(body)
    values = _sampling(body, reader)
    num_answers = body.n or 1
    if num_answers > 1:
        values["num_return_sequences"] = num_answers
    if len(prompts) * num_answers > MAX_PROMPTS:
        raise bad_field("n", f"prompts x n may be at most {MAX_PROMPTS}")
    if (body.best_of or num_answers) != num_answers:
        raise unsupported("best_of", "only what n says: there is no choice among more answers")
    if num_log_probs is not None:
        values["return_log_probs"] = True
    if num_log_probs:
        values["num_top_log_probs"] = num_log_probs
    guide_field, guide = _read_guide(body, unknown)
    includes_usage, has_running_usage = _stream_options(body, unknown)
    for prompt in prompts:
        reader.limits.check(len(prompt), max_tokens, "messages" if is_chat else "prompt")
    return GenerationRequest(
        is_chat=is_chat,
        prompts=tuple(prompts),
        max_tokens=max_tokens,
        values=values | guide,
        num_answers=num_answers,
        is_streaming=bool(body.stream),
        includes_usage=includes_usage,
        has_log_probs=num_log_probs is not None,
        num_top_log_probs=num_log_probs or 0,
        has_running_usage=has_running_usage,
        request_id=_request_id(body),
        has_token_ids=bool(body.return_token_ids),
        shows_ids=bool(body.return_tokens_as_token_ids),
        guide_field=guide_field,
    )


def _check_model(body: Body, reader: PromptReader) -> None:
    if body.model is None:
        raise ApiError(400, "you must provide a model parameter", "model", "missing_parameter")
    if body.model != reader.name:
        raise model_not_found(reader.name)


def _request_id(body: Body) -> str | None:
    value: str | None = body.request_id
    if value is not None and not (len(value) <= _MAX_REQUEST_ID and value.isprintable()):
        raise bad_field("request_id", f"expected at most {_MAX_REQUEST_ID} printable characters")
    return value


def _check_tools(body: Body) -> None:
    """`ApiError` where the model may be asked to call a tool."""
    for list_name, choice_name in (("tools", "tool_choice"), ("functions", "function_call")):
        choice = getattr(body, choice_name)
        if not is_empty(getattr(body, list_name)) and choice != "none":
            raise unsupported(list_name)
        if not (is_empty(choice) or choice in ("none", "auto")):
            raise unsupported(choice_name)


def _stream_options(body: Body, unknown: UnknownFields) -> tuple[bool, bool]:
    """Whether the stream ends with its usage, and whether every event has the usage so far."""
    name = "stream_options"
    options = {key: each for key, each in (body.stream_options or {}).items() if not is_empty(each)}
    if options and not body.stream:
        raise bad_field(name, "only together with stream = true")
    at_end, running = (options.pop(k, False) for k in ("include_usage", "continuous_usage_stats"))
    if {type(at_end), type(running)} != {bool}:
        raise bad_field(name, 'expected {"include_usage": true or false}')
    if options.pop("include_obfuscation", False):
        raise unsupported(f"{name}.include_obfuscation")
    for key in options:
        unknown.see(f"{name}.{key}")
    return at_end, at_end and running  # the second is vLLM's, and nothing there without the first


# Prompts and what fills the chat template.


def _split_prompts(value: Any) -> list[Any]:
    """One prompt or several: a string, ids, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad_field("prompt", "expected a string, a list of token ids, or a list of either")
    if len(value) > MAX_PROMPTS:
        raise bad_field("prompt", f"{len(value)} prompts, at most {MAX_PROMPTS} are taken")
    return value


def _completion_prompt(value: Any, reader: PromptReader, adds_special: bool) -> tuple[int, ...]:
    if isinstance(value, list):
        if not value or not all(_is_id(each) and 0 <= each <= INT32_MAX for each in value):
            raise bad_field("prompt", "a list of token ids holds whole numbers from 0")
        return tuple(value)
    text = checked_text("prompt", value)
    ids = reader.encode(text, "prompt", add_special_tokens=adds_special)
    if not ids:
        raise bad_field("prompt", "empty: a prompt needs at least one token")
    return tuple(ids)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _template_variables(body: Body) -> Mapping[str, Any]:
    """``chat_template_kwargs``, and the fields that are such a variable by themselves."""
    variables: dict[str, Any] = {}
    for name in ("enable_thinking", "thinking", "think", "reasoning"):
        value = getattr(body, name)
        if value is False or not is_empty(value):
            variables |= _thinking(name, value)
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    variables |= body.chat_template_kwargs or {}
    for each in RESERVED:
        if each in variables:
            raise bad_field(f"chat_template_kwargs.{each}", "the server sets it itself")
    return variables


def _thinking(name: str, value: Any) -> dict[str, Any]:
    """The template's variables for a field that says whether, or how much, the model thinks.

    Objects are those of GLM's and Anthropic's APIs, ``thinking: {"type": "enabled"}``, and of
    OpenRouter's, ``reasoning: {"effort": "low", "enabled": true}``.
    """
    words = (name,) if name in ("enable_thinking", "thinking") else _THINKING_VARIABLES
    effort = None
    if isinstance(value, str) and name == "think":  # Ollama's; "low" to "high"
        effort, value = value, True
    elif isinstance(value, dict) and name == "thinking":
        words, kind = _THINKING_VARIABLES, value.get("type")
        value = {"enabled": True, "disabled": False}.get(kind) if isinstance(kind, str) else None
    elif isinstance(value, dict) and name == "reasoning":
        effort, value = value.get("effort"), value.get("enabled")
        effort = None if is_empty(effort) else checked_text(f"{name}.effort", effort)
        value = False if value is None and effort == "none" else value
    if value is not None and not isinstance(value, bool):
        raise bad_field(name, f"expected true or false, got {kind_of(value)}")
    variables: dict[str, Any] = {} if value is None else dict.fromkeys(words, value)
    return variables if effort is None else {**variables, "reasoning_effort": effort}


# Sampling.


def _sampling(body: Body, reader: PromptReader) -> dict[str, object]:
    values: dict[str, Any] = {}
    for field, tensor in _FIELD_TO_TENSOR.items():
        if (value := getattr(body, field)) is not None:
            values[tensor] = value
    values |= penalties.to_wire(values)
    # OpenAI's default is to draw. Without any filter the server takes the likeliest token,
    # whatever the temperature, whose default is 1 with both.
    values["runtime_top_p"] = max(values.get("runtime_top_p", 1.0), _LOWEST_TOP_P)
    if values.get("runtime_top_k") == -1:  # vLLM's value for all tokens
        values["runtime_top_k"] = 0
    seed = body.sampling_seed if body.seed is None else body.seed
    if seed is not None:
        values["random_seed"] = seed % 2**64
    if not is_empty(body.logit_bias):
        values["embedding_bias"] = _embedding_bias(body.logit_bias, reader.limits.vocab_size)
    if body.include_stop_str_in_output or body.no_stop_trim:
        values["include_stop_str_in_output"] = True
    if body.skip_special_tokens is False:
        values["skip_special_tokens"] = False
    return values | _end_tokens(body, reader)


def _end_tokens(body: Body, reader: PromptReader) -> dict[str, object]:
    """The tokens that end the answer: the client's, and the model's unless they are ignored."""
    limits, values = reader.limits, dict[str, object]()
    given = [] if is_empty(body.stop_token_ids) else body.stop_token_ids
    bound = limits.vocab_size - 1
    if not isinstance(given, list) or not all(_is_id(i) and 0 <= i <= bound for i in given):
        raise bad_field("stop_token_ids", f"expected a list of token ids from 0 to {bound}")
    stop_token_ids = set(given)
    if not body.ignore_eos:
        values["end_id"] = limits.end_id
        stop_token_ids |= set(limits.stop_token_ids)
    if stop_token_ids:
        values["stop_token_ids"] = sorted(stop_token_ids)
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


# Guided decoding.

_Guide = dict[str, object]  # its two tensors; empty for none

_META = re.compile(r"([\\.+*?()|\[\]{}^$])")
_STRUCTURED_OFF = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
    "structural_tag",
)


def _read_guide(body: Body, unknown: UnknownFields) -> tuple[str, _Guide]:
    """The guide of a request and the field that held it; `ApiError` if several do."""
    found: list[tuple[str, _Guide]] = []
    for name, read in _GUIDE_FIELDS.items():
        value = getattr(body, name)
        if not is_empty(value) and (guide := read(name, value)):
            found.append((name, guide))
    for key, value in (body.structured_outputs or {}).items():
        name = f"structured_outputs.{key}"
        if is_empty(value) or key == "disable_fallback":
            continue
        if key in _STRUCTURED_OUTPUTS:
            found.append((name, _STRUCTURED_OUTPUTS[key](name, value)))
        elif key in _STRUCTURED_OFF:
            raise unsupported(name)
        else:
            unknown.see(name)
    if len(found) > 1:
        raise bad_field(found[1][0], f"given beside {found[0][0]}: an answer has one guide")
    return found[0] if found else ("response_format", {})


def _guide(kind: str, text: str) -> _Guide:
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}


def _schema(name: str, value: Any) -> _Guide:
    """A JSON schema, as an object or as its text."""
    if isinstance(value, str):
        return _guide("json_schema", checked_text(name, value))
    if not isinstance(value, dict):
        raise bad_field(name, "the schema must be an object")
    try:
        return _guide("json_schema", json.dumps(value, separators=(",", ":")))
    except RecursionError:  # parsing it needed a few frames less
        raise bad_field(name, "the schema is nested too deeply") from None


def _object(name: str, value: Any) -> _Guide:
    if value is not True:
        raise bad_field(name, "expected true or false")
    # The server's own "json" allows arrays as well.
    return _schema(name, {"type": "object"})


def _regex(name: str, value: Any) -> _Guide:
    return _guide("regex", checked_text(name, value))


def _grammar(name: str, value: Any) -> _Guide:
    return _guide("ebnf_grammar", checked_text(name, value))


def _choice(name: str, value: Any) -> _Guide:
    if not isinstance(value, list):
        raise bad_field(name, "expected a list of strings")
    texts = [_META.sub(r"\\\1", checked_text(name, each)) for each in value]
    return _guide("regex", f"({'|'.join(texts)})")


def _response_format(name: str, value: Any) -> _Guide:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        # OpenAI promises an object. Other servers take its schema right here.
        schema = value.get("schema")
        if not isinstance(schema, (dict, NoneType)):
            raise bad_field(name, "schema must be an object")
        return _object(name, True) if schema is None else _schema(name, schema)
    if kind == "json_schema":
        holder = value.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise bad_field(name, "json_schema.schema must be an object")
        return _schema(name, schema)
    if kind in ("regex", "ebnf"):
        return (_regex if kind == "regex" else _grammar)(f"{name}.{kind}", value.get(kind))
    raise bad_field(name, "type must be text, json_object, json_schema, regex or ebnf")


_Reader = Callable[[str, Any], _Guide]

_STRUCTURED_OUTPUTS: Mapping[str, _Reader] = {
    "json": _schema,
    "json_object": _object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_GUIDE_FIELDS: Mapping[str, _Reader] = {
    "response_format": _response_format,
    **{f"guided_{name}": read for name, read in _STRUCTURED_OUTPUTS.items()},
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
    "json_schema": _schema,
}
"""Fields of OpenAI, then of vLLM, SGLang (three) and llama.cpp."""
