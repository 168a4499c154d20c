"""The fields of a request body: pydantic models of the honoured ones, a table of all others.

Parsing, ``--strict`` and the table of docs/clients.md read both. The names are those of OpenAI's
API and of the servers, gateways and SDKs whose clients send more than that. A field is

- *honoured*: a field of `CompletionBody` or `ChatBody`, used by `inflight_openai.generation`;
- *ignored*: no value of it changes the text of the answer;
- *refused*, unless its value asks for nothing, because it would change the answer.

Null, false and empty values ask for nothing, unless a field is true by default.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from inflight_openai.errors import ApiError, bad_field, kind_of, unsupported
from inflight_openai.settings import MAX_PROMPTS, MAX_STOP_STRINGS, MAX_TOP_LOG_PROBS

_logger = logging.getLogger(__name__)

INT32_MAX = 2**31 - 1
_INT64 = -(2**63), 2**63 - 1
_MAX_SHOWN = 40  # characters of a number in an error: JSON's integers may have thousands of digits
_MAX_LOGGED = 100  # unknown names in one run
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)  # longer "names" may be text of a prompt

Flag = bool | None


def _encodable(text: str) -> str:
    """JSON may escape halves of surrogate pairs, which no tokenizer takes."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_encodable)]


def _within(low: float, high: float) -> Any:
    """An optional number with bounds."""
    return Field(None, ge=low, le=high)


def is_empty(value: Any) -> bool:
    """Null, false, or an empty string, list or object; 0 is a number like others."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


class Fields(BaseModel):
    """Honoured fields with one explanation, the docstring: a row of the table in the docs.

    Fields of type ``Any`` are checked where they are used.
    """

    model_config = ConfigDict(strict=True)
    origin: ClassVar[str] = "OpenAI"


class Model(Fields):
    """the one that is served"""

    model: Text | None = None


class Prompt(Fields):
    """text, token ids, or a list of either"""

    prompt: Any = None


class Messages(Fields):
    """messages whose content is text"""

    messages: Any = None


class MaxTokens(Fields):
    """default 16 for completions, all that fits for chats (`--default-max-tokens`); the second
    wins"""

    max_tokens: int | None = _within(1, INT32_MAX)
    max_completion_tokens: int | None = _within(1, INT32_MAX)


class Sampling(Fields):
    """as OpenAI has them: without the first two an answer is drawn with both at 1; 0 of either
    takes the likeliest token"""

    temperature: float | None = _within(0, 2)
    top_p: float | None = _within(0, 1)
    seed: int | None = _within(*_INT64)
    stream: Flag = None


class Answers(Fields):
    """as OpenAI has them; up to 16 stop strings"""

    stop: Annotated[
        list[Annotated[Text, Field(min_length=1)]] | None,
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=MAX_STOP_STRINGS),
    ] = None
    n: int | None = _within(1, MAX_PROMPTS)
    presence_penalty: float | None = _within(-2, 2)
    frequency_penalty: float | None = _within(-2, 2)
    logit_bias: Any = None


class CompletionLogProbs(Fields):
    """up to 20 likeliest tokens in each place"""

    logprobs: int | None = _within(0, MAX_TOP_LOG_PROBS)


class ChatLogProbs(Fields):
    """up to 20 likeliest tokens in each place, together with `logprobs`"""

    logprobs: Flag = None
    top_logprobs: int | None = _within(0, MAX_TOP_LOG_PROBS)


class StreamOptions(Fields):
    """`include_usage`; beside it vLLM's `continuous_usage_stats`: every event tells the usage"""

    stream_options: dict[str, Any] | None = None


class ResponseFormat(Fields):
    """`text`, `json_object` (with a `schema` of its own, as other servers have it) and
    `json_schema`; TensorRT-LLM's `regex` and `ebnf`: [guided_decoding.md](guided_decoding.md)"""

    response_format: Any = None


class Echo(Fields):
    """the text of the prompt before each answer; not together with `logprobs`"""

    echo: Flag = None


class BestOf(Fields):
    """must be what `n` is: there is no choice among more answers"""

    best_of: int | None = _within(1, INT32_MAX)


class Tools(Fields):
    """tools are refused unless the choice is `none`: then they are ignored"""

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None


class ReasoningEffort(Fields):
    """variable of the chat template, as with vLLM; nothing where that does not know it"""

    reasoning_effort: Text | None = None


class OtherSampling(Fields):
    """as vLLM has them"""

    origin: ClassVar[str] = "vLLM, SGLang"
    top_k: int | None = _within(-1, INT32_MAX)
    min_p: float | None = _within(0, 1)
    min_tokens: int | None = _within(0, INT32_MAX)
    ignore_eos: Flag = None
    stop_token_ids: Any = None
    repetition_penalty: float | None = _within(1e-3, 1e3)
    bad_words: list[Text] | None = None
    no_repeat_ngram_size: int | None = _within(0, INT32_MAX)
    cache_salt: Text | None = None
    add_special_tokens: Flag = None


class Guides(Fields):
    """what the answer must be; `structured_outputs` holds one of `json`, `regex`, `choice`,
    `grammar` (EBNF) and `json_object`"""

    origin: ClassVar[str] = "vLLM"
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: dict[str, Any] | None = None


class AnswerText(Fields):
    """the stop string that ended an answer is part of it; special tokens have their text"""

    origin: ClassVar[str] = "vLLM"
    include_stop_str_in_output: Flag = None
    skip_special_tokens: Flag = None


class Truncation(Fields):
    """the last so many tokens of the prompt; -1: as many as fit"""

    origin: ClassVar[str] = "vLLM"
    truncate_prompt_tokens: int | None = None


class TokenIds(Fields):
    """`prompt_token_ids` and `token_ids`; in log probabilities `token_id:5` instead of its text"""

    origin: ClassVar[str] = "vLLM"
    return_token_ids: Flag = None
    return_tokens_as_token_ids: Flag = None


class RequestId(Fields):
    """the `id` of the answer ends with it"""

    origin: ClassVar[str] = "vLLM"
    request_id: Text | None = None


class TemplateVariables(Fields):
    """variables of the chat template: `{"enable_thinking": false}` for Qwen3; the others are such
    variables by themselves"""

    origin: ClassVar[str] = "vLLM, others"
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: Any = None
    thinking: Any = None
    think: Any = None
    reasoning: Any = None


class Synonyms(Fields):
    """other names of `seed`, `include_stop_str_in_output`, `guided_regex`, `guided_grammar`
    (two) and `guided_json`"""

    origin: ClassVar[str] = "SGLang, llama.cpp"
    sampling_seed: int | None = _within(*_INT64)
    no_stop_trim: Flag = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    json_schema: Any = None


class GenerationBody(
    Model,
    MaxTokens,
    Sampling,
    Answers,
    StreamOptions,
    ResponseFormat,
    BestOf,
    Tools,
    ReasoningEffort,
    OtherSampling,
    Guides,
    AnswerText,
    Truncation,
    TokenIds,
    RequestId,
    TemplateVariables,
    Synonyms,
):
    """What both calls have."""

    call: ClassVar[str]


class CompletionBody(GenerationBody, Prompt, CompletionLogProbs, Echo):
    """The body of ``/v1/completions``."""

    call: ClassVar[str] = "completions"


class ChatBody(GenerationBody, Messages, ChatLogProbs):
    """The body of ``/v1/chat/completions``."""

    call: ClassVar[str] = "chats"


@dataclass(frozen=True, slots=True)
class OtherFields:
    """Known fields that are not honoured: a row of the table.

    ``note``: why nothing is done. ``neutral``: values that ask for nothing, by name, beside null,
    false and empty ones. ``kind``: the only type that an ignored field takes.
    ``inner``: what an object that is refused may hold: names that do not change the answer.
    """

    origin: str
    is_refused: bool
    note: str
    names: tuple[str, ...]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    kind: type | None = None
    inner: frozenset[str] = frozenset()

    def check(self, name: str, value: Any) -> None:
        """`ApiError` if a request with ``value`` in field ``name`` cannot be answered."""
        if self.is_refused:
            if not self._asks_for_nothing(name, value):
                raise unsupported(name)
        elif self.kind and not (is_empty(value) or isinstance(value, self.kind)):
            expected = kind_of(self.kind())
            raise bad_field(name, f"expected {expected}, got {kind_of(value)}")

    def _asks_for_nothing(self, name: str, value: Any) -> bool:
        neutral = self.neutral.get(name, ())
        if any(_is_same(value, each) for each in neutral):
            return True
        if isinstance(value, dict):
            return all(key in self.inner or is_empty(each) for key, each in value.items())
        return is_empty(value) and not (value is False and True in neutral)


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _ignored(origin: str, note: str, *names: str, kind: type | None = None) -> OtherFields:
    return OtherFields(origin, False, note, names, kind=kind)


def _refused(
    origin: str, note: str, *names: str, inner: tuple[str, ...] = (), **neutral: tuple[Any, ...]
) -> OtherFields:
    """``neutral`` adds its own names."""
    return OtherFields(
        origin, True, note, (*names, *neutral), neutral=neutral, inner=frozenset(inner)
    )


_OLLAMA_SIZES = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"),
    *("low_vram", "use_mmap", "use_mlock"),
)

OTHERS: tuple[OtherFields, ...] = (
    _ignored(
        "OpenAI",
        "equal beginnings of prompts are found without them",
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        kind=str,
    ),
    _ignored("OpenAI", "nothing is stored", "metadata", kind=dict),
    _ignored(
        "OpenAI", "nothing is stored, no tool is called", "store", "parallel_tool_calls", kind=bool
    ),
    _ignored(
        "OpenAI",
        "one tier; no model with verbosity",
        "service_tier",
        "verbosity",
        kind=str,
    ),
    _ignored("OpenAI", "it saves time where it is used, and changes nothing else", "prediction"),
    _refused(
        "OpenAI",
        "not supported",
        *("audio", "moderation", "suffix", "web_search_options"),
        modalities=(["text"],),
        prompt_cache_options=({"mode": "implicit"},),
    ),
    _ignored(
        "vLLM",
        "nothing in an answer depends on them",
        *(
            "priority",
            "guided_decoding_backend",
            "include_reasoning",
            "spaces_between_special_tokens",
        ),
        *("length_penalty", "early_stopping"),  # of beams
    ),
    _refused(
        "vLLM",
        "not supported",
        *("prompt_logprobs", "allowed_token_ids", "use_beam_search", "logits_processors"),
        *("documents", "chat_template", "mm_processor_kwargs", "kv_transfer_params", "vllm_xargs"),
        *("guided_whitespace_pattern", "structural_tag", "continue_final_message"),
        add_generation_prompt=(True,),
        detokenize=(True,),
    ),
    _ignored(
        "SGLang",
        "nothing in an answer depends on them; what a model thinks stays in its text",
        *("separate_reasoning", "stream_reasoning", "rid", "data_parallel_rank", "extra_key"),
        *("return_cached_tokens_details", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    ),
    _refused(
        "SGLang, TensorRT-LLM",
        "not supported",
        *("return_hidden_states", "lora_path", "lora_request", "session_params", "stop_regex"),
        *("custom_logit_processor", "custom_params", "disaggregated_params"),
        *("return_context_logits", "return_generation_logits"),
        top_p_min=(0,),
        beam_search_diversity_rate=(0,),
    ),
    _ignored(
        "Ollama, llama.cpp",
        "the server's own sizes hold, and numbers of samplers that are off do nothing",
        *_OLLAMA_SIZES,
        *("keep_alive", "cache_prompt", "id_slot", "mirostat_tau", "mirostat_eta"),
        *("repeat_last_n", "dynatemp_exponent", "dry_base", "dry_allowed_length", "xtc_threshold"),
    ),
    _refused(
        "Ollama, llama.cpp",
        "they would change how tokens are drawn, or what is read",
        *("samplers", "template", "system", "images", "context", "raw", "format"),
        num_predict=(-1,),
        n_predict=(-1,),
        repeat_penalty=(1,),
        typical_p=(1,),
        tfs=(1,),
        tfs_z=(1,),
        mirostat=(0,),
        dynatemp_range=(0,),
        dry_multiplier=(0,),
        xtc_probability=(0,),
        top_n_sigma=(-1, 0),
        top_a=(0,),
        epsilon_cutoff=(0,),
        eta_cutoff=(0,),
        penalty_alpha=(0,),
    ),
    _refused(
        "Ollama", "sizes in it pass, settings of sampling do not", "options", inner=_OLLAMA_SIZES
    ),
    _ignored(
        "OpenRouter",
        "there is one server",
        *("provider", "transforms", "models", "route", "usage"),
    ),
    _refused("OpenRouter", "not supported", "plugins", "preset"),
    _refused(
        "Transformers, Mistral, koboldcpp",
        "`temperature`, `seed` and `repetition_penalty` are their names here",
        "random_seed",
        do_sample=(True,),
        num_beams=(1,),
        rep_pen=(1,),
        mirostat_mode=(0,),
        smoothing_factor=(0,),
    ),
    _refused(
        "other APIs",
        "the names that this API has for them are others",
        *("stop_sequences", "max_new_tokens", "max_output_tokens", "input", "instructions"),
    ),
    _refused(
        "Dynamo, NIM",
        "`annotations` and the like in it pass, guides and settings of sampling do not",
        "nvext",
        inner=("annotations", "backend_instance_id", "agent_hints", "extra_fields"),
    ),
)

_OTHER_BY_NAME: Mapping[str, OtherFields] = {
    name: others for others in OTHERS for name in others.names
}
_HONOURED = CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()

KNOWN_NAMES = frozenset(_HONOURED | _OTHER_BY_NAME.keys())


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


_Body = TypeVar("_Body", bound=GenerationBody)


def read_body(raw: bytes, kind: type[_Body], unknown: UnknownFields) -> _Body:
    """The fields of a body; `ApiError` unless ``raw`` is a JSON object in UTF-8 with each key once
    whose fields are known, or may be ignored."""
    try:
        content = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = {name: content.pop(name) for name in kind.model_fields.keys() & content.keys()}
    try:
        body = kind.model_validate(_given(fields, kind))
    except ValidationError as error:
        raise _named(error, kind) from None
    for name, value in content.items():
        if others := _OTHER_BY_NAME.get(name):
            others.check(name, value)
        elif is_empty(value):
            continue
        elif name not in _HONOURED:
            unknown.see(name)
        elif (name, value) != ("top_logprobs", 0):
            raise unsupported(name, f"there is no such field of {kind.call}")
    return body


def _given(fields: Mapping[str, Any], kind: type[GenerationBody]) -> dict[str, Any]:
    """The fields without empty values, which count as not given; those of type ``Any`` keep them,
    and flags keep false."""

    def is_given(name: str, value: Any) -> bool:
        annotation = kind.model_fields[name].annotation
        return not is_empty(value) or annotation is Any or (value is False and annotation == Flag)

    return {name: value for name, value in fields.items() if is_given(name, value)}


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "an object",
    "list_type": "a list",
}
"""Pydantic's type of an error -> what was expected."""


def _named(error: ValidationError, kind: type[GenerationBody]) -> ApiError:
    """The first error of a validation as an error that names its field."""
    [first, *_] = error.errors(include_url=False)
    name = str(first["loc"][0])
    param = name + "".join(f"[{index}]" for index in first["loc"][1:])
    value, context = first["input"], first.get("ctx", {})
    is_huge = first["type"] == "float_type" and type(value) is int  # no double holds it
    if not is_huge and (expected := _EXPECTED.get(first["type"])):
        return bad_field(param, f"expected {expected}, got {kind_of(value)}")
    if first["type"] == "value_error":  # of `_encodable`
        return bad_field(param, f"no valid Unicode at position {context['error'].start}")
    if first["type"] == "too_long":
        length, bound = context["actual_length"], context["max_length"]
        return bad_field(param, f"{length} entries, at most {bound} are taken")
    if first["type"] == "too_short":
        return bad_field(param, "an empty string would stop everything")
    low, high = kind.model_fields[name].metadata  # of `_within`
    bounds = f"{shown_number(low.ge)}..{shown_number(high.le)}"
    return bad_field(param, f"{shown_number(value)} is outside {bounds}")


def shown_number(value: float) -> str:
    """A number as errors quote it."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key[:100]!r} is given twice in one object")
        content[key] = value
    return content
