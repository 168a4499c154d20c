"""From the body of a request to a `GenerationJob`: the fields that are honoured.

What becomes of the others, `inflight_openai.field_table` says.

Sampling fields become tensors of the wire (`inflight_protocol`); whether the server honours
one is for the server to say, and its refusal comes back under OpenAI's name of the field.

All of it may take seconds (large bodies, long texts, slow chat templates): call it from a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_openai.chat_messages import read_messages
from inflight_openai.chat_template import RESERVED
from inflight_openai.errors import ApiError, bad_field, model_not_found, unsupported
from inflight_openai.field_table import CHAT, COMPLETION, is_empty
from inflight_openai.fields import Body, checked_text, kind_of
from inflight_openai.guides import read_guide
from inflight_openai.prompts import PromptReader
from inflight_openai.settings import MAX_PROMPTS, MAX_STOP_STRINGS, MAX_TOP_LOG_PROBS
from inflight_protocol import aliases as penalties

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat has none."""

_INT32_MAX = 2**31 - 1
_THINKING_VARIABLES = ("enable_thinking", "thinking")  # of Qwen3's and GLM's templates; DeepSeek's
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
    "no_repeat_ngram_size": ("no_repeat_ngram_size", 0, _INT32_MAX),
}

_SEEDS = ("seed", "sampling_seed")  # the second is SGLang's
_KEEPS_STOP = ("include_stop_str_in_output", "no_stop_trim")

_MAX_REQUEST_ID = 128  # characters


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request: prompts as ids, and the tensors that go with each of them.

    ``includes_usage``: the stream ends with it; ``has_running_usage``: every event tells it so far.
    ``echoes``: texts of the prompts, if every answer is to begin with its own.
    ``request_id``: what the client calls it. ``has_token_ids``: answers tell their ids and the
    prompts'; ``shows_ids``: log probabilities name tokens by id.
    ``guide_field``: what the client calls the guide of its answer.
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


def parse_completion(body: Body, reader: PromptReader) -> GenerationJob:
    """The job of ``/v1/completions``."""
    _check_model(body, reader)
    given = _split_prompts(body.take("prompt"))
    _template_variables(body)  # there is no template
    adds_special = body.flag("add_special_tokens", default=True)
    max_tokens = _max_tokens(body) or DEFAULT_COMPLETION_TOKENS
    ids = [_completion_prompt(each, reader, adds_special) for each in given]
    prompts = _truncated(body, reader, ids, max_tokens)
    log_probs = body.integer("logprobs", 0, MAX_TOP_LOG_PROBS)
    is_echoing = body.flag("echo")
    if is_echoing and log_probs is not None:
        raise unsupported("echo", "not together with logprobs: those of prompts are not told")
    job = _job(body, reader, prompts, max_tokens, log_probs, COMPLETION)
    if not is_echoing:
        return job
    texts = (each if isinstance(each, str) else reader.decode(each) for each in given)
    return replace(job, echoes=tuple(texts))


def parse_chat(body: Body, reader: PromptReader, default_max_tokens: int | None) -> GenerationJob:
    """The job of ``/v1/chat/completions``."""
    _check_model(body, reader)
    messages, variables = read_messages(body.take("messages")), _template_variables(body)
    adds_special = body.flag("add_special_tokens")
    ids = reader.encode_messages(messages, variables, add_special_tokens=adds_special)
    num_top = body.integer("top_logprobs", 0, MAX_TOP_LOG_PROBS)
    has_log_probs = body.flag("logprobs")
    if num_top and not has_log_probs:
        raise bad_field("top_logprobs", "only together with logprobs = true")
    log_probs = (num_top or 0) if has_log_probs else None
    max_tokens = _max_tokens(body)
    [prompt] = _truncated(body, reader, [ids], max_tokens or 1)
    room = max(1, reader.limits.max_seq_len - len(prompt))
    max_tokens = max_tokens or min(room, default_max_tokens or room)
    return _job(body, reader, [prompt], max_tokens, log_probs, CHAT)


def _max_tokens(body: Body) -> int | None:
    """OpenAI's newer name of ``max_tokens`` wins over it, as elsewhere."""
    old = body.integer("max_tokens", 1, _INT32_MAX)
    return body.integer("max_completion_tokens", 1, _INT32_MAX) or old


def _truncated(
    body: Body, reader: PromptReader, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[int, ...]]:
    """The prompts, or their last ``truncate_prompt_tokens``, as vLLM has it."""
    limits = reader.limits
    num_kept = body.integer("truncate_prompt_tokens", -1, limits.max_seq_len)
    if num_kept == 0:
        raise bad_field("truncate_prompt_tokens", "0 leaves no prompt; -1 keeps what fits")
    if num_kept == -1:
        num_kept = max(1, min(limits.max_input_len, limits.max_seq_len - max_tokens))
    return [tuple(prompt[-(num_kept or 0) :]) for prompt in prompts]


def _check_tools(body: Body) -> None:
    """`ApiError` where a model may be meant to call a tool."""
    for list_name, choice_name in (("tools", "tool_choice"), ("functions", "function_call")):
        has_tools, choice = not is_empty(body.take(list_name)), body.take(choice_name)
        if has_tools and choice != "none":
            raise unsupported(list_name)
        if not (is_empty(choice) or choice in ("none", "auto")):
            raise unsupported(choice_name)


def _template_variables(body: Body) -> Mapping[str, Any]:
    """``chat_template_kwargs``, and fields that stand for such a variable by themselves."""
    variables: dict[str, Any] = {}
    for name in ("enable_thinking", "thinking", "think", "reasoning"):
        value = body.take(name)
        if value is False or not is_empty(value):
            variables |= _thinking(name, value)
    if effort := body.text("reasoning_effort"):
        variables["reasoning_effort"] = effort
    name = "chat_template_kwargs"
    variables |= body.mapping(name)
    for each in RESERVED:
        if each in variables:
            raise bad_field(f"{name}.{each}", "the server sets it itself")
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


def _job(
    body: Body,
    reader: PromptReader,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    num_log_probs: int | None,
    call: str,
) -> GenerationJob:
    """Everything that the two calls have in common; ends with the fields that nobody took.

    ``num_log_probs``: likeliest tokens to tell in each place; None for no log probabilities.
    """
    _check_tools(body)
    values = _sampling(body, reader)
    num_answers = body.integer("n", 1, MAX_PROMPTS) or 1
    if num_answers > 1:
        values["num_return_sequences"] = num_answers
    if len(prompts) * num_answers > MAX_PROMPTS:
        raise bad_field("n", f"prompts x n may be at most {MAX_PROMPTS}")
    if (body.integer("best_of", 1, _INT32_MAX) or num_answers) != num_answers:
        raise unsupported("best_of", "only what n says: there is no choice among more answers")
    if num_log_probs is not None:
        values["return_log_probs"] = True
    if num_log_probs:
        values["num_top_log_probs"] = num_log_probs
    guide_field, guide = read_guide(body)
    values |= guide
    is_streaming = body.flag("stream")
    includes_usage, has_running_usage = _stream_options(body, is_streaming)
    job = GenerationJob(
        is_chat=call == CHAT,
        prompts=tuple(prompts),
        max_tokens=max_tokens,
        values=values,
        num_answers=num_answers,
        is_streaming=is_streaming,
        includes_usage=includes_usage,
        has_log_probs=num_log_probs is not None,
        num_top_log_probs=num_log_probs or 0,
        has_running_usage=has_running_usage,
        request_id=_request_id(body),
        has_token_ids=body.flag("return_token_ids"),
        shows_ids=body.flag("return_tokens_as_token_ids"),
        guide_field=guide_field,
    )
    body.check_rest(call)
    for prompt in prompts:
        reader.limits.check(len(prompt), max_tokens, "messages" if job.is_chat else "prompt")
    return job


def _request_id(body: Body) -> str | None:
    name = "request_id"
    value = body.text(name)
    if value is not None and not (len(value) <= _MAX_REQUEST_ID and value.isprintable()):
        raise bad_field(name, f"expected at most {_MAX_REQUEST_ID} characters that can be printed")
    return value


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
    seeds = [body.integer(name, -_INT64_MAX - 1, _INT64_MAX) for name in _SEEDS]
    for seed in seeds:
        if seed is not None:
            values.setdefault("random_seed", seed % 2**64)
    if not is_empty(bias := body.take("logit_bias")):
        values["embedding_bias"] = _embedding_bias(bias, reader.limits.vocab_size)
    return values | _ends(body, reader) | _texts(body)


def _texts(body: Body) -> dict[str, object]:
    """What is said of texts: those that end the answer or may not be in it, and how it is told."""
    values: dict[str, object] = {}
    if stop := _stop_strings(body.take("stop")):
        values["stop_words"] = stop
    if bad_words := _strings("bad_words", body.take("bad_words")):
        values["bad_words"] = bad_words
    if any([body.flag(name) for name in _KEEPS_STOP]):
        values["include_stop_str_in_output"] = True
    if not body.flag("skip_special_tokens", default=True):
        values["skip_special_tokens"] = False
    if (salt := body.text("cache_salt")) is not None:
        values["cache_salt"] = salt
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
    strings = _strings("stop", [value] if value and isinstance(value, str) else value)
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_field("stop", f"{len(strings)} strings, at most {MAX_STOP_STRINGS} are taken")
    if "" in strings:
        raise bad_field("stop", "an empty string would stop everything")
    return strings


def _strings(name: str, value: Any) -> list[str]:
    if is_empty(value):
        return []
    if not isinstance(value, list):
        raise bad_field(name, f"expected a list of strings, got {kind_of(value)}")
    return [checked_text(name, each) for each in value]


def _ends(body: Body, reader: PromptReader) -> dict[str, object]:
    """The tokens that end the answer: those of the model, unless they are to be ignored, and those
    the client names, as vLLM's may."""
    limits, values = reader.limits, dict[str, object]()
    given = body.take("stop_token_ids")
    stop_token_ids = _stop_token_ids([] if is_empty(given) else given, limits.vocab_size)
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


def _stream_options(body: Body, is_streaming: bool) -> tuple[bool, bool]:
    """Whether the stream ends with its usage, and whether every event tells it so far."""
    name = "stream_options"
    options = {key: each for key, each in body.mapping(name).items() if not is_empty(each)}
    if options and not is_streaming:
        raise bad_field(name, "only together with stream = true")
    ends, runs = (options.pop(key, False) for key in ("include_usage", "continuous_usage_stats"))
    if {type(ends), type(runs)} != {bool}:
        raise bad_field(name, 'expected {"include_usage": true or false}')
    if options.pop("include_obfuscation", False):
        raise unsupported(f"{name}.include_obfuscation")
    for key in options:
        body.unknown.see(f"{name}.{key}")
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


def _completion_prompt(value: Any, reader: PromptReader, adds_special: bool) -> tuple[int, ...]:
    if isinstance(value, list):
        if not value or not all(_is_id(each) and 0 <= each <= _INT32_MAX for each in value):
            raise bad_field("prompt", "a list of token ids holds whole numbers from 0")
        return tuple(value)
    text = checked_text("prompt", value)
    ids = reader.encode(text, "prompt", add_special_tokens=adds_special)
    if not ids:
        raise bad_field("prompt", "empty: a prompt needs at least one token")
    return tuple(ids)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
