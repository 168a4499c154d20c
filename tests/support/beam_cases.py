"""Searches with beams, and the same in transformers: what it finds is what ours must find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import VOCAB_SIZE, load_oracle
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
EARLY_STOPPING: dict[int, bool | str] = {1: True, 0: False, 2: "never"}


@dataclass(frozen=True)
class Case:
    """A search, and the same in transformers' words; ``more`` of both, where they differ."""

    width: int
    num_new: int
    num_prompt: int = 11
    length_penalty: float = 0.0
    early_stopping: int = 1
    has_end: bool = True
    ours: tuple[tuple[str, Any], ...] = ()
    theirs: tuple[tuple[str, Any], ...] = ()
    rules: tuple[LogitsProcessor, ...] = ()

    def without(self) -> Iterator[Case]:
        """The case less what it is there for; each of these has other answers."""
        if self.rules:
            yield replace(self, rules=())
        if self.early_stopping == 2:
            yield replace(self, early_stopping=0)

    @property
    def prompt(self) -> list[int]:
        return [self.width, *PROMPT[: self.num_prompt], self.num_new]


class OfLogits(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """In transformers' search rules get log probabilities, here those of a row's own logits.

    That matters: a repetition penalty depends on their sign.
    """

    def __init__(self, model: Any, rules: tuple[LogitsProcessor, ...]) -> None:
        self.model, self.rules = model, rules

    def __call__(self, input_ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids).logits[:, -1]
        for rule in self.rules:
            logits = rule(input_ids, logits)
        return logits.log_softmax(dim=-1)


class Counting(LogitsProcessor):  # type: ignore[misc]
    """The penalties that transformers lacks; the first ``ignored`` tokens do not count."""

    def __init__(self, presence: float, frequency: float, ignored: int = 0) -> None:
        self.presence, self.frequency, self.ignored = presence, frequency, ignored

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        counted = input_ids[:, self.ignored :]
        counts = torch.stack([torch.bincount(row, minlength=VOCAB_SIZE) for row in counted])
        return logits - self.presence * (counts > 0) - self.frequency * counts


# Bans come after transformers' log softmax and before ours, so there it must be done again.
AGAIN = ("renormalize_logits", True)
BIAS = {(9,): 1.5, (2,): -2.5, (40,): 3.0, (77,): -1.0}
CASES = (
    Case(2, 8),
    Case(2, 1, has_end=False),
    Case(4, 14, 6, 1.0, 0),
    Case(3, 13, 9, 1.0, 2),
    Case(4, 14, 10, -0.5),
    Case(3, 9, 2, has_end=False),
    Case(4, 13, 7, 1.0, 0, ours=(("min_length", 5),), theirs=(("min_new_tokens", 5), AGAIN)),
    Case(
        2,
        12,
        ours=(("no_repeat_ngram_size", 2), ("bad_words_list", [[9, 2], [1, 2]])),
        theirs=(("no_repeat_ngram_size", 2), ("bad_words_ids", [[9], [2]]), AGAIN),
    ),
    Case(
        3,
        8,
        ours=(("embedding_bias", [BIAS.get((token,), 0.0) for token in range(VOCAB_SIZE)]),),
        theirs=(("sequence_bias", BIAS), AGAIN),
    ),
    Case(
        4,
        14,
        ours=(("temperature", 0.8), ("repetition_penalty", 1.7)),
        rules=(TemperatureLogitsWarper(0.8), RepetitionPenaltyLogitsProcessor(1.7)),
    ),
    Case(
        3,
        14,
        6,
        1.0,
        0,
        ours=(
            ("temperature", 1.3),
            ("repetition_penalty", 0.8),
            ("presence_penalty", 0.4),
            ("frequency_penalty", 0.7),
            ("prompt_ignore_length", 4),
        ),
        rules=(
            TemperatureLogitsWarper(1.3),
            RepetitionPenaltyLogitsProcessor(0.8),
            Counting(0.4, 0.7, ignored=4),
        ),
    ),
)


@torch.inference_mode()
def search(folder: Path, case: Case, end_id: int | None) -> tuple[list[list[int]], list[float]]:
    """What transformers finds: answers without their end, and their scores."""
    length, oracle = len(case.prompt), load_oracle(folder)
    found = oracle.generate(
        torch.tensor([case.prompt]),
        attention_mask=torch.ones(1, length, dtype=torch.long),
        num_beams=case.width,
        num_return_sequences=case.width,
        max_new_tokens=case.num_new,
        do_sample=False,
        eos_token_id=end_id,
        pad_token_id=0,
        length_penalty=case.length_penalty,
        early_stopping=EARLY_STOPPING[case.early_stopping],
        return_dict_in_generate=True,
        output_scores=True,
        logits_processor=[OfLogits(oracle, case.rules)] if case.rules else [],
        **dict(case.theirs),
    )
    answers = [row.tolist()[length:] for row in found.sequences]
    return [
        answer[: answer.index(end_id)] if end_id in answer else answer for answer in answers
    ], found.sequences_scores.tolist()
