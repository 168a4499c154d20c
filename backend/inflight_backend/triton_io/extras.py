"""The tensors that go with tokens: put together, and cut where a stop word ends the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inflight_backend.requests.inference_request import Array

_TOKEN_AXIS = 2
_COUNT = "num_output_tokens"  # of the tokens of one response
_PER_TOKEN = frozenset(  # [1, beam, tokens, ...]
    {
        "output_log_probs",
        "output_log_prob_ranks",
        "generation_logits",
        "top_log_probs",
        "top_log_prob_ids",
    }
)


class Extras:
    """What comes with several responses: rows of tokens go on, the number of tokens is added up, of
    all else the last word counts.

    ``last`` is the latter two, by name; of rows it has what came first.
    """

    __slots__ = ("_rows", "last")

    def __init__(self) -> None:
        self.last: dict[str, Array] = {}
        self._rows: dict[str, list[Array]] | None = None  # of those that came more than once

    def add(self, name: str, tensor: Array) -> None:
        """What the next response says in tensor ``name``."""
        if name not in self.last or name not in _PER_TOKEN:
            is_more = name == _COUNT and name in self.last
            self.last[name] = self.last[name] + tensor if is_more else tensor
            return
        if self._rows is None:
            self._rows = {}
        self._rows.setdefault(name, [self.last[name]]).append(tensor)

    def joined(self) -> dict[str, Array]:
        """All of it, by name; O(tokens)."""
        if self._rows is None:
            return self.last
        return self.last | {name: _joined(parts) for name, parts in self._rows.items()}


def _joined(parts: Sequence[Array]) -> Array:
    filled = [part for part in parts if part.shape[_TOKEN_AXIS]]
    return np.concatenate(filled, axis=_TOKEN_AXIS) if filled else parts[-1]


def without_last(extras: Mapping[str, Array], num_tokens: int) -> dict[str, Array]:
    """``extras`` as if the last ``num_tokens`` of their tokens had not been drawn."""
    if num_tokens == 0:
        return dict(extras)
    kept = dict(extras)
    if "cum_log_probs" in extras:
        dropped = extras["output_log_probs"][:, :, -num_tokens:]
        kept["cum_log_probs"] = extras["cum_log_probs"] - dropped.sum(axis=_TOKEN_AXIS)
    if _COUNT in extras:
        kept[_COUNT] = extras[_COUNT] - np.int32(num_tokens)
    for name in _PER_TOKEN & extras.keys():
        kept[name] = extras[name][:, :, :-num_tokens]
    return kept


def after_the_end(extras: Mapping[str, Array], last: Mapping[str, Array]) -> dict[str, Array]:
    """``extras`` of tokens that do not belong to the answer; ``last``: those at its end."""
    kept = dict(extras)
    if "cum_log_probs" in last:
        kept["cum_log_probs"] = last["cum_log_probs"]
    if _COUNT in extras:
        kept[_COUNT] = np.zeros_like(extras[_COUNT])
    for name in _PER_TOKEN & kept.keys():
        kept[name] = kept[name][:, :, :0]
    return kept


@dataclass(frozen=True, slots=True)
class Zeros:
    """The tensors ``names`` of a request that asked for none of them, as the peer sends them.

    Its clients up to v0.13 name no outputs, and read these in the last response all the same.
    ``num_prompt_ids``: how many of the ids of that response are the prompt's.
    """

    names: frozenset[str]
    num_prompt_ids: int = 0

    def tensors(self, num_beams: int, num_ids: int) -> dict[str, Array]:
        """Zeros of ``num_beams`` answers, of which the longest has ``num_ids`` with its prompt; of
        logits one number."""
        shapes = {
            "cum_log_probs": (1, num_beams),
            "output_log_probs": (1, num_beams, max(num_ids - self.num_prompt_ids, 0)),
            "context_logits": (1, 1, 1),
            "generation_logits": (1, 1, 1, 1),
        }
        return {
            name: np.zeros(shape, dtype=np.float32)
            for name, shape in shapes.items()
            if name in self.names
        }
