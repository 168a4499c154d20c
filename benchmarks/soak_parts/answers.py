"""What the demo model must answer: it counts up by one, and its tokens are bytes.

So every byte of a plain answer is known, and one that is short, long, doubled or somebody else's
is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from load import Answer, text_of

OUT_OF_TIME = "before its deadline"
"""Of the error of a request that had no token yet when its time was over."""

_NUM_TOKENS = 40
_NUM_ADAPTERS, _RANK, _QUERIES = 64, 8, 1
_NUM_LAYERS, _SIZE = 5, 128  # of the demo model, whose queries are as many as its columns
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bc"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_REGEX = "[a-c]{2}-[0-9]{1,3}x"
_EBNF = 'root ::= pair (", " pair)?\npair ::= [a-f] "=" [0-9]'
_PAIRS = "[a-f]=[0-9](, [a-f]=[0-9])?"


def continuation(prompt: str, num_tokens: int) -> str:
    """The first ``num_tokens`` bytes of what comes after a ``prompt`` of numbers."""
    text, number = "", int(prompt.split()[-1])
    while len(text) < num_tokens:
        number += 1
        text += f" {number}"
    return text[:num_tokens]


def is_whole(prompt: str, text: str, num_tokens: int) -> bool:
    """True if ``text`` is the answer to ``prompt``, all ``num_tokens`` of it."""
    return text == continuation(prompt, num_tokens)


def is_cut(prompt: str, text: str, num_tokens: int) -> bool:
    """True if ``text`` begins that answer and is shorter: it was stopped, or ran out of time."""
    return len(text) < num_tokens and is_whole(prompt, text, len(text))


@dataclass(frozen=True, slots=True)
class Question:
    """What to send, and whether an answer without errors is right."""

    values: dict[str, Any]
    is_right: Callable[[Answer], bool]
    may_be_late: bool = False
    """It may end with `OUT_OF_TIME` instead."""


def beams(prompt: str) -> Question:
    """Two; every response holds both as they stand, and the best one counts.

    Without early stopping: with it a search ends as soon as two beams have, however unlikely; after
    "34" one counts down to 0.
    """

    def is_right(answer: Answer) -> bool:
        last = [response for response in answer.responses if "text_output" in response][-1]
        best, other = text_of(last), text_of(last, 1)
        return len(last["text_output"]) == 2 and best != other and is_whole(prompt, best, 12)

    return Question(
        _asked(prompt, 12, beam_width=2, len_penalty=1.0, early_stopping=False), is_right
    )


def several(prompt: str) -> Question:
    """Three sequences; greedy, so each counts."""

    def is_right(answer: Answer) -> bool:
        texts = answer.texts
        return len(texts) == 3 and all(is_whole(prompt, text, _NUM_TOKENS) for text in texts)

    return Question(_asked(prompt, num_return_sequences=3), is_right)


def guided_by_schema(prompt: str) -> Question:
    """An object as the schema wants it."""

    def is_right(answer: Answer) -> bool:
        try:
            name, size = json.loads(answer.text).items()
        except ValueError:
            return False
        return name in (("name", "a"), ("name", "bc")) and size[0] == "size" and size[1] <= 99

    return _guided(prompt, "json_schema", json.dumps(_SCHEMA), is_right)


def guided_by_regex(prompt: str) -> Question:
    """As a whole what the expression matches."""
    return _guided(
        prompt, "regex", _REGEX, lambda answer: re.fullmatch(_REGEX, answer.text) is not None
    )


def guided_by_grammar(prompt: str) -> Question:
    """What the rules derive."""
    return _guided(
        prompt, "ebnf_grammar", _EBNF, lambda answer: re.fullmatch(_PAIRS, answer.text) is not None
    )


def allotted_time(prompt: str) -> Question:
    """Ends early, with what there is."""

    def is_right(answer: Answer) -> bool:
        return is_cut(prompt, answer.text, 2000) and _reason(answer) == b"timed_out"

    values = _asked(prompt, 2000, allotted_time_ms=300, return_finish_reason=True)
    return Question(values, is_right, may_be_late=True)


def queue_time(prompt: str) -> Question:
    """Begins soon or not at all."""
    values = _asked(prompt, max_queue_time_ms=500)
    return Question(
        values, lambda answer: is_whole(prompt, answer.text, _NUM_TOKENS), may_be_late=True
    )


def log_probabilities(prompt: str) -> Question:
    """One for each token, none above 0, and their sum."""

    def is_right(answer: Answer) -> bool:
        told = [each for each in answer.responses if "output_log_probs" in each]
        each_token = np.concatenate([response["output_log_probs"] for response in told])
        total = told[-1]["cum_log_probs"][0]
        return (
            is_whole(prompt, answer.text, _NUM_TOKENS)
            and len(each_token) == _NUM_TOKENS
            and bool((each_token <= 0).all())
            and bool(np.isclose(total, each_token.sum(), rtol=1e-3, atol=1e-3))
        )

    return Question(_asked(prompt, return_log_probs=True), is_right)


def stop_words(prompt: str) -> Question:
    """Ends before the seventh number, and shows nothing of it."""
    word = str(int(prompt.split()[-1]) + 7)
    before, found, _ = continuation(prompt, 100).partition(word)
    assert found

    def is_right(answer: Answer) -> bool:
        return answer.text == before and _reason(answer) == b"stop_words"

    values = _asked(prompt, 100, stop_words=[word, "never"], return_finish_reason=True)
    return Question(values, is_right)


def adapter(prompt: str) -> Question:
    """With weights that change nothing, of one of more adapters than are kept."""
    number = int(prompt.split()[-1]) % _NUM_ADAPTERS
    rows = np.zeros((_NUM_LAYERS, _RANK * 2 * _SIZE), np.float16)
    rows[:, : _RANK * _SIZE] = np.random.default_rng(number).normal(size=_RANK * _SIZE)  # A; B: 0
    config = [(_QUERIES, layer, _RANK) for layer in range(_NUM_LAYERS)]
    values = _asked(prompt)
    values["lora_task_id"] = np.array(number, np.uint64)
    values |= {"lora_weights": rows, "lora_config": np.array(config, np.int32)}
    return Question(values, lambda answer: is_whole(prompt, answer.text, _NUM_TOKENS))


QUESTIONS: dict[str, tuple[Callable[[str], Question], ...]] = {
    "beams": (beams,),
    "several sequences": (several,),
    "guided": (guided_by_schema, guided_by_regex, guided_by_grammar),
    "deadline": (allotted_time, queue_time),
    "log probabilities": (log_probabilities,),
    "stop words": (stop_words,),
    "adapters": (adapter,),
}


def _asked(prompt: str, num_tokens: int = _NUM_TOKENS, **more: Any) -> dict[str, Any]:
    return {"text_input": prompt, "max_tokens": num_tokens, "stream": True, **more}


def _guided(prompt: str, kind: str, guide: str, is_right: Callable[[Answer], bool]) -> Question:
    guided = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    return Question(_asked(prompt, 250, **guided), is_right)


def _reason(answer: Answer) -> bytes:
    (reason,) = [each["finish_reason"][0] for each in answer.responses if "finish_reason" in each]
    return bytes(reason)
