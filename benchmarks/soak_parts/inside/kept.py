"""Runs inside the model process: a logits processor that makes an answer tell what is kept there.

No figure of the server counts what its front, its queue and its dispatcher remember of requests. So
all objects that belong to one request are counted, whatever holds them. The folder is on the model
process's path, and nothing else is in it.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

CLASSES = (
    "BeamStream",
    "InferenceRequest",
    "LlmRequest",
    "ResponseSender",
    "TokenStream",
)
"""Of whose objects each belongs to one request in flight; what waits to be sent is among them."""

LISTS = {"RequestIds": "_name_to_number", "Frontend": "_groups"}
"""By class where else a request in flight has an entry: its id, and its several sequences."""


class _Telling:
    """The answer to the request that asked last."""

    def __init__(self) -> None:
        self._request_id = -1
        self._num_before = 0
        self._text = ""

    def __call__(
        self, request_id: int, logits: Any, tokens: Sequence[Sequence[int]], stream: int
    ) -> None:
        """Leave only the next byte of the JSON, and blanks behind it."""
        if request_id != self._request_id:
            self._request_id, self._num_before = request_id, len(tokens[0])
            self._text = json.dumps(count())
        index = len(tokens[0]) - self._num_before
        byte = ord(self._text[index]) if index < len(self._text) else ord(" ")
        logits.fill_(float("-inf"))
        logits[..., byte] = 0.0


tell = _Telling()


def count() -> dict[str, int]:
    """How many objects of each class there are, but for garbage, and how many entries."""
    gc.collect()
    found = Counter(dict.fromkeys((*CLASSES, *LISTS), 0))
    for each in gc.get_objects():
        name = type(each).__name__
        if name in LISTS:
            found[name] += len(getattr(each, LISTS[name]))
        elif name in found:
            found[name] += 1
    return dict(found)
