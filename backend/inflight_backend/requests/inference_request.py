"""Requests and responses of the `GptManager` callbacks: ids and named tensors.

Names, types and shapes are those of TensorRT-LLM's batch manager
(`docs/source/batch_manager.md`, `cpp/include/tensorrt_llm/batch_manager/inferenceRequest.h`);
the table behind them is `inflight_protocol`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

import inflight_protocol as protocol
from inflight_backend.errors import InvalidRequest
from inflight_protocol.tensors import make_inputs

if TYPE_CHECKING:
    from inflight_backend.guided.compiler import PendingGuide
    from inflight_scheduler import LlmRequest

Array = npt.NDArray[Any]

_Reading = TypeVar("_Reading")


class NamedTensor(NamedTuple):
    """A tensor with its name, the currency of the send-response callback; read-only."""

    name: str
    tensor: Array


class InferenceRequest:
    """A request as the get-inference-requests callback returns it: an id and named tensors.

    ``request_id`` is an unsigned 64-bit number, unique among the requests in flight. Tensors carry
    the leading batch dimension of 1. `set_tensor` refuses an unknown name and what is no
    array; `get_tensor` refuses a tensor that was not set. A request may be sent again after its
    final response; its deadlines still count from when the object was made.
    """

    __slots__ = (
        "_readings",
        "_sent_names",
        "_tensors",
        "adapter",
        "created_ns",
        "guide",
        "is_streaming",
        "llm_request",
        "request_id",
    )

    def __init__(
        self,
        request_id: int,
        tensors: Mapping[str, Array] | None = None,
        *,
        is_streaming: bool = False,
    ) -> None:
        self.request_id = _checked_id(request_id)
        self.is_streaming = is_streaming
        self.created_ns = time.monotonic_ns()
        self.llm_request: LlmRequest | None = None  # set by validation, so that it runs once
        self.guide: PendingGuide | None = None  # set by validation, which starts compiling it
        self.adapter: Any = None  # set by validation, as it must not be lost before it runs
        self._tensors: dict[str, Array] = {}
        self._sent_names: dict[str, str] = {}
        self._readings: dict[str, tuple[Array, Any]] = {}  # shared with copies
        for name, tensor in (tensors or {}).items():
            self.set_tensor(name, tensor)

    @classmethod
    def from_tokens(
        cls,
        request_id: int,
        input_ids: Sequence[int],
        request_output_len: int,
        *,
        is_streaming: bool = False,
        **values: object,
    ) -> InferenceRequest:
        """Build a request from plain values, for example ``temperature=0.7``."""
        plain = {"input_ids": input_ids, "request_output_len": request_output_len, **values}
        return cls(request_id, make_inputs(plain), is_streaming=is_streaming)

    def copy(self, request_id: int) -> InferenceRequest:
        """The same request, of the same age, under another id."""
        copy = InferenceRequest(request_id, self._tensors, is_streaming=self.is_streaming)
        copy.created_ns = self.created_ns
        copy._readings = self._readings
        return copy

    def reading(self, name: str, read: Callable[[Array], _Reading]) -> _Reading:
        """What ``read`` makes of a tensor that may be long: the same object for all copies."""
        tensor = self.get_tensor(name)
        known = self._readings.get(name)
        if known is None or known[0] is not tensor:
            known = self._readings[name] = (tensor, read(tensor))
        reading: _Reading = known[1]
        return reading

    @property
    def is_ready(self) -> bool:
        """True when nothing it needs is still being prepared."""
        return self.guide is None or self.guide.is_settled

    @property
    def tensors(self) -> Mapping[str, Array]:
        """The tensors by name; read-only."""
        return self._tensors

    def set_tensor(self, name: str, tensor: Array) -> None:
        """Set one tensor; renamed inputs are stored under the name used inside."""
        if name not in protocol.INPUT_BY_NAME or name in protocol.CONTROL_INPUTS:
            raise InvalidRequest(f"invalid tensor name '{name}'")
        array = _checked(name, tensor)
        inner_name = protocol.RENAMED_INPUTS.get(name, name)
        if inner_name in self._tensors:
            other = name if name != inner_name else self._sent_names.get(inner_name, name)
            raise InvalidRequest(f"'{inner_name}' is given twice (also as '{other}')")
        self._tensors[inner_name] = array
        self._sent_names[inner_name] = name

    def replace_tensor(self, name: str, tensor: Array) -> None:
        """Set one tensor, by the name used inside, whether it was set or not."""
        self._tensors[name] = _checked(name, tensor)

    def get_tensor(self, name: str) -> Array:
        """The tensor called ``name``; an error if it was not set."""
        if name not in protocol.INPUT_BY_NAME:
            raise InvalidRequest(f"invalid tensor name '{name}'")
        try:
            return self._tensors[protocol.RENAMED_INPUTS.get(name, name)]
        except KeyError:
            raise InvalidRequest(f"undefined tensor '{name}'") from None

    def sent_name(self, name: str) -> str:
        """The name under which the caller sent a tensor, for messages."""
        return self._sent_names.get(name, name)

    def has_tensor(self, name: str) -> bool:
        """True if the tensor was set."""
        return protocol.RENAMED_INPUTS.get(name, name) in self._tensors


def _checked_id(request_id: object) -> int:
    """A number of Python, also of one of numpy, which would be bytes in a recording."""
    if isinstance(request_id, Integral) and 0 <= int(request_id) < 2**64:
        return int(request_id)
    raise InvalidRequest(f"request id {request_id} is not an unsigned 64-bit number")


def _checked(name: str, tensor: Array) -> Array:
    if tensor is None:
        raise InvalidRequest(f"tensor '{name}' is None")
    if not isinstance(tensor, np.ndarray | np.generic):
        raise InvalidRequest(f"tensor '{name}' is a {type(tensor).__name__}, not an array of numpy")
    return np.asarray(tensor)


GetInferenceRequestsCallback = Callable[[int], Sequence[InferenceRequest]]
"""(how many more requests can be accepted; negative = unbounded) -> new requests."""

SendResponseCallback = Callable[[int, Sequence[NamedTensor], bool, str], None]
"""(request id, tensors, is final, error message). A non-empty message implies final."""

PollStopSignalCallback = Callable[[], "set[int]"]
"""() -> ids of the requests to stop. Naming an id again, or one not in flight, is harmless."""

ReturnBatchManagerStatsCallback = Callable[[str], None]
"""(statistics of one iteration as JSON) -> None. Not called while nothing is active."""
