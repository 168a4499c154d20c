"""Errors as OpenAI's API words them: an HTTP status and a JSON object that names the parameter."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inflight_client.errors import (
    AccessDenied,
    InflightError,
    InvalidArgument,
    RequestTimeout,
    ServerError,
    ServerUnreachable,
    StreamInterrupted,
)
from inflight_protocol.sampling import SAMPLING_OPTIONS

if TYPE_CHECKING:
    from pydantic import ValidationError

_logger = logging.getLogger(__name__)

_STATUS_TO_HTTP = {
    "INVALID_ARG": 400,
    "UNSUPPORTED": 400,
    "ALREADY_EXISTS": 409,
    "UNAVAILABLE": 503,
    "INTERNAL": 500,
}
"""Error code of the model -> HTTP status.

An error without a code comes from Triton itself: the model is not loaded, or its process died.
"""

TENSOR_TO_FIELD = {tensor: field for field, tensor in SAMPLING_OPTIONS.items()} | {
    "min_length": "min_tokens",
    "request_output_len": "max_tokens",
    "stop_words": "stop",
    "stop_token_ids": "stop_token_ids",
    "bad_words": "bad_words",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "skip_special_tokens": "skip_special_tokens",
    "embedding_bias": "logit_bias",
    "num_return_sequences": "n",
    "return_log_probs": "logprobs",
    "num_top_log_probs": "top_logprobs",
    "guided_decoding_guide_type": "response_format",
    "guided_decoding_guide": "response_format",
    "input_ids": "prompt",
    "lora_name": "model",
}
"""Input tensor -> field of a request body."""

TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a text that does not fit: clients look for it, to shorten what they send."""

_TOO_LONG_WORDS = "This model's maximum context length is exceeded: "
"""LiteLLM, and the clients built on it, look for these words instead of the code."""

_LIMIT_OF_LENGTH = re.compile(r"\b(max_seq_len|max_input_len|max_num_tokens|KV blocks)\b")
_TENSOR = re.compile(rf"\b({'|'.join(TENSOR_TO_FIELD)})\b")
_UNKNOWN_INPUT = re.compile(r"^unexpected inference input '(\w+)'")  # Triton's message
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
"""Pydantic's type of an error -> what was expected."""


class ApiError(Exception):
    """Ends one HTTP request; `body` is the JSON of the response. ``allow``: methods that the path
    of a 405 has."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.allow = allow

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {429: "rate_limit_error", 401: "authentication_error"}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kinds.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


NO_MODEL = "model_not_found"


def model_not_found(served: str) -> ApiError:
    """The error for a request that names another model than ``served``."""
    message = f"the model does not exist here; this is {served}"
    return ApiError(404, message, "model", NO_MODEL)


def bad_field(param: str, message: str) -> ApiError:
    """The error for a field whose value cannot be used."""
    return ApiError(400, f"{param}: {message}", param, "invalid_value")


def unsupported(param: str, message: str = "") -> ApiError:
    """The error for a field whose value asks for a missing feature."""
    message = message or "not supported by this server"
    return ApiError(400, f"{param}: {message}", param, "unsupported_parameter")


def kind_of(value: Any) -> str:
    """The JSON type of ``value``, for messages."""
    return "nothing" if value is None else _KINDS.get(type(value), "a number")


def named_error(error: ValidationError, param: str = "") -> ApiError:
    """The first error of a validation as an error that names its field, inside ``param``."""
    [first, *_] = error.errors(include_url=False)
    for each in first["loc"]:
        param += f"[{each}]" if isinstance(each, int) else f".{each}" if param else each
    message = first["msg"]
    if first["type"] == "value_error":  # of a validator of ours
        message = str(first["ctx"]["error"])
    elif first["type"] == "missing":
        message = "it is missing"
    elif first["type"] in _EXPECTED:
        message = f"expected {_EXPECTED[first['type']]}, got {kind_of(first['input'])}"
    return bad_field(param, message)


def from_server(error: InflightError, guide_field: str = "response_format") -> ApiError:
    """The client's error when the inference server refuses or fails; its address goes to the log.

    ``guide_field``: the field of the body that held the guide.
    """
    if isinstance(error, InvalidArgument):
        return ApiError(400, str(error))
    if isinstance(error, RequestTimeout):
        return ApiError(504, "the answer took too long and was given up", code="timeout")
    if isinstance(error, ServerError):
        guide = dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide"), guide_field)
        return _from_model(error, {**TENSOR_TO_FIELD, **guide})
    _logger.error("%s", error)
    if isinstance(error, StreamInterrupted):
        return ApiError(502, "the answer broke off: the connection to the inference server ended")
    if isinstance(error, ServerUnreachable | AccessDenied):
        return ApiError(503, "the inference server cannot be reached", code="server_unreachable")
    return ApiError(500, "the request failed")


def _from_model(error: ServerError, tensor_to_field: Mapping[str, str]) -> ApiError:
    status = _STATUS_TO_HTTP.get(error.status or "", 503)
    message = str(error)
    if status >= 500:
        verb = "refused" if error.status == "UNAVAILABLE" else "failed"
        _logger.warning("the server %s a request: %s", verb, message)
    if error.status is None:
        unknown = _UNKNOWN_INPUT.search(message)
        if unknown and unknown[1] in tensor_to_field:
            field = tensor_to_field[unknown[1]]
            return bad_field(field, "the inference server, or its config.pbtxt, is too old for it")
        return ApiError(503, "the inference server cannot take requests now")
    is_refused = status == 400  # a full server (503) mentions KV blocks as well
    found = _TENSOR.search(message) if is_refused else None
    is_too_long = is_refused and _LIMIT_OF_LENGTH.search(message)
    return ApiError(
        status,
        (_TOO_LONG_WORDS if is_too_long else "")
        + _TENSOR.sub(lambda match: tensor_to_field[match[1]], message),
        tensor_to_field[found[1]] if found else None,
        TOO_LONG if is_too_long else None,
    )
