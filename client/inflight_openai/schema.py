"""The fields of a request body in one table: what they hold, and what is done with them.

The pydantic models of the bodies, ``--strict`` and the table of docs/clients.md are made from it.
The names are those of OpenAI's API and of the servers, gateways and SDKs whose clients send more
than that. Null, false and empty values ask for nothing, unless a field is true by default.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, NoReturn

from annotated_types import Interval
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from inflight_openai.errors import ApiError, bad_field, kind_of, unsupported
from inflight_openai.settings import MAX_PROMPTS, MAX_STOP_STRINGS, MAX_TOP_LOG_PROBS
from inflight_scheduler.sampling import SETTINGS

_logger = logging.getLogger(__name__)

INT32_MAX = 2**31 - 1
_MAX_SHOWN = 40  # characters of a number in an error: JSON's integers may have thousands of digits
_MAX_LOGGED = 100  # unknown names in one run
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)  # longer "names" may be text of a prompt


def _encodable(text: str) -> str:
    """JSON may escape halves of surrogate pairs, which no tokenizer takes."""
    text.encode()
    return text


_TEXT = Annotated[str, AfterValidator(_encodable)]
_STOP = Annotated[
    list[Annotated[_TEXT, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=MAX_STOP_STRINGS),
]
_COUNT = Annotated[int, Interval(ge=1, le=INT32_MAX)]
_NATURAL = Annotated[int, Interval(ge=0, le=INT32_MAX)]
_SEED = Annotated[int, Interval(ge=-(2**63), le=2**63 - 1)]
_NUM_LOG_PROBS = Annotated[int, Interval(ge=0, le=MAX_TOP_LOG_PROBS)]
_PENALTY = Annotated[float, Interval(ge=-2, le=2)]
_SHARE = Annotated[float, Interval(ge=0, le=1)]


class Action(Enum):
    """What is done with a field."""

    HONOURED = "honoured"  # used by `inflight_openai.generation`
    IGNORED = "ignored"  # no value of it changes the text of the answer
    REFUSED = "refused"  # it would change the answer, unless its value asks for nothing


COMPLETION = "completions"
CHAT = "chats"


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Fields that are treated alike; a row of the table.

    ``types``: of honoured fields, ``Any`` for those that are checked where they are used, and of
    ignored ones that are checked. ``call``: the only call that has the fields.
    ``neutral``: values that ask for nothing, by name, beside null, false and empty ones.
    ``inner``: names that an object may hold that is otherwise refused.
    """

    origin: str
    action: Action
    note: str
    names: tuple[str, ...]
    types: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inner: frozenset[str] = frozenset()

    def check(self, name: str, value: Any) -> None:
        """`ApiError` if a request with ``value`` in an ignored or refused field is refused."""
        if self.action is Action.REFUSED:
            if not self._asks_for_nothing(name, value):
                raise unsupported(name)
        elif name in self.types and not (is_empty(value) or isinstance(value, self.types[name])):
            expected = kind_of(self.types[name]())
            raise bad_field(name, f"expected {expected}, got {kind_of(value)}")

    def _asks_for_nothing(self, name: str, value: Any) -> bool:
        neutral = self.neutral.get(name, ())
        if any(_is_same(value, each) for each in neutral):
            return True
        if isinstance(value, dict):
            return all(key in self.inner or is_empty(each) for key, each in value.items())
        return is_empty(value) and not (value is False and True in neutral)


def is_empty(value: Any) -> bool:
    """Null, false, or an empty string, list or object; 0 is a number like others."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _honoured(origin: str, note: str, *names: str, call: str = "", **types: Any) -> FieldGroup:
    """``names`` are of type ``Any``; ``types`` adds its own names."""
    every = {**dict.fromkeys(names, Any), **types}
    return FieldGroup(origin, Action.HONOURED, note, tuple(every), every, call)


def _ignored(origin: str, note: str, *names: str, **types: type) -> FieldGroup:
    """``types`` adds its own names."""
    return FieldGroup(origin, Action.IGNORED, note, (*names, *types), types)


def _refused(
    origin: str, note: str, *names: str, inner: tuple[str, ...] = (), **neutral: tuple[Any, ...]
) -> FieldGroup:
    """``neutral`` adds its own names."""
    every = (*names, *neutral)
    return FieldGroup(origin, Action.REFUSED, note, every, neutral=neutral, inner=frozenset(inner))


def _other_settings(*names: str) -> dict[str, Any]:
    """Types of all sampling settings but ``names``, which have bounds of OpenAI's or of vLLM's."""
    types = {}
    for each in SETTINGS.values():
        if each.option and each.option not in names:
            kind = float if each.dtype == "FP32" else int
            types[each.option] = Annotated[kind, Interval(ge=each.minimum, le=each.maximum)]
    return types


_OLLAMA_SIZES = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"),
    *("low_vram", "use_mmap", "use_mlock"),
)

GROUPS: tuple[FieldGroup, ...] = (
    _honoured("OpenAI", "the one that is served", model=_TEXT),
    _honoured("OpenAI", "text, token ids, or a list of either", "prompt", call=COMPLETION),
    _honoured("OpenAI", "messages whose content is text", "messages", call=CHAT),
    _honoured(
        "OpenAI",
        "default 16 for completions, all that fits for chats (`--default-max-tokens`); the second "
        "wins",
        max_tokens=_COUNT,
        max_completion_tokens=_COUNT,
    ),
    _honoured(
        "OpenAI",
        "as OpenAI has them: without the first two an answer is drawn with both at 1; 0 of either "
        "takes the likeliest token",
        temperature=Annotated[float, Interval(ge=0, le=2)],
        top_p=_SHARE,
        seed=_SEED,
        stream=bool,
    ),
    _honoured(
        "OpenAI",
        "as OpenAI has them; up to 16 stop strings",
        "logit_bias",
        stop=_STOP,
        n=Annotated[int, Interval(ge=1, le=MAX_PROMPTS)],
        presence_penalty=_PENALTY,
        frequency_penalty=_PENALTY,
    ),
    _honoured(
        "OpenAI",
        "up to 20 likeliest tokens in each place",
        call=COMPLETION,
        logprobs=_NUM_LOG_PROBS,
    ),
    _honoured(
        "OpenAI",
        "up to 20 likeliest tokens in each place, together with `logprobs`",
        call=CHAT,
        logprobs=bool,
        top_logprobs=_NUM_LOG_PROBS,
    ),
    _honoured(
        "OpenAI",
        "`include_usage`; beside it vLLM's `continuous_usage_stats`: every event tells the usage",
        stream_options=dict[str, Any],
    ),
    _honoured(
        "OpenAI",
        "`text`, `json_object` (with a `schema` of its own, as other servers have it) and "
        "`json_schema`; TensorRT-LLM's `regex` and `ebnf`: "
        "[guided_decoding.md](guided_decoding.md)",
        "response_format",
    ),
    _honoured(
        "OpenAI",
        "the text of the prompt before each answer; not together with `logprobs`",
        call=COMPLETION,
        echo=bool,
    ),
    _honoured(
        "OpenAI", "must be what `n` is: there is no choice among more answers", best_of=_COUNT
    ),
    _honoured(
        "OpenAI",
        "tools are refused unless the choice is `none`: then they are ignored",
        *("tools", "tool_choice", "functions", "function_call"),
    ),
    _honoured(
        "OpenAI",
        "variable of the chat template, as with vLLM; nothing where that does not know it",
        reasoning_effort=_TEXT,
    ),
    _honoured(
        "vLLM, SGLang",
        "as vLLM has them",
        "stop_token_ids",
        top_k=Annotated[int, Interval(ge=-1, le=INT32_MAX)],
        min_tokens=_NATURAL,
        ignore_eos=bool,
        bad_words=list[_TEXT],
        cache_salt=_TEXT,
        add_special_tokens=bool,
        **_other_settings(
            *("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k")
        ),
    ),
    _honoured(
        "vLLM",
        "what the answer must be; `structured_outputs` holds one of `json`, `regex`, `choice`, "
        "`grammar` (EBNF) and `json_object`",
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
        structured_outputs=dict[str, Any],
    ),
    _honoured(
        "vLLM",
        "the stop string that ended an answer is part of it; special tokens have their text",
        include_stop_str_in_output=bool,
        skip_special_tokens=bool,
    ),
    _honoured(
        "vLLM",
        "the last so many tokens of the prompt; -1: as many as fit",
        truncate_prompt_tokens=int,
    ),
    _honoured(
        "vLLM",
        "`prompt_token_ids` and `token_ids`; in log probabilities `token_id:5` instead of its text",
        return_token_ids=bool,
        return_tokens_as_token_ids=bool,
    ),
    _honoured("vLLM", "the `id` of the answer ends with it", request_id=_TEXT),
    _honoured(
        "vLLM, others",
        'variables of the chat template: `{"enable_thinking": false}` for Qwen3; the others are '
        "such variables by themselves",
        *("enable_thinking", "thinking", "think", "reasoning"),
        chat_template_kwargs=dict[str, Any],
    ),
    _honoured(
        "SGLang, llama.cpp",
        "other names of `seed`, `include_stop_str_in_output`, `guided_regex`, `guided_grammar` "
        "(two) and `guided_json`",
        *("regex", "ebnf", "grammar", "json_schema"),
        sampling_seed=_SEED,
        no_stop_trim=bool,
    ),
    _ignored(
        "OpenAI",
        "equal beginnings of prompts are found without them",
        user=str,
        safety_identifier=str,
        prompt_cache_key=str,
        prompt_cache_retention=str,
    ),
    _ignored("OpenAI", "nothing is stored", metadata=dict),
    _ignored(
        "OpenAI", "nothing is stored, no tool is called", store=bool, parallel_tool_calls=bool
    ),
    _ignored("OpenAI", "one tier; no model with verbosity", service_tier=str, verbosity=str),
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

_GROUP_BY_NAME: Mapping[str, FieldGroup] = {name: group for group in GROUPS for name in group.names}

KNOWN_NAMES = frozenset(_GROUP_BY_NAME)


def _types(call: str) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for group in GROUPS:
        if group.action is Action.HONOURED and group.call in ("", call):
            types |= group.types
    return types


def _model(call: str) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in _TYPES[call].items()}
    return create_model(call, __config__=ConfigDict(strict=True), **fields)


_TYPES = {call: _types(call) for call in (COMPLETION, CHAT)}
_MODELS = {call: _model(call) for call in (COMPLETION, CHAT)}


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


Body = Any
"""The honoured fields of a body as attributes, None where they are not given."""


def read_body(raw: bytes, call: str, unknown: UnknownFields) -> Body:
    """The body of a ``call``; `ApiError` unless ``raw`` is a JSON object in UTF-8 with each key
    once whose fields have the right types, and are known or may be ignored."""
    content = _read_json(raw)
    types, given = _TYPES[call], {}
    for name in types.keys() & content.keys():
        value = content.pop(name)
        if not is_empty(value) or types[name] is Any or (value is False and types[name] is bool):
            given[name] = value
    try:
        body = _MODELS[call].model_validate(given)
    except ValidationError as error:
        raise _named(error, types) from None
    for name, value in content.items():
        group = _GROUP_BY_NAME.get(name)
        if group and group.action is not Action.HONOURED:
            group.check(name, value)
        elif is_empty(value):
            continue
        elif not group:
            unknown.see(name)
        elif (name, value) != ("top_logprobs", 0):
            raise unsupported(name, f"there is no such field of {call}")
    return body


def _read_json(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    return content


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "an object",
    "list_type": "a list",
}
"""Pydantic's type of an error -> what was expected."""


def _named(error: ValidationError, types: Mapping[str, Any]) -> ApiError:
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
    [interval] = types[name].__metadata__
    bounds = f"{shown_number(interval.ge)}..{shown_number(interval.le)}"
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
