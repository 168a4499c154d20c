"""The body of a request: the fields that are honoured as pydantic models, and the names of others.

Clients of other servers, gateways and SDKs send more fields than OpenAI's API has; docs/openai.md
has all of them. Null, false and empty values ask for nothing, unless a field is true by default. A
field that would change the answer and is not supported is refused by name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from inflight_openai.errors import ApiError, bad_field, kind_of, named_error, unsupported
from inflight_openai.settings import MAX_MESSAGES, MAX_PROMPTS, MAX_STOP_STRINGS, MAX_TOP_LOG_PROBS
from inflight_openai.tools.arguments import closed
from inflight_openai.tools.formats import Tool
from inflight_scheduler.sampling import MAX_INT32, SETTINGS

_logger = logging.getLogger(__name__)

_MAX_SHOWN = 40  # characters of a number in an error: JSON's integers may have thousands of digits
_MAX_LOGGED = 100  # unknown names in one run
_MAX_REQUEST_ID = 128  # characters
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)  # longer "names" may be text of a prompt
_REGEX_SYNTAX = re.compile(r"([\\.+*?()|\[\]{}^$])")

Prompt = str | list[int]
Guide = tuple[str, str]
"""What the answer must be: the tensors ``guided_decoding_guide_type`` and its ``guide``."""

_OPTIONAL_GUIDE: Any = Guide | None
_Body = TypeVar("_Body", bound="Body")


def shown_number(value: float) -> str:
    """A number as errors quote it."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


# Types of fields.


def _between(low: float, high: float) -> BeforeValidator:
    """Refuses numbers outside ``low..high``."""

    def check(value: Any) -> Any:
        if isinstance(value, (int, float)) and not low <= value <= high:
            bounds = f"{shown_number(low)}..{shown_number(high)}"
            raise ValueError(f"{shown_number(value)} is outside {bounds}")
        return value

    return BeforeValidator(check)


def _flag_or(kind: type) -> PlainValidator:
    """Takes true, false, or a value of ``kind``."""

    def check(value: Any) -> Any:
        if not isinstance(value, (bool, kind)):
            raise ValueError(f"expected true or false, got {kind_of(value)}")
        return value

    return PlainValidator(check)


def _check_request_id(value: str) -> str:
    if len(value) > _MAX_REQUEST_ID or not value.isprintable():
        raise ValueError(f"expected at most {_MAX_REQUEST_ID} printable characters")
    return value


def _are_ids(values: Sequence[Any]) -> bool:
    return all(type(each) is int and 0 <= each <= MAX_INT32 for each in values)


def _read_prompts(value: Any) -> Sequence[Prompt]:
    """One prompt or several: a string, token ids, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a string, a list of token ids, or a list of either")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts, at most {MAX_PROMPTS} are taken")
    for each in value:
        if not (isinstance(each, str) or (isinstance(each, list) and each and _are_ids(each))):
            raise ValueError("expected strings, or lists of token ids (whole numbers from 0)")
    return value


def _text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got {kind_of(value)}")
    return value


def _schema_guide(value: Any) -> Guide:
    """A JSON schema, as an object, or as its text, which is sent as it is."""
    if not isinstance(value, (dict, str)):
        raise ValueError("the schema must be an object")
    text = value if isinstance(value, str) else json.dumps(closed(value), separators=(",", ":"))
    return "json_schema", text


def _regex_guide(value: Any) -> Guide:
    return "regex", _text_of(value)


def _grammar_guide(value: Any) -> Guide:
    return "ebnf_grammar", _text_of(value)


def _choice_guide(value: Any) -> Guide:
    if not isinstance(value, list):
        raise ValueError("expected a list of strings")
    texts = [_REGEX_SYNTAX.sub(r"\\\1", _text_of(each)) for each in value]
    return "regex", f"({'|'.join(texts)})"


def _object_guide(value: Any) -> Guide:
    if value is not True:
        raise ValueError("expected true or false")
    return _schema_guide({"type": "object"})  # the server's own "json" allows arrays as well


def _response_format_guide(value: Any) -> Guide | None:
    value = value if isinstance(value, dict) else {}
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":  # OpenAI promises an object; other servers take its schema here
        schema = value.get("schema")
        if not (schema is None or isinstance(schema, dict)):
            raise ValueError("schema must be an object")
        return _object_guide(True) if schema is None else _schema_guide(schema)
    if kind == "json_schema":
        holder = value.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise ValueError("json_schema.schema must be an object")
        return _schema_guide(schema)
    if kind == "structural_tag":
        return kind, json.dumps(value)
    if kind in ("regex", "ebnf"):
        return (_regex_guide if kind == "regex" else _grammar_guide)(value.get(kind))
    raise ValueError("type must be text, json_object, json_schema, structural_tag, regex or ebnf")


_Count = Annotated[int, _between(1, MAX_INT32)]
_Natural = Annotated[int, _between(0, MAX_INT32)]
_Seed = Annotated[int, _between(-(2**63), 2**63 - 1)]
_Share = Annotated[float, _between(0, 1)]
_Penalty = Annotated[float, _between(-2, 2)]
_NumLogProbs = Annotated[int, _between(0, MAX_TOP_LOG_PROBS)]
_StopString = Annotated[str, Field(min_length=1)]
_StopStrings = Annotated[
    list[_StopString],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=MAX_STOP_STRINGS),
]
_SchemaGuide = Annotated[Guide | None, PlainValidator(_schema_guide)]
_RegexGuide = Annotated[Guide | None, PlainValidator(_regex_guide)]
_ChoiceGuide = Annotated[Guide | None, PlainValidator(_choice_guide)]
_GrammarGuide = Annotated[Guide | None, PlainValidator(_grammar_guide)]
_ObjectGuide = Annotated[Guide | None, PlainValidator(_object_guide)]


# Messages of a chat.

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_KINDS = ("text", "refusal")
"""Kinds of parts of a message; the text of each stands under the name of its kind."""


class _Object(BaseModel):
    model_config = ConfigDict(strict=True)


class _Part(_Object):
    text: str = ""
    refusal: str = ""

    @model_validator(mode="before")
    @classmethod
    def _take_text(cls, value: Any) -> dict[str, Any]:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in _KINDS:
            raise ValueError('only parts of the form {"type": "text", "text": ...} are taken')
        return {kind: value.get(kind)}


class _Function(_Object):
    name: str
    arguments: Any = None

    @field_validator("arguments")
    @classmethod
    def _is_text_or_object(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | None):
            raise ValueError(f"expected a string, got {kind_of(value)}")
        return value


class _ToolCall(_Object):
    id: str | None = None
    type: str | None = None
    function: _Function


class _Message(_Object):
    role: str
    content: list[_Part] | None = Field(None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None

    @field_validator("role")
    @classmethod
    def _is_known(cls, role: str) -> str:
        if role not in ROLES:
            raise ValueError(f"expected one of {', '.join(ROLES)}")
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _split(cls, content: Any, info: ValidationInfo) -> Any:
        """A text is one part; only an assistant may say nothing."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        is_missing = content is None and info.data.get("role") != "assistant"
        if is_missing or not isinstance(content, list | None):
            raise ValueError(f"expected a string, got {kind_of(content)}")
        return content


_MESSAGES = TypeAdapter(list[_Message])


def read_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat with their content as text; `ApiError` names the faulty one."""
    if not isinstance(value, list) or not value:
        raise bad_field("messages", "expected a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise bad_field("messages", f"{len(value)} messages, at most {MAX_MESSAGES} are taken")
    try:
        checked = _MESSAGES.validate_python(value)
    except ValidationError as error:
        raise named_error(error, "messages") from None
    return [_message(*each) for each in zip(value, checked, strict=True)]


def _message(given: Mapping[str, Any], checked: _Message) -> dict[str, Any]:
    """What the client gave, in its order, with the content as text."""
    # Templates test whether a key is there, and not whether its value is null or empty.
    message = {key: each for key, each in given.items() if each is not None}
    if not checked.tool_calls:
        message.pop("tool_calls", None)
        if checked.function_call is not None:
            return _message_of_function(message, checked)
    if checked.role == "function":  # the answer to that
        message |= {"role": "tool", "tool_call_id": _FUNCTION_ID}
    if checked.content is not None:
        message["content"] = "\n".join(part.text or part.refusal for part in checked.content)
    elif not checked.tool_calls:
        message["content"] = ""
    elif "content" in given:
        message["content"] = None  # some templates read it beside tool calls
    return message


_FUNCTION_ID = "function0"
"""Of OpenAI's older ``function_call``, which has none. Templates know calls of tools only."""


def _message_of_function(message: dict[str, Any], checked: _Message) -> dict[str, Any]:
    """A message with OpenAI's older ``function_call`` as one that calls a tool."""
    call = {"id": _FUNCTION_ID, "type": "function", "function": message.pop("function_call")}
    content = checked.content and "\n".join(part.text or part.refusal for part in checked.content)
    return {**message, "content": content, "tool_calls": [call]}


# Tools.

MAX_TOOLS = 512

_NO_ARGUMENTS = {"type": "object", "properties": {}}
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)


class _ToolFunction(_Object):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not _TOOL_NAME.fullmatch(name):
            raise ValueError("expected 1 to 128 letters, digits and ._:/-")
        return name

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """A function whose ``parameters`` are left out takes no arguments, as OpenAI has it."""
        return _NO_ARGUMENTS if self.parameters is None else self.parameters


class _Tool(_Object):
    type: str
    function: _ToolFunction

    @field_validator("type")
    @classmethod
    def _is_function(cls, kind: str) -> str:
        if kind != "function":
            raise ValueError('only tools of the type "function" are served')
        return kind


_TOOLS = TypeAdapter(list[_Tool])
_FUNCTIONS = TypeAdapter(list[_ToolFunction])


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the client offers: ``given`` is for the chat template as it was sent, ``tools`` are
    those that an answer may call, and ``must_call`` tells whether it must. ``is_older``: they are
    OpenAI's ``functions``, which answers call by ``function_call``."""

    given: Sequence[dict[str, Any]] = ()
    tools: Sequence[Tool] = ()
    must_call: bool = False
    is_named: bool = False
    one_call: bool = False
    is_older: bool = False


def read_tools(body: Body) -> ToolChoice:
    """Tools and choice of a request; `ApiError` names the faulty field."""
    choice, allowed = _split_choice(body.tool_choice)
    has_older = body.functions and body.function_call != "none"
    if has_older or body.function_call not in (None, "none", "auto"):
        older = _read_functions(body)
        if not body.tools:
            return older
        if older.tools:
            raise bad_field("functions", "the older name of tools: give one of them")
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad_field("tool_choice", "only together with tools")
        return ToolChoice()
    if not isinstance(body.tools, list) or len(body.tools) > MAX_TOOLS:
        raise bad_field("tools", f"expected a list of at most {MAX_TOOLS} tools")
    try:
        checked = _TOOLS.validate_python(body.tools)
    except ValidationError as error:
        raise named_error(error, "tools") from None
    functions = [each.function for each in checked]
    tools = [Tool(each.name, each.arguments_schema, bool(each.strict)) for each in functions]
    if choice == "none":
        return ToolChoice()
    named = _named_tool(choice)
    wanted = [
        each
        for each in tools
        if named in (None, each.name) and (allowed is None or each.name in allowed)
    ]
    if not wanted or (allowed is not None and len({each.name for each in wanted}) < len(allowed)):
        raise bad_field("tool_choice", "there is no tool of that name")
    return ToolChoice(
        given=[
            each for each in body.tools if allowed is None or each["function"]["name"] in allowed
        ],
        tools=wanted,
        must_call=named is not None or choice == "required",
        is_named=named is not None,
        one_call=named is not None or body.parallel_tool_calls is False,
    )


def _read_functions(body: Body) -> ToolChoice:
    """The same with OpenAI's older names ``functions`` and ``function_call``."""
    choice = body.function_call
    if not body.functions:
        raise bad_field("function_call", "only together with functions")
    if not isinstance(body.functions, list) or len(body.functions) > MAX_TOOLS:
        raise bad_field("functions", f"expected a list of at most {MAX_TOOLS} functions")
    try:
        checked = _FUNCTIONS.validate_python(body.functions)
    except ValidationError as error:
        raise named_error(error, "functions") from None
    named = choice.get("name") if isinstance(choice, dict) else None
    if choice not in (None, "auto") and not isinstance(named, str):
        raise bad_field("function_call", 'expected none, auto or {"name": ...}')
    wanted = [
        Tool(each.name, each.arguments_schema, False)
        for each in checked
        if named in (None, each.name)
    ]
    if not wanted:
        raise bad_field("function_call", "there is no function of that name")
    return ToolChoice(
        given=[{"type": "function", "function": each} for each in body.functions],
        tools=wanted,
        must_call=named is not None,
        is_named=named is not None,
        one_call=True,
        is_older=True,
    )


def _split_choice(choice: Any) -> tuple[Any, frozenset[str] | None]:
    """A choice among some tools, OpenAI's ``allowed_tools``, as its mode and their names, which are
    None for any other choice."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, None
    content = choice.get("allowed_tools")
    content = content if isinstance(content, dict) else {}
    mode, tools = content.get("mode"), content.get("tools")
    if mode not in ("auto", "required"):
        raise bad_field("tool_choice.allowed_tools.mode", "expected auto or required")
    if not isinstance(tools, list) or not tools:
        raise bad_field("tool_choice.allowed_tools.tools", "expected a list of at least one tool")
    names = [_named_tool(each) for each in tools]
    return mode, frozenset(filter(None, names))


def _named_tool(choice: Any) -> str | None:
    """The name of the one tool that must be called; `ApiError` for what is no choice."""
    if choice in (None, "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_field(
            "tool_choice",
            'expected none, auto, required or {"type": "function", "function": {"name": ...}}',
        )
    return name


# Fields that are ignored or refused.

_OLLAMA_SIZES = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"),
    *("low_vram", "use_mmap", "use_mlock"),
)

IGNORED: frozenset[str] = frozenset(
    (
        "prediction",  # OpenAI
        *("priority", "guided_decoding_backend"),  # vLLM
        *("spaces_between_special_tokens", "length_penalty", "early_stopping"),
        *("stream_reasoning", "rid", "data_parallel_rank"),  # SGLang
        *("extra_key", "return_cached_tokens_details"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *_OLLAMA_SIZES,  # Ollama, llama.cpp
        *("keep_alive", "cache_prompt", "id_slot", "mirostat_tau", "mirostat_eta"),
        *("repeat_last_n", "dynatemp_exponent", "dry_base", "dry_allowed_length"),
        "xtc_threshold",
        *("provider", "transforms", "models", "route", "usage"),  # OpenRouter
    )
)
"""No value of these changes the text of the answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),  # OpenAI
    "prompt_cache_options": ({"mode": "implicit"},),
    "add_generation_prompt": (True,),  # vLLM
    "detokenize": (True,),
    "top_p_min": (0,),  # TensorRT-LLM
    "beam_search_diversity_rate": (0,),
    "num_predict": (-1,),  # Ollama, llama.cpp
    "n_predict": (-1,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "tfs": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1, 0),
    "top_a": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "do_sample": (True,),  # Transformers, koboldcpp
    "num_beams": (1,),
    "rep_pen": (1,),
    "mirostat_mode": (0,),
    "smoothing_factor": (0,),
    "top_logprobs": (0,),  # in completions
}
"""Values of refused fields that ask for nothing, beside null, false and empty ones."""

_NEUTRAL_KEYS: Mapping[str, frozenset[str]] = {
    "options": frozenset(_OLLAMA_SIZES),
    "nvext": frozenset({"annotations", "backend_instance_id", "agent_hints", "extra_fields"}),
}
"""What may be in an object that is otherwise refused."""

REFUSED: frozenset[str] = frozenset(
    (
        *("audio", "moderation", "suffix", "web_search_options"),  # OpenAI
        *("allowed_token_ids", "use_beam_search", "logits_processors"),  # vLLM
        *("documents", "chat_template", "mm_processor_kwargs", "kv_transfer_params"),
        *("vllm_xargs", "guided_whitespace_pattern", "structural_tag", "continue_final_message"),
        *("return_hidden_states", "lora_path", "lora_request", "session_params"),  # SGLang
        *("stop_regex", "custom_logit_processor", "custom_params", "disaggregated_params"),
        *("return_context_logits", "return_generation_logits"),  # TensorRT-LLM
        *("samplers", "template", "system", "images", "context", "raw", "format"),  # Ollama
        *("plugins", "preset"),  # OpenRouter
        "random_seed",  # Mistral
        *("stop_sequences", "max_new_tokens", "max_output_tokens", "input", "instructions"),
        *NEUTRAL,
        *_NEUTRAL_KEYS,
    )
)
"""These would change the answer, unless their value asks for nothing."""


def is_empty(value: Any) -> bool:
    """Null, false, or an empty string, list or object; 0 is a number like others."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Of a field that is refused or unknown."""
    neutral = NEUTRAL.get(name, ())
    if any(type(value) is not bool or type(each) is bool for each in neutral if value == each):
        return True
    if isinstance(value, dict):
        allowed = _NEUTRAL_KEYS.get(name, frozenset())
        return all(key in allowed or is_empty(each) for key, each in value.items())
    return is_empty(value) and not (value is False and True in neutral)


class UnknownFields:
    """Ignores unknown fields with one line in the log for each name, or refuses them."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def see(self, name: str) -> None:
        """A request has the field ``name``; `ApiError` if that is refused."""
        shown = name if _NAME.fullmatch(name) else "(no name of a field)"
        if self._is_strict:
            message = f"Unrecognized request argument supplied: {shown}"
            raise ApiError(400, message, shown, "unknown_parameter")
        if shown not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(shown)
            _logger.warning("ignored the unknown field %s of a request", shown)


# Fields that are honoured; None: not given, or with a value that asks for nothing.


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, str]] = {}
    """Name -> why, if not for want of support."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_values(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if not cls._is_dropped(name, value)}

    @classmethod
    def _is_dropped(cls, name: str, value: Any) -> bool:
        if value is False:
            return name in cls.model_fields and bool not in get_args(
                cls.model_fields[name].annotation
            )
        return is_empty(value) and name != "prompt"  # an empty text may be a prompt

    def check_others(self, unknown: UnknownFields, prefix: str = "") -> None:
        """`ApiError` for a field that is not honoured and cannot be ignored."""
        for name, value in (self.model_extra or {}).items():
            if name in self.ignored or _asks_for_nothing(name, value):
                continue
            if name in self.refused:
                raise unsupported(prefix + name, self.refused[name])
            unknown.see(prefix + name)

    def guides(self, prefix: str = "") -> list[tuple[str, Guide]]:
        """The guides among the fields, with the names of these."""
        return [
            (prefix + (each.alias or name), getattr(self, name))
            for name, each in type(self).model_fields.items()
            if each.annotation == _OPTIONAL_GUIDE and getattr(self, name) is not None
        ]


class StreamOptions(_Fields):
    """When the usage is told: at the end, or (vLLM's) in every event, too."""

    refused = {"include_obfuscation": ""}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(_Fields):
    """vLLM's guides in one object."""

    ignored = frozenset({"disable_fallback"})
    refused = dict.fromkeys(
        (
            *("disable_any_whitespace", "disable_additional_properties"),
            *("whitespace_pattern", "structural_tag"),
        ),
        "",
    )

    schema_: _SchemaGuide = Field(None, alias="json")
    json_object: _ObjectGuide = None
    regex: _RegexGuide = None
    choice: _ChoiceGuide = None
    grammar: _GrammarGuide = None


class Body(_Fields):
    """The fields of both calls."""

    ignored = IGNORED

    # OpenAI
    model: str | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, _between(0, 2)] | None = None
    top_p: _Share | None = None
    seed: _Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, _between(1, MAX_PROMPTS)] | None = None
    best_of: _Count | None = None
    stop: _StopStrings | None = None
    logit_bias: dict[str, Any] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    response_format: Annotated[Guide | None, PlainValidator(_response_format_guide)] = None
    reasoning_effort: str | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None

    # OpenAI; nothing in an answer depends on these
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None

    # vLLM
    top_k: Annotated[int, _between(-1, MAX_INT32)] | None = None
    min_tokens: _Natural | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: _NumLogProbs | None = None
    request_id: Annotated[str, AfterValidator(_check_request_id)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    guided_json: _SchemaGuide = None
    guided_json_object: _ObjectGuide = None
    guided_regex: _RegexGuide = None
    guided_choice: _ChoiceGuide = None
    guided_grammar: _GrammarGuide = None
    structured_outputs: StructuredOutputs | None = None

    # SGLang, llama.cpp
    sampling_seed: _Seed | None = None
    no_stop_trim: bool | None = None
    separate_reasoning: bool | None = None
    regex: _RegexGuide = None
    ebnf: _GrammarGuide = None
    grammar: _GrammarGuide = None
    json_schema: _SchemaGuide = None

    # DeepSeek, GLM and Anthropic; Ollama; OpenRouter
    thinking: Annotated[bool | dict[str, Any] | None, _flag_or(dict)] = None
    think: Annotated[bool | str | None, _flag_or(str)] = None
    reasoning: Annotated[bool | dict[str, Any] | None, _flag_or(dict)] = None


class CompletionBody(Body):
    """The body of ``/v1/completions``."""

    prompt: Annotated[Sequence[Prompt], PlainValidator(_read_prompts)] = Field(
        (), validate_default=True
    )
    max_tokens: _Natural | None = None
    max_completion_tokens: _Natural | None = None
    echo: bool | None = None
    logprobs: _NumLogProbs | None = None


class ChatBody(Body):
    """The body of ``/v1/chat/completions``."""

    messages: Any = None
    logprobs: bool | None = None
    top_logprobs: _NumLogProbs | None = None


def _complete(model: type[Body], other: type[Body], call: str) -> type[Body]:
    """``model`` with the sampling settings that have no bounds of their own in it, which refuses
    the fields of the ``other`` call."""
    settings: dict[str, Any] = {}
    for each in SETTINGS.values():
        if each.option and each.option not in model.model_fields:
            kind: Any = float if each.dtype == "FP32" else int
            bounds = _between(each.minimum, each.maximum)  # type: ignore[arg-type]  # numbers
            settings[each.option] = (Annotated[kind, bounds] | None, None)
    made = create_model(model.__name__, __base__=model, **settings)
    others = other.model_fields.keys() - model.model_fields.keys()
    others_refused = dict.fromkeys(others, f"there is no such field of {call}")
    made.refused = {**dict.fromkeys(REFUSED, ""), **others_refused}
    return made


_MODELS: Mapping[type[Body], type[Body]] = {
    CompletionBody: _complete(CompletionBody, ChatBody, "completions"),
    ChatBody: _complete(ChatBody, CompletionBody, "chats"),
}

KNOWN_NAMES = IGNORED.union(REFUSED, *(model.model_fields for model in _MODELS.values()))


def read_object(raw: bytes) -> dict[str, Any]:
    """The body of a call; `ApiError` unless ``raw`` is a JSON object in UTF-8."""
    try:
        content = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    return content


def read_body(raw: bytes, model: type[_Body], unknown: UnknownFields) -> _Body:
    """The body of a call; `ApiError` unless ``raw`` is a JSON object in UTF-8 whose fields have the
    right types, and are known or may be ignored."""
    content = read_object(raw)
    try:
        body = _MODELS[model].model_validate(content)
    except ValidationError as error:
        raise named_error(error) from None
    assert isinstance(body, model)
    body.check_others(unknown)
    return body
