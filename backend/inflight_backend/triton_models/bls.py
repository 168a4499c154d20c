"""`TritonPythonModel` of ``tensorrt_llm_bls``: text interface of tensorrtllm_backend's BLS model.

It relays between its client and ``tensorrt_llm`` inside the server, for clients that call it by
name. Unlike the peer's it passes cancellation on. With ``num_draft_tokens`` a second, smaller model
of the server guesses (`draft_rounds`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from inflight_backend.errors import ConfigurationError, InvalidRequest, UnsupportedRequest
from inflight_backend.requests.inference_request import Array
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.relay_wire import RelayedRequest, Tensors
from inflight_backend.triton_io.aliases import BENCHMARK_PARAMETERS, with_benchmark_parameters
from inflight_backend.triton_io.inputs import RequestHead, read_flag, read_inputs
from inflight_backend.triton_io.sender import ResponseSender
from inflight_backend.triton_models.draft_rounds import DraftedCall, DraftModel, has_rounds
from inflight_backend.triton_models.relay_client import Convert, RelayedCall, RelayModel
from inflight_backend.triton_models.text_base import (
    CODEC_PARAMETERS,
    load_codec,
    parameters_of,
    read_switch,
)
from inflight_protocol import DRAFT_INPUTS, ENSEMBLE_INPUT_MAP, LLM_MODEL_NAME

_INDEXES = ("batch_index", "sequence_index")
_NUM_DRAFTS, _USE_LOGITS = (spec.name for spec in DRAFT_INPUTS)
_DRAFT_MODEL = "tensorrt_llm_draft_model_name"


class TritonPythonModel(RelayModel):
    """The model ``tensorrt_llm_bls``.

    With the parameter ``accumulate_tokens`` every response of a stream holds the whole text so far
    of its row and sequence; those of a search with beams do so anyway.

    ``use_draft_logits`` may be true or false: a guess counts if it is the token that the target
    draws, which is exact without the logits of the draft model.
    """

    _drafts: DraftModel | None = None

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters; a failure fails the load with one line."""
        parameters = parameters_of(
            args, "accumulate_tokens", "tensorrt_llm_model_name", _DRAFT_MODEL, *CODEC_PARAMETERS
        )
        self._accumulates = read_switch(parameters, "accumulate_tokens", False)
        target = parameters.get("tensorrt_llm_model_name") or LLM_MODEL_NAME
        # Before a tokenizer loads: the server may die meanwhile.
        self.open(args, target)
        if name := parameters.get(_DRAFT_MODEL):
            self._drafts = DraftModel(target, name, _load_codec(parameters))

    def translate(
        self, request: Any, head: RequestHead
    ) -> tuple[dict[str, Array], list[str], Convert]:
        """See `RelayModel.translate`."""
        head.refuse_settings(but=BENCHMARK_PARAMETERS)
        inputs = with_benchmark_parameters(head, read_inputs(request))
        _check_text(inputs)
        self._check_drafts(inputs)
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

    def make_call(self, request: RelayedRequest, stream: ResponseSender) -> RelayedCall:
        """See `RelayModel.make_call`."""
        tensors = dict(request.inputs)
        num_drafts = tensors.pop(_NUM_DRAFTS, None)
        tensors.pop(_USE_LOGITS, None)
        plain = RelayedRequest(tensors, request.requested)
        if self._drafts is None or num_drafts is None or not num_drafts.any():
            return super().make_call(plain, stream)
        if not has_rounds(tensors):
            return super().make_call(plain, stream)
        return DraftedCall(self._drafts, stream, plain, int(num_drafts.item()))

    def _check_drafts(self, inputs: Mapping[str, Array]) -> None:
        """The peer's own checks of a request with a draft model."""
        read_flag(inputs, _USE_LOGITS)
        num_drafts = inputs.get(_NUM_DRAFTS)
        if num_drafts is None or not num_drafts.any():
            return
        if (num_drafts < 0).any():
            raise InvalidRequest(f"'{_NUM_DRAFTS}' must be 0 or above")
        if self._drafts is None:
            raise UnsupportedRequest(
                f"'{_NUM_DRAFTS}' needs a draft model, and this server has none: start it with "
                f"`inflight serve --draft-model FOLDER` (parameter {_DRAFT_MODEL} of this model)"
            )
        if num_drafts.size != 1:
            raise UnsupportedRequest(f"'{_NUM_DRAFTS}' is for one prompt, got {num_drafts.size}")
        for name in ("stream", "return_context_logits"):
            if read_flag(inputs, name):
                raise UnsupportedRequest(f"'{name}' is not supported together with '{_NUM_DRAFTS}'")


def _load_codec(parameters: Mapping[str, str]) -> TextCodec:
    if not any(parameters.get(key) for key in CODEC_PARAMETERS):
        raise ConfigurationError(
            f"{_DRAFT_MODEL} needs the tokenizer of the target: set gpt_model_path of this model"
        )
    return load_codec(parameters)


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
