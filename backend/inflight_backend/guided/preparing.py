"""Requests that were accepted and wait for their grammar, before they are admitted."""

from __future__ import annotations

from collections.abc import Iterator

from inflight_backend.inference_request import InferenceRequest


class PreparingRequests:
    """Owner of these requests, in the order of their arrival."""

    def __init__(self) -> None:
        self._requests: dict[int, InferenceRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def add(self, request: InferenceRequest) -> None:
        """Keep a request until it is ready."""
        self._requests[request.request_id] = request

    def take_ready(self) -> Iterator[InferenceRequest]:
        """Those whose grammar is compiled, or will not be; each leaves when it is looked at."""
        for request in list(self._requests.values()):
            if request.is_ready:
                del self._requests[request.request_id]
                yield request

    def take(self, request_id: int) -> InferenceRequest | None:
        """The request with this id, which does not wait any longer."""
        return self._requests.pop(request_id, None)

    def take_each(self) -> Iterator[InferenceRequest]:
        """All of them; each leaves when it is looked at."""
        while self._requests:
            yield self._requests.pop(next(iter(self._requests)))
