"""What the models ``preprocessing`` and ``postprocessing`` share: a tokenizer, no engine.

They are for clients that tokenise through the server; `tensorrt_llm` itself takes text. Rows are
padded to the longest, so a long one beside many short ones makes a table much larger than the
texts: requests are bounded by both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from inflight_backend.errors import InvalidRequest, ServingError
from inflight_backend.log import get_logger
from inflight_backend.manager.parameters import check_keys, read_raw, set_or_empty
from inflight_backend.process_guard import exit_with_parent
from inflight_backend.requests.inference_request import Array
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_io.inputs import decode_text, read_head, read_inputs
from inflight_backend.triton_io.sender import ResponseFactory

_logger = get_logger(__name__)


CODEC_PARAMETERS = ("tokenizer_dir", "gpt_model_path")
"""The parameters that say which tokenizer it is."""

_TRUE, _FALSE = ("true", "1"), ("false", "0")

Convert = Callable[[Mapping[str, Array]], dict[str, Array]]
"""From the tensors of one request to those of its response; ``InvalidRequest`` names what is wrong
with them."""


def parameters_of(args: Mapping[str, str], *known: str) -> dict[str, str]:
    """The model's ``parameters`` block; placeholders that were not filled are empty.

    `ConfigurationError` for one that is set and neither ``known`` nor Triton's own.
    """
    raw = read_raw(args["model_config"])
    values = {key: set_or_empty(value) for key, value in raw.items()}
    check_keys(values, known)
    return values


def load_codec(parameters: Mapping[str, str]) -> TextCodec:
    """The tokenizer of ``tokenizer_dir``, else of ``gpt_model_path``, whose end ids it has."""
    folder, checkpoint = (parameters.get(key) for key in ("tokenizer_dir", "gpt_model_path"))
    if not folder:
        return TextCodec(Path(parameters["gpt_model_path"]))
    return TextCodec(Path(folder), Path(checkpoint) if checkpoint else None)


def read_switch(parameters: Mapping[str, str], key: str, default: bool) -> bool:
    """A parameter that is true or false; `InvalidRequest` for another value."""
    value = parameters.get(key, "").lower() or str(default).lower()
    if value not in _TRUE + _FALSE:
        raise InvalidRequest(f"{key} must be true or false, got {value!r}")
    return value in _TRUE


def texts(inputs: Mapping[str, Array], name: str, num_rows: int) -> list[list[str]]:
    """The strings of every row; empty rows if the tensor was not sent."""
    if name not in inputs:
        return [[] for _ in range(num_rows)]
    return [[decode_text(name, each) for each in row.reshape(-1)] for row in inputs[name]]


class TextModel(ABC):
    """A Triton model that converts the tensors of a request with the tokenizer.

    ``switch``: its parameter that is true or false.
    """

    switch: ClassVar[str]

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer; a failure fails the load with one line."""
        import triton_python_backend_utils as pb_utils  # exists only inside Triton

        exit_with_parent(args["model_name"])
        self._pb_utils = pb_utils
        parameters = parameters_of(args, *CODEC_PARAMETERS, self.switch)
        is_on = read_switch(parameters, self.switch, True)
        self._convert = self.make_converter(args, parameters, load_codec(parameters), is_on)

    @abstractmethod
    def make_converter(
        self, args: Mapping[str, str], parameters: Mapping[str, str], codec: TextCodec, is_on: bool
    ) -> Convert:
        """What converts; ``is_on``: the value of `switch`."""

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request; a bad one gets an error and does not affect the others."""
        return [respond(self._pb_utils, request, self._convert) for request in requests]


def respond(pb_utils: Any, request: Any, convert: Convert) -> Any:
    """The response to one request."""
    head = read_head(request)
    factory = ResponseFactory(pb_utils, tells_codes=head.asks_for_codes)
    try:
        head.refuse_settings()
        inputs = read_inputs(request)
        num_rows = {len(tensor) for tensor in inputs.values()}
        if len(num_rows) > 1:
            raise InvalidRequest("the tensors of the request differ in their first dimension")
        outputs = convert(inputs)
        wanted = set(request.requested_output_names()) or set(outputs)
        return factory.tensors(
            {name: np.ascontiguousarray(value) for name, value in outputs.items() if name in wanted}
        )
    except ServingError as error:
        return factory.error(str(error), error.code)
    except BaseException:  # ours, or a panic of the tokenizer: the others of the batch are served
        _logger.exception("a request could not be converted")
        return factory.error("the request could not be served")
