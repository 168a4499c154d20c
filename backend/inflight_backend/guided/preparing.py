"""Requests that were accepted and wait for their grammar, before they are admitted."""

from __future__ import annotations

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

    def take_ready(self) -> list[InferenceRequest]:
        """Those whose grammar is compiled, or will not be."""
        if not self._requests:
            return []
        ready = [request for request in self._requests.values() if request.is_ready]
        for request in ready:
            del self._requests[request.request_id]
        return ready

    def take(self, request_id: int) -> InferenceRequest | None:
        """The request with this id, which does not wait any longer."""
        return self._requests.pop(request_id, None)

    def take_all(self) -> list[InferenceRequest]:
        """All of them."""
        requests, self._requests = list(self._requests.values()), {}
        return requests
