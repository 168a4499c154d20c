"""`TritonPythonModel` of ``tensorrt_llm_bls``: text interface of tensorrtllm_backend's BLS model.

It relays between its client and ``tensorrt_llm`` inside the server, for clients that call it by
name. Unlike the peer's it passes cancellation on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import Array
from inflight_backend.triton.relay_wire import Tensors
from inflight_backend.triton_io.aliases import BENCHMARK_PARAMETERS, with_benchmark_parameters
from inflight_backend.triton_io.inputs import RequestHead, read_inputs
from inflight_backend.triton_models.relay_client import Convert, RelayModel
from inflight_backend.triton_models.text_base import parameters_of, read_switch
from inflight_protocol import ENSEMBLE_INPUT_MAP, LLM_MODEL_NAME

_INDEXES = ("batch_index", "sequence_index")


class TritonPythonModel(RelayModel):
    """The model ``tensorrt_llm_bls``.

    With the parameter ``accumulate_tokens`` every response of a stream holds the whole text so far
    of its row and sequence; those of a search with beams do so anyway.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters; a failure fails the load with one line."""
        parameters = parameters_of(args, "accumulate_tokens", "tensorrt_llm_model_name")
        self._accumulates = read_switch(parameters, "accumulate_tokens", False)
        self.open(args, parameters.get("tensorrt_llm_model_name") or LLM_MODEL_NAME)

    def translate(
        self, request: Any, head: RequestHead
    ) -> tuple[dict[str, Array], list[str], Convert]:
        """See `RelayModel.translate`."""
        head.refuse_settings(but=BENCHMARK_PARAMETERS)
        inputs = with_benchmark_parameters(head, read_inputs(request))
        _check_text(inputs)
        inner = {ENSEMBLE_INPUT_MAP.get(name, name): value for name, value in inputs.items()}
        outputs = list(request.requested_output_names())
        if not self._accumulates:
            return inner, outputs, iter
        added = [name for name in _INDEXES if outputs and name not in outputs]  # none named: all
        return (
            inner,
            outputs + added,
            partial(_accumulate, whole=_rows_with_beams(inputs), dropped=added),
        )


def _check_text(inputs: Mapping[str, Array]) -> None:
    """The peer's own checks, before anything is sent."""
    if "text_input" not in inputs:
        raise InvalidRequest("'text_input' is missing")
    max_tokens = inputs.get("max_tokens")
    if max_tokens is None or max_tokens.size == 0 or (max_tokens <= 0).any():
        raise InvalidRequest("'max_tokens' must be above 0 in every row")


def _rows_with_beams(inputs: Mapping[str, Array]) -> frozenset[int]:
    width = inputs.get("beam_width", np.ones(1))
    return frozenset(np.flatnonzero(width.reshape(-1) > 1).tolist())


def _accumulate(
    responses: Iterator[Tensors], *, whole: frozenset[int], dropped: Sequence[str]
) -> Iterator[Tensors]:
    """Put the whole text of a sequence so far in place of what is new of it.

    ``whole``: the rows whose responses say everything as they are; ``dropped``: what the client did
    not ask for, of which row and sequence a response is.
    """
    texts: dict[tuple[int, int], bytes] = defaultdict(bytes)
    for tensors in responses:
        row, sequence = (int(tensors[name].item()) if name in tensors else 0 for name in _INDEXES)
        if "text_output" in tensors and row not in whole:
            index = row, sequence
            texts[index] += tensors["text_output"].item()
            tensors["text_output"] = np.array([texts[index]], dtype=np.object_)
        for name in dropped:
            tensors.pop(name, None)
        yield tensors
