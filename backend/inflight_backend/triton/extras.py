"""The tensors that go with tokens: put together, and cut where a stop word ends the answer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from inflight_backend.inference_request import Array

_TOKEN_AXIS = 2
_PER_TOKEN = frozenset(  # [1, beam, tokens, ...]
    {"output_log_probs", "generation_logits", "top_log_probs", "top_log_prob_ids"}
)


def merge(first: Mapping[str, Array], second: Mapping[str, Array]) -> dict[str, Array]:
    """``first``, then ``second``: rows of tokens go on, of all else the last word counts."""
    merged = {**first, **second}
    for name in _PER_TOKEN & first.keys() & second.keys():
        parts = [part for part in (first[name], second[name]) if part.shape[_TOKEN_AXIS]]
        merged[name] = np.concatenate(parts, axis=_TOKEN_AXIS) if parts else second[name]
    return merged


def without_last(extras: Mapping[str, Array], num_tokens: int) -> dict[str, Array]:
    """``extras`` as if the last ``num_tokens`` of their tokens had not been drawn."""
    if num_tokens == 0:
        return dict(extras)
    kept = dict(extras)
    if "cum_log_probs" in extras:
        dropped = extras["output_log_probs"][:, :, -num_tokens:]
        kept["cum_log_probs"] = extras["cum_log_probs"] - dropped.sum(axis=_TOKEN_AXIS)
    if "num_output_tokens" in extras:
        kept["num_output_tokens"] = extras["num_output_tokens"] - np.int32(num_tokens)
    for name in _PER_TOKEN & extras.keys():
        kept[name] = extras[name][:, :, :-num_tokens]
    return kept


def after_the_end(extras: Mapping[str, Array], last: Mapping[str, Array]) -> dict[str, Array]:
    """``extras`` of tokens that do not belong to the answer; ``last``: those at its end."""
    kept = {**extras, **{name: last[name] for name in ("cum_log_probs", "num_output_tokens")
                         if name in last}}  # fmt: skip
    for name in _PER_TOKEN & kept.keys():
        kept[name] = kept[name][:, :, :0]
    return kept
