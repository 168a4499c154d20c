"""The request parameters that public benchmark clients send beside the inputs of a generation.

None is an input of the peer, which passes them over. Here only `SETTINGS` are taken, and the others
refused by name: a setting that silently does nothing is worse than an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_backend.errors import InvalidRequest
from inflight_backend.triton_io.request_head import RequestHead
from inflight_protocol import ACCUMULATE_PARAMETER, IGNORE_EOS_PARAMETER

Array = npt.NDArray[Any]

SETTINGS = (ACCUMULATE_PARAMETER, IGNORE_EOS_PARAMETER)
_NO_END = -1


def with_settings(head: RequestHead, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """``inputs`` and what `SETTINGS` add to them, in each row of the prompt.

    `InvalidRequest` for one that is neither true nor false, or not what the inputs say.
    """
    head.read_switch(ACCUMULATE_PARAMETER)
    if not head.read_switch(IGNORE_EOS_PARAMETER):
        return inputs
    end_id = inputs.get("end_id")
    if end_id is not None:
        if (end_id != _NO_END).any():
            raise InvalidRequest(
                f"request parameter '{IGNORE_EOS_PARAMETER}' must not be true if 'end_id' names "
                "a token"
            )
        return inputs
    prompt = inputs.get("input_ids", inputs.get("text_input"))
    num_rows = 1 if prompt is None or prompt.ndim < 2 else len(prompt)
    return {**inputs, "end_id": np.full((num_rows, 1), _NO_END, dtype=np.int32)}
