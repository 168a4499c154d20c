"""From the body of a request to a `GenerationRequest`: prompts as token ids, sampling as tensors.

Whether the server supports a tensor is for the server to say; its refusal comes back under the name
of the field (`inflight_openai.errors`). Parsing may take seconds (large bodies, long texts, slow
chat templates): call it from a thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_openai.chat import RESERVED
from inflight_openai.errors import ApiError, bad_field, kind_of, model_not_found, unsupported
from inflight_openai.prompts import PromptReader
from inflight_openai.schema import (
    Body,
    ChatBody,
    CompletionBody,
    ToolChoice,
    UnknownFields,
    read_body,
    read_messages,
    read_object,
    read_tools,
    shown_number,
)
from inflight_openai.settings import MAX_PROMPTS, FrontSettings
from inflight_openai.tools.reader import Reader
from inflight_protocol import aliases as penalties
from inflight_protocol.sampling import SAMPLING_OPTIONS

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat has none."""

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
class AnswerFormat:
    """How the answers of a chat are taken apart.

    ``must_call``: nothing but calls; ``named``: the tool that must be called, if the client named
    it. ``is_older``: a call is OpenAI's older ``function_call``."""

    new_reader: Callable[[], Reader]
    one_call: bool = False
    must_call: bool = False
    named: str = ""
    has_thoughts: bool = True
    is_older: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP request: prompts as ids, and the tensors that go with each of them.

    ``model``: what the client called it, or one of its adapters.
    ``includes_usage``: the stream ends with the usage; ``has_running_usage``: so does every event.
    ``echoes``: texts of the prompts, if every answer is to begin with its own.
    ``request_id``: the client's own. ``has_token_ids``: answers include their ids and the prompts';
    ``shows_ids``: log probabilities name tokens by id.
    ``guide_field``: the field of the body that held the guide. ``answer``: None if an answer is
    text and nothing else. ``response_fields``: what a response of ``/v1/responses`` repeats of its
    request; None for the other calls.
    ``num_prompt_log_probs``: likeliest tokens in each place of the prompt (vLLM's field). An answer
    of ``max_tokens`` 0 is left out.
    ``num_answers``: to each prompt; ``num_shown``: the client gets so many, the likeliest by token;
    None for all.
    """

    model: str
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
    answer: AnswerFormat | None = None
    response_fields: Mapping[str, Any] | None = None
    num_prompt_log_probs: int | None = None
    num_shown: int | None = None

    @property
    def needs_prompt_log_probs(self) -> bool:
        """Whether the tokens of the prompts have log probabilities in the answer."""
        return self.num_prompt_log_probs is not None or (bool(self.echoes) and self.has_log_probs)

    @property
    def shows_usage(self) -> bool:
        """Whether the client is told the numbers of tokens."""
        return not self.is_streaming or self.includes_usage or self.response_fields is not None

    @property
    def num_server_top(self) -> int:
        """Likeliest tokens that the server tells in each place."""
        return max(self.num_top_log_probs, self.num_prompt_log_probs or 0)


def parse_completion(
    raw: bytes, reader: PromptReader, unknown: UnknownFields, settings: FrontSettings
) -> GenerationRequest:
    """The request to ``/v1/completions``; `ApiError` names what is wrong."""
    body = read_body(raw, CompletionBody, unknown)
    _check_model(body, reader)
    if read_tools(body).tools:
        raise unsupported("tools", "only chats have tools: /v1/chat/completions")
    _template_variables(body)  # checked, though there is no template
    max_tokens = body.max_completion_tokens
    max_tokens = body.max_tokens if max_tokens is None else max_tokens
    max_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    adds_special = body.add_special_tokens is not False
    ids = [
        each
        if isinstance(each, list)
        else reader.encode(each, "prompt", add_special_tokens=adds_special)
        for each in body.prompt
    ]
    if not all(ids):
        raise bad_field("prompt", "empty: a prompt needs at least one token")
    texts = (
        each if isinstance(each, str) else reader.decode(each, skip_special_tokens=False)
        for each in body.prompt
    )
    echoes = tuple(texts) if body.echo else ()
    prompts = _truncated(body, reader, ids, max_tokens)
    return _request(body, reader, prompts, max_tokens, body.logprobs, unknown, echoes)


def parse_chat(
    raw: bytes, reader: PromptReader, unknown: UnknownFields, settings: FrontSettings
) -> GenerationRequest:
    """The request to ``/v1/chat/completions``; `ApiError` names what is wrong."""
    body = read_body(raw, ChatBody, unknown)
    _check_model(body, reader)
    messages, variables = read_messages(body.messages), _template_variables(body)
    choice = read_tools(body)
    ids = reader.encode_messages(
        messages, variables, choice.given, add_special_tokens=bool(body.add_special_tokens)
    )
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "only together with logprobs = true")
    log_probs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    [prompt] = _truncated(body, reader, [ids], max_tokens or 1)
    room = max(1, reader.limits.room_after(len(prompt)))
    max_tokens = max_tokens or min(room, settings.default_max_tokens or room)
    request = _request(body, reader, [prompt], max_tokens, log_probs, unknown)
    return _with_answer_format(request, body, reader, choice)


def parse_tokenize(
    raw: bytes, reader: PromptReader, unknown: UnknownFields
) -> tuple[list[int], list[str] | None]:
    """The ids of the prompt or the messages of a body, as the model would read them, and if it asks
    for them their names in the vocabulary."""
    content = read_object(raw)
    ids = _ids_of(content, raw, reader, unknown)
    return ids, reader.names(ids) if content.get("return_token_strs") is True else None


def _ids_of(
    content: Mapping[str, Any], raw: bytes, reader: PromptReader, unknown: UnknownFields
) -> list[int]:
    if "messages" in content:
        body = read_body(raw, ChatBody, unknown)
        messages, variables = read_messages(body.messages), _template_variables(body)
        return reader.encode_messages(
            messages,
            variables,
            read_tools(body).given,
            add_special_tokens=bool(body.add_special_tokens),
        )
    prompt, adds_special = content.get("prompt"), content.get("add_special_tokens") is not False
    if not isinstance(prompt, str):
        raise bad_field("prompt", f"expected a string, got {kind_of(prompt)}")
    return reader.encode(prompt, "prompt", add_special_tokens=adds_special)


def parse_detokenize(raw: bytes, reader: PromptReader) -> str:
    """The text of the ``tokens`` of a body."""
    ids, bound = read_object(raw).get("tokens"), reader.limits.vocab_size - 1
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= bound for i in ids):
        raise bad_field("tokens", f"expected a list of token ids from 0 to {bound}")
    return reader.decode(ids)


def _with_answer_format(
    request: GenerationRequest, body: ChatBody, reader: PromptReader, choice: ToolChoice
) -> GenerationRequest:
    """``request`` with what its tools and the model's thoughts change: how answers are read, and
    the guide."""
    formats, tools = reader.formats, choice.tools
    is_separate = body.separate_reasoning is not False
    if not is_separate and not formats.is_harmony:
        formats = replace(formats, thoughts=None)
    if not (tools or formats.thoughts):
        return request
    values = dict(request.values)
    is_thinking = reader.ends_within(request.prompts[0], formats.thoughts)
    is_strict = formats.writes_json and any(tool.is_strict for tool in tools)
    kind, text = (values.get(f"guided_decoding_guide{end}") for end in ("_type", ""))
    is_guided = choice.must_call or is_strict or bool(tools and kind)
    guide_field = request.guide_field
    if is_guided or kind:
        content = _content_structure(str(kind), str(text)) if kind else None
        if kind and content is None and tools:
            raise unsupported(guide_field, f"{kind} cannot be used together with tools")
        if content is not None or is_guided:
            structure = formats.structure(
                tools,
                must_call=choice.must_call,
                one_call=choice.one_call,
                is_thinking=is_thinking,
                content=content,
            )
            values["guided_decoding_guide_type"] = "structural_tag"
            values["guided_decoding_guide"] = json.dumps({"format": structure})
            guide_field = "tools" if is_guided else guide_field
    marks = formats.marks(has_tools=bool(tools), is_guided=is_guided)
    if formats.is_harmony or reader.has_special(marks):
        values["skip_special_tokens"] = False
    answer = AnswerFormat(
        new_reader=lambda: formats.new_reader(tools, is_guided=is_guided, is_thinking=is_thinking),
        one_call=choice.one_call,
        must_call=choice.must_call,
        named=tools[0].name if choice.is_named else "",
        has_thoughts=body.include_reasoning is not False,
        is_older=choice.is_older,
    )
    return replace(request, values=values, guide_field=guide_field, answer=answer)


def _content_structure(kind: str, guide: str) -> dict[str, Any] | None:
    """A guide as part of another one; None if it cannot be."""
    if kind == "json_schema":
        try:
            return {"type": "json_schema", "json_schema": json.loads(guide)}
        except ValueError:
            raise bad_field("response_format", "the schema is not JSON") from None
    return {"type": "regex", "pattern": guide} if kind == "regex" else None


def _truncated(
    body: Body, reader: PromptReader, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[int, ...]]:
    """The prompts, or their last ``truncate_prompt_tokens``, as vLLM has it."""
    name, num_kept, limits = "truncate_prompt_tokens", body.truncate_prompt_tokens, reader.limits
    if num_kept is None:
        return [tuple(prompt) for prompt in prompts]
    longest = max(limits.max_seq_len, limits.max_input_len)
    if not -1 <= num_kept <= longest:
        raise bad_field(name, f"{shown_number(num_kept)} is outside -1..{longest}")
    if num_kept == 0:
        raise bad_field(name, "0 leaves no prompt; -1 keeps what fits")
    if num_kept == -1:
        longest = limits.max_input_len
        if limits.num_start_ids is None:
            longest = min(longest, limits.max_seq_len - max_tokens)
        num_kept = max(1, longest)
    return [tuple(prompt[-num_kept:]) for prompt in prompts]


def _request(
    body: Body,
    reader: PromptReader,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    num_log_probs: int | None,
    unknown: UnknownFields,
    echoes: tuple[str, ...] = (),
) -> GenerationRequest:
    """What the two calls have in common.

    ``num_log_probs``: likeliest tokens in each place; None for no log probabilities.
    """
    is_chat = isinstance(body, ChatBody)
    guide_field, guide = _guide(body, unknown)
    values = _sampling(body, reader) | guide
    assert body.model is not None, "checked before"
    if body.model != reader.name:
        values["lora_name"] = body.model
    num_answers, num_shown = _num_answers(body)
    if num_answers > 1:
        values["num_return_sequences"] = num_answers
    if len(prompts) * num_answers > MAX_PROMPTS:
        name = "n" if num_shown is None else "best_of"
        raise bad_field(name, f"prompts x {name} may be at most {MAX_PROMPTS}")
    if num_log_probs is not None or num_shown is not None:
        values["return_log_probs"] = True
    if body.prompt_logprobs is not None and body.stream:
        raise unsupported("prompt_logprobs", "not in a stream: its prompt would be read first")
    if num_top := max(num_log_probs or 0, body.prompt_logprobs or 0):
        values["num_top_log_probs"] = num_top
    if body.prompt_logprobs is not None or (echoes and num_log_probs is not None):
        _refuse_for_encoder(body, reader)
        values["return_context_log_probs"] = True
    includes_usage, has_running_usage = _stream_options(body, unknown)
    for prompt in prompts:
        reader.limits.check(len(prompt), max(max_tokens, 1), "messages" if is_chat else "prompt")
    return GenerationRequest(
        model=body.model,
        is_chat=is_chat,
        prompts=tuple(prompts),
        max_tokens=max_tokens,
        values=values,
        num_answers=num_answers,
        is_streaming=bool(body.stream),
        includes_usage=includes_usage,
        has_log_probs=num_log_probs is not None,
        num_top_log_probs=num_log_probs or 0,
        has_running_usage=has_running_usage,
        echoes=echoes,
        request_id=body.request_id,
        has_token_ids=bool(body.return_token_ids),
        shows_ids=bool(body.return_tokens_as_token_ids),
        guide_field=guide_field,
        num_prompt_log_probs=body.prompt_logprobs,
        num_shown=num_shown,
    )


def _refuse_for_encoder(body: Body, reader: PromptReader) -> None:
    """Of a prompt that an encoder reads the model draws no token."""
    if reader.limits.num_start_ids is not None:
        field = "prompt_logprobs" if body.prompt_logprobs is not None else "echo"
        raise unsupported(field, "an encoder reads the prompt, whose tokens have no probabilities")


def _num_answers(body: Body) -> tuple[int, int | None]:
    """Answers to each prompt, and how many of them the client gets, None for all."""
    num_shown = body.n or 1
    num_answers = body.best_of or num_shown
    if num_answers < num_shown:
        raise bad_field("best_of", f"{num_answers} is less than n, which is {num_shown}")
    if num_answers == num_shown:
        return num_answers, None
    if body.stream:
        raise bad_field("best_of", "more than n cannot be streamed: the best is known at the end")
    return num_answers, num_shown


def _check_model(body: Body, reader: PromptReader) -> None:
    if body.model is None:
        raise ApiError(400, "you must provide a model parameter", "model", "missing_parameter")
    if body.model != reader.name and body.model not in reader.adapters:
        raise model_not_found(", ".join([reader.name, *sorted(reader.adapters)]))


def _stream_options(body: Body, unknown: UnknownFields) -> tuple[bool, bool]:
    """Whether the stream ends with its usage, and whether every event has the usage so far."""
    options = body.stream_options
    if options is None:
        return False, False
    options.check_others(unknown, "stream_options.")
    if options.model_fields_set and not body.stream:
        raise bad_field("stream_options", "only together with stream = true")
    # vLLM's second option does nothing without the first.
    return options.include_usage, options.include_usage and options.continuous_usage_stats


def _guide(body: Body, unknown: UnknownFields) -> tuple[str, dict[str, object]]:
    """The field that held the guide, and the guide as tensors; `ApiError` if several do."""
    found = body.guides()
    if body.structured_outputs is not None:
        body.structured_outputs.check_others(unknown, "structured_outputs.")
        found += body.structured_outputs.guides("structured_outputs.")
    if len(found) > 1:
        raise bad_field(found[1][0], f"given beside {found[0][0]}: an answer has one guide")
    for name, (kind, text) in found:
        return name, {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}
    return "response_format", {}


# Variables of the chat template.


def _template_variables(body: Body) -> Mapping[str, Any]:
    """``chat_template_kwargs``, and the fields that are such a variable by themselves."""
    variables: dict[str, Any] = {}
    if body.enable_thinking is not None:
        variables["enable_thinking"] = body.enable_thinking
    variables |= _thinking(body)
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    variables |= body.chat_template_kwargs or {}
    for each in RESERVED:
        if each in variables:
            raise bad_field(f"chat_template_kwargs.{each}", "the server sets it itself")
    return variables


def _thinking(body: Body) -> dict[str, Any]:
    """The template's variables for fields that say whether, or how much, the model thinks.

    Objects are those of GLM's and Anthropic's APIs, ``thinking: {"type": "enabled"}``, and of
    OpenRouter's, ``reasoning: {"effort": "low", "enabled": true}``.
    """
    variables: dict[str, Any] = {}
    if isinstance(body.thinking, bool):
        variables["thinking"] = body.thinking
    elif body.thinking is not None:
        kind = body.thinking.get("type")
        if kind in ("enabled", "disabled"):
            variables |= dict.fromkeys(_THINKING_VARIABLES, kind == "enabled")
    if isinstance(body.think, str):  # Ollama's "low" to "high"
        variables["reasoning_effort"] = body.think
    if body.think is not None:
        variables |= dict.fromkeys(_THINKING_VARIABLES, body.think is not False)
    reasoning = body.reasoning if isinstance(body.reasoning, dict) else {"enabled": body.reasoning}
    effort, is_on = reasoning.get("effort") or None, reasoning.get("enabled")
    if not isinstance(effort, str | None):
        raise bad_field("reasoning.effort", f"expected a string, got {kind_of(effort)}")
    if not isinstance(is_on, bool | None):
        raise bad_field("reasoning", f"expected true or false, got {kind_of(is_on)}")
    if effort is not None:
        variables["reasoning_effort"] = effort
    if is_on is not None or effort == "none":
        variables |= dict.fromkeys(_THINKING_VARIABLES, bool(is_on))
    return variables


# Sampling.


def _sampling(body: Body, reader: PromptReader) -> dict[str, object]:
    values: dict[str, Any] = {
        _FIELD_TO_TENSOR[field]: value for field, value in reader.default_sampling.items()
    }
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
    if body.logit_bias is not None:
        values["embedding_bias"] = _embedding_bias(body.logit_bias, reader.limits.vocab_size)
    if body.include_stop_str_in_output or body.no_stop_trim:
        values["include_stop_str_in_output"] = True
    if body.skip_special_tokens is False:
        values["skip_special_tokens"] = False
    return values | _end_tokens(body, reader)


def _end_tokens(body: Body, reader: PromptReader) -> dict[str, object]:
    """The tokens that end the answer: the client's, and the model's unless they are ignored."""
    limits, values = reader.limits, dict[str, object]()
    stop_token_ids = set(body.stop_token_ids or ())
    bound = limits.vocab_size - 1
    if not all(0 <= token_id <= bound for token_id in stop_token_ids):
        raise bad_field("stop_token_ids", f"expected a list of token ids from 0 to {bound}")
    if not body.ignore_eos:
        values["end_id"] = limits.end_id
        stop_token_ids |= set(limits.stop_token_ids)
    if stop_token_ids:
        values["stop_token_ids"] = sorted(stop_token_ids)
    return values


def _embedding_bias(biases: Mapping[str, Any], vocab_size: int) -> npt.NDArray[np.float32]:
    """A bias for every token ``[vocab_size]`` from an object of token ids and biases."""
    result = np.zeros(vocab_size, dtype=np.float32)
    for key, bias in biases.items():
        # Only digits: int() would also read blanks, signs and underscores.
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise bad_field("logit_bias", f"keys are token ids from 0 to {vocab_size - 1}")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or abs(bias) > 100:
            raise bad_field("logit_bias", "values are numbers from -100 to 100")
        result[int(key)] = bias
    return result
