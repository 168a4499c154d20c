"""`TritonPythonModel` of ``tensorrt_llm_bls``: the text interface of the peer's model of that name.

It relays between its client and ``tensorrt_llm`` inside the server, which costs about twice the
CPU of a call of ``tensorrt_llm`` itself, and is for clients that call it by name. Unlike the peer's
it passes cancellation on: a client that leaves has its request stopped by id.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_backend.errors import InvalidRequest, ServingError
from inflight_backend.triton.coded_errors import CodedFactory
from inflight_backend.triton.decoding import read_inputs
from inflight_backend.triton.housekeeper import Chore, Housekeeper
from inflight_backend.triton.request_head import read_head
from inflight_backend.triton.stream import ResponseFactory, ResponseStream
from inflight_backend.triton.text_model import parameters_of, read_switch
from inflight_client.protocol import ENSEMBLE_INPUT_MAP, LLM_MODEL_NAME

_logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

_MAX_REQUESTS = 512  # threads; each waits for the responses of one request
_CANCEL_CHECK_SECONDS = 0.1
_STOP_TIMEOUT_MICROSECONDS = 5_000_000


class TritonPythonModel:
    """The model ``tensorrt_llm_bls``.

    With the parameter ``accumulate_tokens`` every response of a stream holds the whole text so far.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters; a failure fails the load with one line."""
        import triton_python_backend_utils as pb_utils  # exists only inside Triton

        self._pb_utils = pb_utils
        self._factory, self._coded = ResponseFactory(pb_utils), CodedFactory(pb_utils)
        parameters = parameters_of(args)
        self._accumulates = read_switch(parameters, "accumulate_tokens", False)
        self._model_name = parameters.get("tensorrt_llm_model_name") or LLM_MODEL_NAME
        config = json.loads(args["model_config"])
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._live: dict[str, ResponseStream] = {}
        self._pool = ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="Relay")
        self._housekeeper = Housekeeper([Chore(self._check_cancelled, _CANCEL_CHECK_SECONDS)])

    def execute(self, requests: Sequence[Any]) -> None:
        """Take the requests; their responses leave through their response senders."""
        for request in requests:
            head = read_head(request)
            factory = self._coded if head.asks_for_codes else self._factory
            stream = ResponseStream(request.get_response_sender(), factory)
            try:
                head.refuse_settings()
                inner = self._inner_request(request)
            except ServingError as error:
                stream.send_error(str(error), "INVALID_ARG")
            else:
                self._pool.submit(self._relay, inner, stream)

    def finalize(self) -> None:
        """Let what runs end, then stop the threads."""
        self._pool.shutdown()
        self._housekeeper.close()

    def _inner_request(self, request: Any) -> Any:
        """The request to ``tensorrt_llm``, under an id of its own."""
        inputs = read_inputs(request)
        _check_text(inputs)
        tensors = [
            self._pb_utils.Tensor(ENSEMBLE_INPUT_MAP.get(name, name), tensor)
            for name, tensor in inputs.items()
        ]
        return self._pb_utils.InferenceRequest(
            model_name=self._model_name,
            requested_output_names=list(request.requested_output_names()),
            inputs=tensors,
            request_id=f"bls-{uuid.uuid4().hex}",
        )

    def _relay(self, inner: Any, stream: ResponseStream) -> None:
        """Pass the responses on; whatever happens, the stream ends exactly once."""
        request_id = inner.request_id()
        self._live[request_id] = stream
        stream.on_final(lambda: self._forget(request_id))
        try:
            if self._is_decoupled:
                self._relay_stream(inner.exec(decoupled=True), stream)
                stream.end()
            else:
                self._relay_stream([inner.exec()], stream, is_whole=True)
        except Exception:
            _logger.exception("a request could not be relayed")
            stream.abandon("the request could not be relayed")

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def _relay_stream(
        self, responses: Iterable[Any], stream: ResponseStream, *, is_whole: bool = False
    ) -> None:
        texts: dict[int, str] = defaultdict(str)
        for response in responses:
            if response.has_error():
                # The message is the inner model's own, with what its server put around it.
                stream.send_error(response.error().message(), "INVALID_ARG")
                continue  # the iteration must be read to its end
            tensors = {each.name(): each.as_numpy() for each in response.output_tensors()}
            if self._accumulates:
                _accumulate(tensors, texts)
            if tensors or is_whole:
                stream.send(tensors, is_final=is_whole)

    def _check_cancelled(self) -> None:
        """Stop the inner request of every client that has gone; repeated until it has ended."""
        for request_id, stream in list(self._live.items()):
            if stream.is_cancelled():
                threading.Thread(target=self._stop, args=(request_id,), daemon=True).start()

    def _stop(self, request_id: str) -> None:
        stop = self._pb_utils.InferenceRequest(
            model_name=self._model_name,
            requested_output_names=[],
            inputs=[self._pb_utils.Tensor("stop", np.array([[True]]))],
            request_id=request_id,
            timeout=_STOP_TIMEOUT_MICROSECONDS,
        )
        responses = stop.exec(decoupled=True) if self._is_decoupled else [stop.exec()]
        for response in responses:
            if response.has_error():
                _logger.warning("a relayed request could not be stopped")


def _check_text(inputs: dict[str, Array]) -> None:
    """The peer's own checks, before anything is sent."""
    if "text_input" not in inputs:
        raise InvalidRequest("'text_input' is missing")
    max_tokens = inputs.get("max_tokens")
    if max_tokens is None or max_tokens.size != 1 or max_tokens.reshape(-1)[0] <= 0:
        raise InvalidRequest("'max_tokens' must be a single value above 0")


def _accumulate(tensors: dict[str, Array], texts: dict[int, str]) -> None:
    """Put the whole text so far in place of what is new of it."""
    if "text_output" not in tensors:
        return
    index = int(tensors["sequence_index"].sum()) if "sequence_index" in tensors else 0
    texts[index] += tensors["text_output"].reshape(-1)[0].decode()
    tensors["text_output"] = np.array([[texts[index].encode()]], dtype=np.object_)
