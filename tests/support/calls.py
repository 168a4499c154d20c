"""Calls of a real server with bare clients: tritonclient over gRPC, httpx over HTTP. And whether an
answer of the demo model counts."""

from __future__ import annotations

import json
import queue
import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as grpcclient
from support.server_process import Address
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from inflight_protocol import ENSEMBLE_INPUT_MAP, INPUT_BY_NAME
from inflight_protocol import tensors as protocol_tensors

WAIT_SECONDS = 60.0
_TYPES = {"i": np.int32, "u": np.uint64, "f": np.float32, "b": np.bool_}
_SENT_AS_THEY_ARE = frozenset({"int32", "uint32", "uint64", "float16", "float32", "bool", "object"})

Tensors = dict[str, Any]


def tensors_of(**values: Any) -> Tensors:
    """Plain values (a list is a row of them) as tensors with the batch dimension and of the type
    that the table of the wire says; arrays as they are. Names of the ensemble are known as well."""
    made: Tensors = {}
    for name, value in values.items():
        inner = ENSEMBLE_INPUT_MAP.get(name, name)
        is_plain = inner in INPUT_BY_NAME and not isinstance(value, np.ndarray)
        made[name] = protocol_tensors.make_inputs({inner: value})[inner] if is_plain else value
    return made


def make_inputs(**tensors: Any) -> list[grpcclient.InferInput]:
    """For tritonclient: arrays or nested lists, of int32, float32, bool or texts."""
    inputs = []
    for name, value in tensors.items():
        array = np.asarray(value)
        if array.dtype.name not in _SENT_AS_THEY_ARE:
            array = array.astype(_TYPES.get(array.dtype.kind, np.object_))
        dtype = np_to_triton_dtype(array.dtype)
        inputs.append(grpcclient.InferInput(name, list(array.shape), dtype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


class PeerClient:
    """One gRPC stream, used like `inflight_batcher_llm_client.py` of tensorrtllm_backend."""

    def __init__(self, url: str, model: str = "tensorrt_llm") -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._model = model
        self._results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(callback=lambda result, error: self._results.put((result, error)))

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.stop_stream(cancel_requests=True)  # a feed would never end by itself
        self._client.close()

    def finish(self) -> None:
        """Close the stream; waits until all requests have ended."""
        self._client.stop_stream()

    def send(self, request_id: str = "", **values: Any) -> None:
        """Send plain values or arrays, see `tensors_of`; a stop comes with the parameter of the
        original."""
        parameters = {"Streaming": True} if "stop" in values else None
        self.send_tensors(tensors_of(**values), request_id=request_id, parameters=parameters)

    def send_tensors(
        self,
        tensors: Mapping[str, Any],
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
    ) -> None:
        """Send tensors with the batch dimension."""
        self._client.async_stream_infer(
            self._model,
            make_inputs(**tensors),
            outputs=[grpcclient.InferRequestedOutput(name) for name in outputs] or None,
            request_id=request_id,
            parameters=parameters,
            enable_empty_final_response=True,
        )

    def responses(self) -> Iterator[tuple[str, Tensors, bool]]:
        """(request id, outputs, is final) in order of arrival; an error raises."""
        while True:
            result, error = self._results.get(timeout=WAIT_SECONDS)
            if error is not None:
                raise error
            response = result.get_response()
            outputs = {out.name: result.as_numpy(out.name) for out in response.outputs}
            yield response.id, outputs, response.parameters["triton_final_response"].bool_param

    def answer(self) -> Iterator[Tensors]:
        """The outputs of the responses that have any, up to the final one; an error raises."""
        for _, outputs, is_final in self.responses():
            if outputs:
                yield outputs
            if is_final:
                return

    def ask(self, request_id: str = "", **values: Any) -> list[int]:
        """All output ids of one request."""
        self.send(request_id, **values)
        return [token for each in self.answer() for token in each["output_ids"].ravel().tolist()]

    def stop_all(self, *request_ids: str) -> dict[str, str]:
        """Stop streams that were sent here; the texts of all that has come of them."""
        for request_id in request_ids:
            self.send(request_id, stop=True)
        texts = dict.fromkeys(request_ids, "")
        num_finals = 2 * len(request_ids)  # the acknowledgement of a stop, and the end
        responses = self.responses()
        while num_finals:
            request_id, outputs, is_final = next(responses)
            if "text_output" in outputs:
                texts[request_id] += outputs["text_output"].item().decode()
            num_finals -= is_final
        return texts

    def open_feed(self) -> None:
        """Ask for statistics, of all iterations from now on.

        Requests of another connection may overtake the feed; a question behind it does not.
        """
        self.send("feed", stats=True)
        self.send("question", stats=True, streaming=False)
        for request_id, _, is_final in self.responses():
            if request_id == "question" and is_final:
                return

    def statistics_so_far(self) -> list[dict[str, Any]]:
        """What a feed of statistics has brought until now; then it is cancelled."""
        stats: list[dict[str, Any]] = []
        while not self._results.empty():
            result, error = self._results.get()
            assert error is None, error
            stats += [json.loads(text) for text in result.as_numpy("stats").reshape(-1)]
        self._client.stop_stream(cancel_requests=True)
        return stats


def stream_infer(
    server: Address,
    model: str,
    tensors: Mapping[str, Any],
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    request_id: str = "",
) -> list[Tensors]:
    """The tensors of every response of a gRPC stream; an error ends them as ``{"error": text}``."""
    found: list[Tensors] = []
    with PeerClient(server.grpc_url, model) as client:
        client.send_tensors(tensors, outputs, parameters, request_id)
        try:
            for response in client.answer():
                found.append(response)
        except InferenceServerException as error:
            found.append({"error": error.message()})
        client.finish()  # a plain Triton 24.10 that sees a cancel instead may not end for 20 s
    return found


def infer(
    server: Address, model: str, parameters: Mapping[str, Any] | None = None, /, **tensors: Any
) -> Tensors:
    """One unary gRPC call; the response's tensors."""
    inputs = make_inputs(**tensors)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, inputs, parameters=parameters, client_timeout=WAIT_SECONDS)
        return {out.name: result.as_numpy(out.name) for out in result.get_response().outputs}


def generate(server: Address, model: str, **body: Any) -> dict[str, Any]:
    """The whole answer over HTTP; an error is in ``error``."""
    url = f"{server.http_url}/v2/models/{model}/generate"
    content: dict[str, Any] = httpx.post(
        url, json=body, timeout=WAIT_SECONDS, trust_env=False
    ).json()
    return content


def generate_stream(
    server: Address, model: str, **body: Any
) -> Generator[dict[str, Any], None, None]:
    """Every event of the stream over HTTP, as it comes; leaving it closes the connection."""
    url = f"{server.http_url}/v2/models/{model}/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=WAIT_SECONDS, trust_env=False) as response:
        for line in filter(None, response.iter_lines()):
            yield json.loads(line.removeprefix("data:"))


def stream_text(
    server: Address, prompt: str, max_tokens: int, *, model: str = "ensemble", **more: object
) -> Iterator[str]:
    """The pieces of text of ``generate_stream``; ``RuntimeError`` if the server sends an error."""
    body = {"text_input": prompt, "max_tokens": max_tokens, "stream": True, **more}
    for event in generate_stream(server, model, **body):
        if "error" in event:
            raise RuntimeError(event["error"])
        if "text_output" in event:
            yield event["text_output"]


def stats_of(server: Address) -> dict[str, Any]:
    """The statistics of the last iteration."""
    answer = generate(server, "tensorrt_llm", stats=True, streaming=False)
    stats: dict[str, Any] = json.loads(answer["stats"])
    return stats


def wait_for_active(server: Address, number: int, within: float = WAIT_SECONDS) -> dict[str, Any]:
    """The first statistics with so many active requests."""
    deadline = time.monotonic() + within
    while (active := (stats := stats_of(server))["Active Request Count"]) != number:
        assert time.monotonic() < deadline, f"{active} active, not {number}, after {within} s"
        time.sleep(0.02)
    return stats


def assert_counts(prompt: str, text: str, num_tokens: int) -> None:
    """Fail unless ``text`` has ``num_tokens`` tokens, which are bytes, and ``prompt + text`` counts
    up by one; the last number may be cut off."""
    assert len(text) == num_tokens
    numbers = [int(word) for word in re.findall(r"\d+", prompt + text)]
    expected = [numbers[0] + i for i in range(len(numbers))]
    assert numbers[:-1] == expected[:-1]
    assert str(expected[-1]).startswith(str(numbers[-1]))


def assert_counts_in_part(prompt: str, text: str, less_than: int) -> None:
    """`assert_counts` of an answer that was ended before it had ``less_than`` tokens."""
    assert 0 < len(text) < less_than
    assert_counts(prompt, text, len(text))
