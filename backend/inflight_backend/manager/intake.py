"""Admits fetched requests, or rejects them with an error.

A request is validated, waits here for its grammar if it has one, and becomes active. An exception
on the way ends that request with one final response and does not affect the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from inflight_backend.errors import ErrorText, ServingError
from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import RequestLimits, validate
from inflight_scheduler import LlmRequest

if TYPE_CHECKING:
    from inflight_backend.guided.matchers import CompiledGuide


_logger = get_logger(__name__)

NOT_TAKEN = "the request could not be taken"
"""The error of a request that failed by a fault of ours."""


class RequestIntake:
    """Owner of the requests that wait for their grammar, in order of arrival."""

    def __init__(
        self,
        limits: RequestLimits,
        is_active: Callable[[int], bool],
        activate: Callable[[InferenceRequest, LlmRequest, CompiledGuide | None], None],
        refuse: Callable[[int, str], None],
    ) -> None:
        """``activate`` makes a request active, with the guide of its answer, or raises and leaves
        no trace of it. ``refuse`` sends the final response of a rejected request.
        """
        self._limits = limits
        self._is_active = is_active
        self._activate = activate
        self._refuse = refuse
        self._preparing: dict[int, InferenceRequest] = {}

    def __len__(self) -> int:
        return len(self._preparing)

    def accept(self, fetched: object) -> None:
        """Admit a request of the get callback, or answer it with an error.

        One whose id is in flight is not accepted: an error response would end the other one.
        """
        if not isinstance(fetched, InferenceRequest):
            _logger.error("the get callback returned a %s", type(fetched).__name__)
        elif self._is_active(fetched.request_id) or fetched.request_id in self._preparing:
            _logger.error("request id %d is in flight; not accepted again", fetched.request_id)
        else:
            self._guard(self._accept, fetched)

    def admit_ready(self) -> None:
        """Activate requests whose grammar is compiled; a failed compilation ends its request."""
        for request_id, request in list(self._preparing.items()):
            if request.is_ready:
                del self._preparing[request_id]
                self._guard(self._admit, request)

    def stop_waiting(self, request_id: int) -> None:
        """Activate a waiting request without its grammar, so that it can be stopped."""
        request = self._preparing.pop(request_id, None)
        if request is not None:
            request.guide = None
            self._guard(self._admit, request)

    def end_waiting(self, error: str) -> None:
        """End the requests that wait for their grammar with an error."""
        for request_id, request in list(self._preparing.items()):
            del self._preparing[request_id]
            request.llm_request = request.guide = None
            self._refuse(request_id, error)

    def _guard(self, step: Callable[[InferenceRequest], None], request: InferenceRequest) -> None:
        """Call ``step`` with a request; an exception ends that request."""
        try:
            step(request)
        except ServingError as error:
            self._refuse(request.request_id, ErrorText.of(error))
        except BaseException:  # our bug, or a panic of a library
            _logger.exception("request %d could not be taken", request.request_id)
            self._refuse(request.request_id, NOT_TAKEN)

    def _accept(self, request: InferenceRequest) -> None:
        validate(request, self._limits)
        if request.is_ready:
            self._admit(request)
        else:
            self._preparing[request.request_id] = request

    def _admit(self, request: InferenceRequest) -> None:
        """Activate a request, with its guide if it has one."""
        llm_request, guide = validate(request, self._limits), request.guide
        request.llm_request = request.guide = None  # the object may be sent again
        self._activate(request, llm_request, None if guide is None else guide.take())
