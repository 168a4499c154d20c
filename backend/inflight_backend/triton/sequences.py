"""Several answers to one prompt: one Triton request, one request of the batch manager for each.

They are told apart by ``sequence_index`` and end together: the last one's end is the request's. An
error of one ends all: the others are stopped, and the client hears of it when they have ended, so
that nothing is held any more. With block reuse the sequences share the blocks of the prompt, since
the scheduler lets the first one compute them. Sequence i draws with seed + i, so sequence 0 is what
the request would have got alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import Array, InferenceRequest
from inflight_backend.triton_io.beam_stream import has_beams
from inflight_backend.triton_io.stream import ResponseStream


class SharedStream:
    """The stream of one Triton request, for one of its sequences; see `share`."""

    def __init__(self, stream: ResponseStream, open_sequences: _OpenSequences) -> None:
        self._stream = stream
        self._open = open_sequences
        open_sequences.add(self)

    @property
    def is_behind(self) -> bool:
        """See `Stream.is_behind`."""
        return self._stream.is_behind

    def send(self, tensors: dict[str, Array], *, is_final: bool) -> None:
        """Send one response; the end of the last sequence ends the stream."""
        self._stream.send(tensors, is_final=is_final and self._open.close(self))

    def send_error(self, message: str, code: str = "INTERNAL") -> None:
        """End this sequence, and the stream with an error once all others have ended."""
        self.end_with(message, code)
        if self._open.close(self):
            self._stream.send_error(message, code)

    def end_with(self, message: str, code: str = "INTERNAL") -> None:
        """Stop all sequences; the last one's end is this error."""
        self._stream.end_with(message, code)
        self._open.stop()

    def abandon(self, message: str) -> None:
        """After a final send that raised: end this sequence and stop the others; never raise."""
        self.end_with(message)
        if self._open.close(self):
            self._stream.abandon(message)


class _OpenSequences:
    """The sequences of a request that have not ended; of the dispatcher's thread."""

    def __init__(self, stop_all: Callable[[], None]) -> None:
        self._sequences: set[SharedStream] = set()
        self._stop_all: Callable[[], None] | None = stop_all

    def add(self, sequence: SharedStream) -> None:
        """One more, before the first can end."""
        self._sequences.add(sequence)

    def close(self, sequence: SharedStream) -> bool:
        """``sequence`` has ended; True if all have."""
        self._sequences.discard(sequence)
        return not self._sequences

    def stop(self) -> None:
        """Stop them all, once."""
        stop_all, self._stop_all = self._stop_all, None
        if stop_all is not None:
            stop_all()


def share(
    stream: ResponseStream, num_sequences: int, stop_all: Callable[[], None]
) -> list[SharedStream]:
    """One stream for each sequence; ``stop_all`` stops all of them when one has failed."""
    open_sequences = _OpenSequences(stop_all)
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
        copy = request.copy(number)
        if copy.has_tensor("random_seed"):
            seed = int(copy.get_tensor("random_seed").reshape(-1)[0]) + index
            copy.replace_tensor("random_seed", np.array([[seed % 2**64]], dtype=np.uint64))
        copies.append(copy)
    return copies
