"""What came with a Triton request: its id, its parameters and its tensors, for all our models.

Triton makes a request parameter of every field of an HTTP body that is no input of the model, and
of the headers it is told to forward; an ensemble passes them on to its steps. A model that does not
read `RequestHead.settings` refuses them: none is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import Array
from inflight_protocol import (
    ENSEMBLE_MODEL_NAME,
    ERROR_CODES_PARAMETER,
    LLM_MODEL_NAME,
    SHARED_PARAMETER,
)
from inflight_protocol.aliases import names_of

_logger = get_logger(__name__)

_NOTHING = "{}"
_LONGEST_NAME = 100

MAX_TEXT_SIZE = 4096
"""Characters of all texts of one list."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """``settings``: the parameters that are neither Triton's nor ours, each a bool, number or text.

    ``shared``: of `SHARED_PARAMETER`, "" if it was not sent. ``fault`` says what of all this could
    not be read; "" if all could.
    """

    request_id: str = ""
    asks_for_codes: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    shared: str = ""

    def check(self) -> None:
        """`InvalidRequest` for what could not be read."""
        if self.fault:
            raise InvalidRequest(self.fault)

    def refuse_settings(self, *, but: Collection[str] = ()) -> None:
        """`InvalidRequest` also for any setting, by name: for models that take tensors only.

        ``but``: those that the model knows.
        """
        self.check()
        for key in self.settings:
            if key not in but:
                raise InvalidRequest(
                    f"{key[:_LONGEST_NAME]!r} came as a request parameter, not as an input tensor "
                    f"of the model, and no parameter of that name is known{_other_names(key)}"
                )

    def read_switch(self, name: str) -> bool | None:
        """A setting that is true or false, or 1 or 0; None when it was not sent."""
        value = self.settings.get(name)
        if value is not None and value not in (0, 1):
            raise InvalidRequest(f"request parameter '{name}' must be true or false")
        return None if value is None else bool(value)


def read_head(triton_request: Any) -> RequestHead:
    """Never raises: an error needs a way back, and its form depends on what is read here."""
    request_id, what = "", "the request id is"
    try:
        request_id = triton_request.request_id()
        what = "the request parameters are"
        text = triton_request.parameters()
        return RequestHead(request_id) if text == _NOTHING else _read(request_id, text)
    except UnicodeDecodeError:  # Triton takes any bytes over HTTP
        return RequestHead(request_id, fault=f"{what} not valid UTF-8")
    except Exception:  # whatever it is, only this request has it
        _logger.exception("the head of a request could not be read")
        return RequestHead(request_id, fault=f"{what} not readable")


def _other_names(key: str) -> str:
    """What to send in its place, for a name of another model."""
    if (names := names_of(key)) is None:
        return ""
    inner, outer = names
    where = "" if inner == outer else f" in {LLM_MODEL_NAME}, '{outer}' in {ENSEMBLE_MODEL_NAME}"
    return f"; the input is called '{inner}'{where}"


class _Pairs(list[tuple[str, Any]]):
    """The names and values of a JSON object; a name may stand there twice."""


def _read(request_id: str, text: str) -> RequestHead:
    settings: dict[str, Any] = {}
    fault = ""
    # Of a name that stands there twice Triton writes the first value twice.
    pairs = json.loads(text, object_pairs_hook=_Pairs)
    if not isinstance(pairs, _Pairs):
        return RequestHead(request_id, fault="the request parameters are no JSON object")
    for key, value in pairs:
        if key in settings:
            fault = f"{key[:_LONGEST_NAME]!r} is given twice"
        settings[key] = value
    if settings.get("id") == request_id:  # a field of an HTTP body, which Triton reads itself
        del settings["id"]
    asks_for_codes = settings.pop(ERROR_CODES_PARAMETER, False)
    if not isinstance(asks_for_codes, bool):
        fault = f"'{ERROR_CODES_PARAMETER}' must be true or false"
    shared = settings.pop(SHARED_PARAMETER, "")
    if not isinstance(shared, str):
        shared, fault = "", f"'{SHARED_PARAMETER}' must be a text"
    return RequestHead(request_id, asks_for_codes is True, settings, fault, shared)


def read_inputs(triton_request: Any) -> dict[str, Array]:
    """Every tensor of the request by name, as numpy; `InvalidRequest` for one in a GPU's memory.

    UINT32, which `repository.UINT32_INPUTS` may be, becomes INT32 bit by bit, as in the peer: -1
    stays -1.
    """
    tensors = triton_request.inputs()
    try:
        return {tensor.name(): _signed(tensor.as_numpy()) for tensor in tensors}
    except Exception:
        for tensor in tensors:
            if not tensor.is_cpu():
                raise InvalidRequest(_on_gpu(tensor.name())) from None
        return {tensor.name(): _signed(_widened(tensor)) for tensor in tensors}


def _widened(tensor: Any) -> Array:
    """A tensor that may have a type that numpy does not know: bfloat16 becomes float32."""
    try:
        return tensor.as_numpy()  # type: ignore[no-any-return]
    except Exception:
        import torch.utils.dlpack  # seconds; but the model that it is sent to has it already

        array: Array = torch.utils.dlpack.from_dlpack(tensor).float().numpy()
        return array


def _signed(tensor: Array) -> Array:
    return tensor.view(np.int32) if tensor.dtype == np.uint32 else tensor


def _on_gpu(name: str) -> str:
    return (
        f"'{name}' is in a GPU's memory: FORCE_CPU_ONLY_INPUT_TENSORS must be yes in config.pbtxt"
    )


def read_flag(inputs: Mapping[str, Array], name: str) -> bool | None:
    """A boolean control input; None when it was not sent. Rows may all say false."""
    tensor = inputs.get(name)
    if tensor is None:
        return None
    if tensor.size != 1:
        if tensor.size and not tensor.any():
            return False
        raise InvalidRequest(f"'{name}' must hold one value, got {tensor.size}")
    return bool(tensor.reshape(-1)[0])


def read_texts(inputs: Mapping[str, Array], name: str, max_texts: int) -> list[str]:
    """The texts of an input that are not empty, each once; none if it was not sent."""
    tensor = inputs.get(name)
    if tensor is None:
        return []
    if tensor.dtype != np.object_:
        raise InvalidRequest(f"'{name}' has type {tensor.dtype}, expected STRING")
    if tensor.size > max_texts:
        raise InvalidRequest(f"'{name}' holds {tensor.size} texts, more than {max_texts}")
    texts = [decode_text(name, value) for value in tensor.reshape(-1)]
    num_characters = sum(map(len, texts))
    if num_characters > MAX_TEXT_SIZE:
        raise InvalidRequest(
            f"'{name}' holds {num_characters} characters, more than {MAX_TEXT_SIZE}"
        )
    return list(dict.fromkeys(filter(None, texts)))


def decode_text(name: str, value: object) -> str:
    """A text of input ``name``; `InvalidRequest` if it is not UTF-8."""
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InvalidRequest(f"'{name}' is not valid UTF-8") from None
