"""Admits fetched requests, or rejects them with an error.

A request is validated, waits here until its grammar is compiled if it has one, and is enrolled.
Whatever is raised while one of them is looked at ends that one, with one final response, and the
others are taken as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from inflight_backend.errors import (
    CapacityExceeded,
    CapacityText,
    InvalidRequest,
    RefusalText,
    ServingError,
)
from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import RequestLimits, validate
from inflight_scheduler import LlmRequest

if TYPE_CHECKING:
    from inflight_backend.guided.masks import OwnGuide


_logger = get_logger(__name__)

NOT_TAKEN = "the request could not be taken"
"""What the sender of a request hears when we, not it, are at fault."""


class RequestIntake:
    """Owner of the requests that wait for their grammar, in the order in which they came."""

    def __init__(
        self,
        limits: RequestLimits,
        is_active: Callable[[int], bool],
        enrol: Callable[[InferenceRequest, LlmRequest, OwnGuide | None], None],
        refuse: Callable[[int, str], None],
    ) -> None:
        """``enrol`` makes a request active, with what guides its answer, or leaves no trace of it
        and raises. ``refuse`` sends the final response of a request that was not taken.
        """
        self._limits = limits
        self._is_active = is_active
        self._activate = enrol
        self._refuse = refuse
        self._preparing: dict[int, InferenceRequest] = {}

    def __len__(self) -> int:
        return len(self._preparing)

    def accept(self, fetched: object) -> None:
        """Take what the get callback returned; a bad request is answered with an error of its own.

        One whose id is in flight is not accepted: an error response would end the other one.
        """
        if not isinstance(fetched, InferenceRequest):
            _logger.error("the get callback returned a %s", type(fetched).__name__)
        elif self._is_active(fetched.request_id) or fetched.request_id in self._preparing:
            _logger.error("request id %d is in flight; not accepted again", fetched.request_id)
        else:
            self._guard(self._accept, fetched)

    def admit_ready(self) -> None:
        """Make those active whose grammar is compiled; who will have none ends with an error."""
        for request_id, request in list(self._preparing.items()):
            if request.is_ready:
                del self._preparing[request_id]
                self._guard(self._admit, request)

    def stop_waiting(self, request_id: int) -> None:
        """Make a request active without its grammar, if it waits for that: it is to be ended."""
        request = self._preparing.pop(request_id, None)
        if request is not None:
            request.guide = None
            self._guard(self._admit, request)

    def end_waiting(self, error: str) -> None:
        """End those who wait for their grammar with an error."""
        for request_id, request in list(self._preparing.items()):
            del self._preparing[request_id]
            request.llm_request = request.guide = None
            self._refuse(request_id, error)

    def _guard(self, step: Callable[[InferenceRequest], None], request: InferenceRequest) -> None:
        """Take a step with one request; if it fails, that is the request's end and no more."""
        try:
            step(request)
        except InvalidRequest as error:
            self._refuse(request.request_id, RefusalText(error))
        except CapacityExceeded as error:  # too many grammars or logits at once
            self._refuse(request.request_id, CapacityText(error))
        except ServingError as error:
            self._refuse(request.request_id, str(error))
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
        """Make a request active, guided if it asked for that."""
        llm_request, guide = validate(request, self._limits), request.guide
        request.llm_request = request.guide = None  # sent again, it is another request
        self._activate(
            request, llm_request, None if guide is None else (guide.take(), guide.recompile)
        )
