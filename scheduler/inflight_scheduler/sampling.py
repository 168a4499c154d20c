"""Sampling settings of a request: the one table of their names, defaults and bounds.

Names and meaning follow TensorRT-LLM's ``SamplingConfig`` (`cpp/include/tensorrt_llm/executor/
executor.h`); the arithmetic is in the kernels. Everything else that must know a setting is made
from this table: input tensors and config.pbtxt (`inflight_protocol.sampling`), validation, the
columns that the engine sends to the device, the keys of vLLM's JSON and of OpenAI's API, the
options of the clients, and the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, TypedDict

Word = tuple[int, ...]
"""A word as token ids; at least one."""

MAX_STOP_TOKEN_IDS = 128
"""Tokens that end one request beside its end id, at most."""

MAX_INT32 = 2**31 - 1
MAX_NGRAM_SIZE = 32
"""As in TensorRT-LLM (`cpp/tensorrt_llm/kernels/banRepeatNgram.cu`)."""

_SMALLEST = 1e-6  # a factor of 0 would make every logit the same, or none a number

Bound = float | Literal["vocab_size - 1", "max_new_tokens"]
"""A number, or a limit that is known with the model or the request."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How clients send one field of `SamplingParams`.

    ``tensor`` is the input of the model, ``ensemble`` that of the ``ensemble`` model ("": none).
    ``option`` is the name in OpenAI's API, in vLLM's JSON and in our clients ("": none), ``help``
    the text of the command line. ``is_option_only``: not a key of vLLM's JSON. ``on_device``: the
    engine sends it to the device.
    """

    tensor: str
    dtype: Literal["FP32", "INT32", "UINT64"]
    minimum: Bound
    maximum: Bound
    meaning: str
    ensemble: str = ""
    option: str = ""
    help: str = ""
    is_option_only: bool = False
    on_device: bool = True


def _setting(
    default: float,
    tensor: str,
    dtype: Literal["FP32", "INT32", "UINT64"],
    bounds: tuple[Bound, Bound],
    meaning: str,
    **more: Any,
) -> Any:
    return field(
        default=default, metadata={"setting": Setting(tensor, dtype, *bounds, meaning, **more)}
    )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is sampled. With every filter at 0 (off) it is the most likely one.

    ``top_p_decay``: after each token top_p becomes max(top_p * decay, ``top_p_min``), and what it
    was at first after a token ``top_p_reset_id`` (-1: none). Penalties count the tokens of prompt
    and answer, presence and frequency not those of the first ``prompt_ignore_length`` of the
    prompt. ``bias`` is added to the logits of tokens; ``bad_words`` must not be completed. Each of
    ``stop_token_ids`` ends the answer as the end id does, and waits for ``min_length`` like it.
    """

    temperature: float = _setting(
        1.0,
        "temperature",
        "FP32",
        (0.0, float("inf")),
        "divides the logits; 0 = greedy",
        ensemble="temperature",
        option="temperature",
        help="0 = greedy.",
    )
    top_k: int = _setting(
        0,
        "runtime_top_k",
        "INT32",
        (0, MAX_INT32),
        "sample among the k most likely; 0 = off",
        ensemble="top_k",
        option="top_k",
        help="Sample among the k most likely.",
    )
    top_p: float = _setting(
        0.0,
        "runtime_top_p",
        "FP32",
        (0.0, 1.0),
        "sample within probability mass p; 0 = off",
        ensemble="top_p",
        option="top_p",
        help="Sample within this probability mass.",
    )
    seed: int = _setting(
        0,
        "random_seed",
        "UINT64",
        (0, 2**64 - 1),
        "seed of the random numbers",
        ensemble="random_seed",
        option="seed",
        help="Makes a sampled answer repeatable.",
        on_device=False,
    )
    min_length: int = _setting(
        0,
        "min_length",
        "INT32",
        (0, "max_new_tokens"),
        "minimum number of new tokens",
        ensemble="min_length",
        on_device=False,
    )
    min_p: float = _setting(
        0.0,
        "min_p",
        "FP32",
        (0.0, 1.0),
        "drop tokens less likely than this share of the likeliest",
        ensemble="min_p",
        option="min_p",
        help="Drop tokens below this share of the likeliest.",
    )
    top_p_min: float = _setting(
        _SMALLEST,
        "runtime_top_p_min",
        "FP32",
        (_SMALLEST, 1.0),
        "lower bound of a decaying top_p",
    )
    top_p_decay: float = _setting(
        1.0,
        "runtime_top_p_decay",
        "FP32",
        (_SMALLEST, 1.0),
        "factor of top_p after each token",
    )
    top_p_reset_id: int = _setting(
        -1,
        "runtime_top_p_reset_ids",
        "INT32",
        (-1, "vocab_size - 1"),
        "token after which top_p has its first value again; -1 = none",
    )
    repetition_penalty: float = _setting(
        1.0,
        "repetition_penalty",
        "FP32",
        (_SMALLEST, 1e6),
        "divides positive logits of tokens seen",
        ensemble="repetition_penalty",
        option="repetition_penalty",
        help="Above 1, tokens seen become less likely.",
    )
    presence_penalty: float = _setting(
        0.0,
        "presence_penalty",
        "FP32",
        (-1e6, 1e6),
        "subtracted once from tokens seen",
        ensemble="presence_penalty",
        option="presence_penalty",
        help="Subtracted once from tokens seen.",
    )
    frequency_penalty: float = _setting(
        0.0,
        "frequency_penalty",
        "FP32",
        (-1e6, 1e6),
        "subtracted per occurrence of tokens seen",
        ensemble="frequency_penalty",
        option="frequency_penalty",
        help="Subtracted per occurrence from tokens seen.",
    )
    prompt_ignore_length: int = _setting(
        0,
        "prompt_ignore_length",
        "INT32",
        (0, MAX_INT32),
        "first tokens of the prompt that presence and frequency do not count",
        on_device=False,
    )
    no_repeat_ngram_size: int = _setting(
        0,
        "no_repeat_ngram_size",
        "INT32",
        (0, MAX_NGRAM_SIZE),
        "no n-gram of this size twice; 0 = off",
        ensemble="no_repeat_ngram_size",
        option="no_repeat_ngram_size",
        is_option_only=True,
    )
    bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[Word, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken (TensorRT-LLM's rule)."""
        no_filter = self.top_k == 0 and self.top_p == 0.0 and self.min_p == 0.0
        return self.temperature == 0.0 or self.top_k == 1 or no_filter

    @property
    def has_penalties(self) -> bool:
        """True when tokens that were seen count."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def has_decay(self) -> bool:
        """True when top_p changes from token to token."""
        return self.top_p_decay != 1.0 and not self.is_greedy and self.top_p > 0.0

    @property
    def looks_back(self) -> bool:
        """True when the draw depends on more of the text than the model's logits do."""
        return (
            self.has_penalties
            or self.has_decay
            or self.no_repeat_ngram_size > 0
            or any(len(word) > 1 for word in self.bad_words)
        )


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {each.name: each.metadata["setting"] for each in fields(SamplingParams) if each.metadata}
)
"""Field of `SamplingParams` -> how clients send it, in the order of the fields."""


class SamplingOptions(TypedDict, total=False):
    """The settings with an ``option``, under that name, for the type checkers of Python clients."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int


@dataclass(frozen=True, slots=True)
class OutputParams:
    """What a request wants to know beside its tokens (TensorRT-LLM's ``OutputConfig``).

    ``num_top_log_probs``: log probabilities of so many likeliest tokens beside each new one.
    ``context_log_probs``: of each token of the prompt but the first, with as many likeliest ones.
    ``log_prob_ranks``: how many tokens are at least as likely as each new one, itself included.
    """

    log_probs: bool = False
    context_logits: bool = False
    generation_logits: bool = False
    perf_metrics: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    num_top_log_probs: int = 0
    log_prob_ranks: bool = False
    context_log_probs: bool = False
    num_cached_tokens: bool = False

    @property
    def needs_whole_context(self) -> bool:
        """Whether every token of the prompt must be computed, none of it found in the cache."""
        return self.context_logits or self.context_log_probs


NO_OUTPUTS = OutputParams()
"""Tokens only."""


@lru_cache(maxsize=1024)  # the requests of a model that end alike look at one set
def all_end_ids(end_id: int, stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    """What ends a request; with an ``end_id`` of -1 a token that could not be drawn does, too."""
    return frozenset((end_id, *stop_token_ids))


def num_continuations(width: int, end_ids: frozenset[int]) -> int:
    """Of how many continuations there are always ``width`` that do not end with ``end_ids``."""
    return max(2, 1 + len(end_ids - {-1})) * width
