"""How a request wants its tokens drawn: values only, checked by whoever makes them.

Names and meaning follow TensorRT-LLM's ``SamplingConfig`` (`cpp/include/tensorrt_llm/executor/
executor.h`); the arithmetic is in the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

Word = tuple[int, ...]
"""A word as token ids; at least one."""

MAX_STOP_TOKEN_IDS = 128
"""Tokens that end one request beside its end id, at most."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. With every filter at 0 (off) it is the most likely one.

    ``top_p_decay``: after each token top_p becomes max(top_p * decay, ``top_p_min``), and what it
    was at first after a token ``top_p_reset_id`` (-1: none). Penalties count the tokens of prompt
    and answer, presence and frequency not those of the first ``prompt_ignore_length`` of the
    prompt. ``bias`` is added to the logits of tokens; ``bad_words`` must not be completed. Each of
    ``stop_token_ids`` ends the answer as the end id does, and waits for ``min_length`` like it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 0
    min_length: int = 0
    min_p: float = 0.0
    top_p_min: float = 1e-6
    top_p_decay: float = 1.0
    top_p_reset_id: int = -1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int = 0
    no_repeat_ngram_size: int = 0
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


@dataclass(frozen=True, slots=True)
class OutputParams:
    """What a request wants to know beside its tokens (TensorRT-LLM's ``OutputConfig``).

    ``num_top_log_probs``: log probabilities of so many likeliest tokens beside each new one.
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


NO_OUTPUTS = OutputParams()
"""Tokens only."""


@lru_cache(maxsize=1024)  # the requests of a model that end alike look at one set
def all_end_ids(end_id: int, stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    """What ends a request; with an ``end_id`` of -1 a token that could not be drawn does, too."""
    return frozenset((end_id, *stop_token_ids))


def num_continuations(width: int, end_ids: frozenset[int]) -> int:
    """Of how many continuations there are always ``width`` that do not end with ``end_ids``."""
    return max(2, 1 + len(end_ids - {-1})) * width
