"""`TritonPythonModel` of ``tensorrt_llm_bls``: the text interface of the peer's model of that name.

It relays between its client and ``tensorrt_llm`` inside the server, for clients that call it by
name. Unlike the peer's it passes cancellation on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_backend.errors import InvalidRequest
from inflight_backend.triton.beam_stream import has_beams
from inflight_backend.triton.decoding import read_inputs
from inflight_backend.triton.mailbox import Tensors
from inflight_backend.triton.relay import Convert, RelayModel
from inflight_backend.triton.request_head import RequestHead
from inflight_backend.triton.text_model import parameters_of, read_switch
from inflight_client.protocol import ENSEMBLE_INPUT_MAP, LLM_MODEL_NAME

Array = npt.NDArray[Any]

_INDEX = "sequence_index"


class TritonPythonModel(RelayModel):
    """The model ``tensorrt_llm_bls``.

    With the parameter ``accumulate_tokens`` every response of a stream holds the whole text so far
    of its sequence; those of a search with beams do so anyway.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters; a failure fails the load with one line."""
        parameters = parameters_of(args)
        self._accumulates = read_switch(parameters, "accumulate_tokens", False)
        self.open(args, parameters.get("tensorrt_llm_model_name") or LLM_MODEL_NAME)

    def translate(
        self, request: Any, head: RequestHead
    ) -> tuple[dict[str, Array], list[str], Convert]:
        """See `RelayModel.translate`."""
        head.refuse_settings()
        inputs = read_inputs(request)
        _check_text(inputs)
        inner = {ENSEMBLE_INPUT_MAP.get(name, name): value for name, value in inputs.items()}
        outputs = list(request.requested_output_names())
        if not self._accumulates or has_beams(inputs):
            return inner, outputs, iter
        drops_index = bool(outputs) and _INDEX not in outputs  # none named: all are sent
        outputs += [_INDEX] if drops_index else []
        return inner, outputs, partial(_accumulate, drops_index=drops_index)


def _check_text(inputs: dict[str, Array]) -> None:
    """The peer's own checks, before anything is sent."""
    if "text_input" not in inputs:
        raise InvalidRequest("'text_input' is missing")
    max_tokens = inputs.get("max_tokens")
    if max_tokens is None or max_tokens.size != 1 or max_tokens.reshape(-1)[0] <= 0:
        raise InvalidRequest(
            "'max_tokens' must be a single value above 0: this model takes one row per request"
        )


def _accumulate(responses: Iterator[Tensors], *, drops_index: bool) -> Iterator[Tensors]:
    """Put the whole text of a sequence so far in place of what is new of it.

    ``drops_index``: the client did not ask which sequence a response belongs to; it is asked here.
    """
    texts: dict[int, bytes] = defaultdict(bytes)
    for tensors in responses:
        if "text_output" in tensors:
            index = int(tensors[_INDEX].item()) if _INDEX in tensors else 0
            texts[index] += tensors["text_output"].item()
            tensors["text_output"] = np.array([texts[index]], dtype=np.object_)
        if drops_index:
            tensors.pop(_INDEX, None)
        yield tensors
