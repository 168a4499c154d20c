"""``logprobs`` of vLLM's backend: of every new token, and of the likeliest ones in its place.

One JSON text per answer: a list with an object for each new token, which maps the ids of these
tokens to ``logprob``, ``rank`` (1 for the likeliest) and ``decoded_token``. The drawn token comes
first. One that is not among the likeliest has for a rank, as in vLLM, how many tokens are at least
as likely.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_OWN = ("output_ids", "output_log_probs", "output_log_prob_ranks")
_TOP = ("top_log_prob_ids", "top_log_probs")


@dataclass(frozen=True, slots=True)
class LogProbs:
    """What a request asks for: ``num_top`` of the likeliest beside each token of the answer.

    ``token_text``: the text of a token by its id.
    """

    num_top: int
    token_text: Callable[[int], str]

    @property
    def inputs(self) -> dict[str, Array]:
        """What asks ``tensorrt_llm`` for them."""
        inputs = {
            name: np.array([[True]]) for name in ("return_log_probs", "return_log_prob_ranks")
        }
        return inputs | {"num_top_log_probs": np.array([[self.num_top]], dtype=np.int32)}

    @property
    def outputs(self) -> list[str]:
        """Where it tells them."""
        return [*_OWN, *(_TOP if self.num_top else ())]

    def read(self, tensors: Mapping[str, Array]) -> list[str]:
        """The objects for the tokens of one response of ``tensorrt_llm``, each as its JSON.

        A long answer as Python's objects would take three times the room.
        """
        ids, values, ranks = (tensors[name].reshape(-1).tolist() for name in _OWN)
        tops: Iterable[list[tuple[int, float]]] = ([] for _ in ids)
        if self.num_top:
            rows = (tensors[name].reshape(-1, self.num_top).tolist() for name in _TOP)
            tops = (list(zip(*row, strict=True)) for row in zip(*rows, strict=True))
        return [
            json.dumps(self._object(*row)) for row in zip(ids, values, ranks, tops, strict=True)
        ]

    def _object(
        self, token_id: int, log_prob: float, rank: int, top: list[tuple[int, float]]
    ) -> dict[int, dict[str, Any]]:
        found = {token_id: self._entry(token_id, log_prob, rank)}
        for place, (likely, value) in enumerate(top, start=1):
            if likely == token_id:  # of equally likely ones the place counts
                found[token_id]["rank"] = place
            else:
                found[likely] = self._entry(likely, value, place)
        return found

    def _entry(self, token_id: int, log_prob: float, rank: int) -> dict[str, Any]:
        return {"logprob": log_prob, "rank": rank, "decoded_token": self.token_text(token_id)}


def to_text(objects: Iterable[str]) -> bytes:
    """The list of them."""
    return f"[{', '.join(objects)}]".encode()
