"""Several answers to one prompt: one Triton request, one request of the batch manager for each.

They are told apart by ``sequence_index`` and end together: the last one's end is the request's. An
error of one ends all. With block reuse the sequences share the blocks of the prompt, since the
scheduler lets the first one compute them. Sequence i draws with seed + i, so sequence 0 is what the
request would have got alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.inference_request import Array, InferenceRequest
from inflight_backend.triton.beam_stream import has_beams
from inflight_backend.triton.stream import ResponseStream


class SharedStream:
    """The stream of one Triton request, for one of its sequences; see `share`."""

    def __init__(self, stream: ResponseStream, open_sequences: _OpenSequences) -> None:
        self._stream = stream
        self._open = open_sequences

    def send(self, tensors: dict[str, Array], *, is_final: bool) -> None:
        """Send one response; the end of the last sequence ends the stream."""
        self._stream.send(tensors, is_final=is_final and self._open.close_one())

    def send_error(self, message: str, code: str = "INTERNAL") -> None:
        """End the stream, and with it all sequences, with an error."""
        self._stream.send_error(message, code)
        self._open.stop_all()

    def abandon(self, message: str) -> None:
        """After a send that raised: end the stream and all sequences, and never raise."""
        self._stream.abandon(message)
        self._open.stop_all()


class _OpenSequences:
    """How many sequences of a request have not ended."""

    def __init__(self, num_sequences: int, stop_all: Callable[[], None]) -> None:
        self._num_open = num_sequences
        self._lock = threading.Lock()
        self.stop_all = stop_all

    def close_one(self) -> bool:
        """Count one end; True if it was the last."""
        with self._lock:
            self._num_open -= 1
            return self._num_open == 0


def share(
    stream: ResponseStream, num_sequences: int, stop_all: Callable[[], None]
) -> list[SharedStream]:
    """One stream for each sequence; ``stop_all`` stops all of them when one has failed."""
    open_sequences = _OpenSequences(num_sequences, stop_all)
    return [SharedStream(stream, open_sequences) for _ in range(num_sequences)]


def read_num_sequences(inputs: Mapping[str, Array], maximum: int) -> int:
    """``num_return_sequences``, 1 if it was not sent; raises `InvalidRequest`.

    A search with beams is one request, whatever it returns.
    """
    tensor = inputs.get("num_return_sequences")
    if tensor is None:
        return 1
    if tensor.size != 1 or tensor.dtype != np.int32:
        raise InvalidRequest(
            f"'num_return_sequences' must be one INT32, got {tensor.size} of {tensor.dtype}"
        )
    value = int(tensor.reshape(-1)[0])
    if not 1 <= value <= maximum:
        raise InvalidRequest(f"'num_return_sequences' is {value}, outside 1..{maximum}")
    return 1 if has_beams(inputs) else value


def copy_request(request: InferenceRequest, numbers: Sequence[int]) -> list[InferenceRequest]:
    """``request`` and, for each of ``numbers``, another one like it with a seed of its own."""
    copies = [request]
    for index, number in enumerate(numbers, start=1):
        copy = InferenceRequest(number, request.tensors, is_streaming=request.is_streaming)
        copy.created_ns = request.created_ns
        if copy.has_tensor("random_seed"):
            seed = int(copy.get_tensor("random_seed").reshape(-1)[0]) + index
            copy.replace_tensor("random_seed", np.array([[seed % 2**64]], dtype=np.uint64))
        copies.append(copy)
    return copies
