"""Every field of a request body that is known, and what is done with it, in one table.

Parsing, ``--strict`` and the table of docs/clients.md read it. The names are those of OpenAI's API
and of the servers, gateways and SDKs whose clients send more than that. A field is

- *honoured*: `inflight_openai.parsing` reads it;
- *passed over*: whatever it says, the text of the answer stays the same;
- *refused*, unless its value asks for nothing, since it would change the answer.

Null, false and what is empty ask for nothing, unless a field is true where it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Action(Enum):
    """What is done with a field."""

    HONOURED = "honoured"
    PASSED = "passed over"
    REFUSED = "refused"


CHAT = "chats"
COMPLETION = "completions"


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Fields that are treated alike; a row of the table.

    ``note``: what they do, or why nothing is done.
    ``neutral``: values that ask for nothing, by name, beside null, false and empty ones.
    ``kind``: the only type that is taken. ``call``: the only call that has them.
    ``inner``: what an object that is refused may hold: names that do not change the answer.
    """

    origin: str
    action: Action
    note: str
    names: tuple[str, ...]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    kind: type | None = None
    call: str = ""
    inner: frozenset[str] = frozenset()

    def asks_for_nothing(self, name: str, value: Any) -> bool:
        """Whether a request with ``value`` in field ``name`` is answered as one without it."""
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


def _honoured(origin: str, note: str, *names: str, call: str = "") -> FieldGroup:
    return FieldGroup(origin, Action.HONOURED, note, names, call=call)


def _passed(origin: str, note: str, *names: str, kind: type | None = None) -> FieldGroup:
    return FieldGroup(origin, Action.PASSED, note, names, kind=kind)


def _refused(
    origin: str, note: str, *names: str, inner: tuple[str, ...] = (), **neutral: tuple[Any, ...]
) -> FieldGroup:
    """``neutral`` names fields, too."""
    every = (*names, *neutral)
    return FieldGroup(origin, Action.REFUSED, note, every, neutral, inner=frozenset(inner))


_OLLAMA_SIZES = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"),
    *("low_vram", "use_mmap", "use_mlock"),
)

GROUPS: tuple[FieldGroup, ...] = (
    _honoured("OpenAI", "the one that is served", "model"),
    _honoured("OpenAI", "text, token ids, or a list of either", "prompt", call=COMPLETION),
    _honoured("OpenAI", "messages whose content is text", "messages", call=CHAT),
    _honoured(
        "OpenAI",
        "default 16 for completions, all that fits for chats (`--default-max-tokens`); the second "
        "wins",
        "max_tokens",
        "max_completion_tokens",
    ),
    _honoured(
        "OpenAI",
        "as OpenAI has them: without the first two an answer is drawn with both at 1; 0 of either "
        "takes the likeliest token",
        *("temperature", "top_p", "seed", "stream"),
    ),
    _honoured(
        "OpenAI",
        "as OpenAI has them; up to 20 likeliest tokens in each place, and 16 stop strings",
        *("stop", "n", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"),
    ),
    FieldGroup(
        "OpenAI",
        Action.HONOURED,
        "up to 20, together with `logprobs`",
        ("top_logprobs",),
        neutral={"top_logprobs": (0,)},
        call=CHAT,
    ),
    _honoured(
        "OpenAI",
        "`include_usage`; beside it vLLM's `continuous_usage_stats`: every event tells the usage",
        "stream_options",
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
        "echo",
        call=COMPLETION,
    ),
    _honoured("OpenAI", "must be what `n` is: there is no choice among more answers", "best_of"),
    _honoured(
        "OpenAI",
        "tools are refused unless the choice is `none`: then they are passed over",
        *("tools", "tool_choice", "functions", "function_call"),
    ),
    _honoured(
        "OpenAI",
        "variable of the chat template, as with vLLM; nothing where that does not know it",
        "reasoning_effort",
    ),
    _passed(
        "OpenAI",
        "who asks, and which requests begin alike: equal beginnings are found anyway",
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        kind=str,
    ),
    _passed("OpenAI", "nothing is filed", "metadata", kind=dict),
    _passed(
        "OpenAI", "nothing is stored, no tool is called", "store", "parallel_tool_calls", kind=bool
    ),
    _passed(
        "OpenAI",
        "there is one tier, and no model that has the other",
        "service_tier",
        "verbosity",
        kind=str,
    ),
    _passed("OpenAI", "it saves time where it is used, and changes nothing else", "prediction"),
    _refused(
        "OpenAI",
        "not there",
        *("audio", "moderation", "suffix", "web_search_options"),
        modalities=(["text"],),
        prompt_cache_options=({"mode": "implicit"},),
    ),
    _honoured(
        "vLLM, SGLang",
        "as vLLM has them",
        *("top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids", "repetition_penalty"),
        *("bad_words", "no_repeat_ngram_size", "cache_salt", "add_special_tokens"),
    ),
    _honoured(
        "vLLM",
        "what the answer must be; `structured_outputs` holds one of `json`, `regex`, `choice`, "
        "`grammar` (EBNF) and `json_object`",
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
        "structured_outputs",
    ),
    _honoured(
        "vLLM",
        "the stop string that ended an answer is part of it; special tokens have their text",
        *("include_stop_str_in_output", "skip_special_tokens"),
    ),
    _honoured(
        "vLLM",
        "the last so many tokens of the prompt; -1: as many as fit",
        "truncate_prompt_tokens",
    ),
    _honoured(
        "vLLM",
        "`prompt_token_ids` and `token_ids`; in log probabilities `token_id:5` instead of its text",
        *("return_token_ids", "return_tokens_as_token_ids"),
    ),
    _honoured("vLLM", "the `id` of the answer ends with it", "request_id"),
    _honoured(
        "vLLM, others",
        'variables of the chat template: `{"enable_thinking": false}` for Qwen3; the others are '
        "such variables by themselves",
        *("chat_template_kwargs", "enable_thinking", "thinking", "think", "reasoning"),
    ),
    _passed(
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
        "not there",
        *("prompt_logprobs", "allowed_token_ids", "use_beam_search", "logits_processors"),
        *("documents", "chat_template", "mm_processor_kwargs", "kv_transfer_params", "vllm_xargs"),
        *("guided_whitespace_pattern", "structural_tag", "continue_final_message"),
        add_generation_prompt=(True,),
        detokenize=(True,),
    ),
    _honoured(
        "SGLang, llama.cpp",
        "other names of `seed`, `include_stop_str_in_output`, `guided_regex`, `guided_grammar` "
        "(two) and `guided_json`",
        *("sampling_seed", "no_stop_trim", "regex", "ebnf", "grammar", "json_schema"),
    ),
    _passed(
        "SGLang",
        "nothing in an answer depends on them; what a model thinks stays in its text",
        *("separate_reasoning", "stream_reasoning", "rid", "data_parallel_rank", "extra_key"),
        *("return_cached_tokens_details", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    ),
    _refused(
        "SGLang, TensorRT-LLM",
        "not there",
        *("return_hidden_states", "lora_path", "lora_request", "session_params", "stop_regex"),
        *("custom_logit_processor", "custom_params", "disaggregated_params"),
        *("return_context_logits", "return_generation_logits"),
        top_p_min=(0,),
        beam_search_diversity_rate=(0,),
    ),
    _passed(
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
    _passed(
        "OpenRouter",
        "there is one server",
        *("provider", "transforms", "models", "route", "usage"),
    ),
    _refused("OpenRouter", "not there", "plugins", "preset"),
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

GROUP_BY_NAME: Mapping[str, FieldGroup] = {name: group for group in GROUPS for name in group.names}
