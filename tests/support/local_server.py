"""Two small servers that speak Triton's wire: gRPC streams and HTTP generate, both on loop-back.

What they answer is chosen by the prompt, so that a test reads as a story. They note what arrives,
and whether the client went away before the end.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from inflight_protocol import DTYPE_TO_NUMPY, NOT_IN_FLIGHT
from inflight_protocol.shared import SharedPart, pack_parts

GAP_SECONDS = 0.01
MODEL = "tensorrt_llm"
FOREIGN_MODELS = {
    "foreign": "unexpected inference input 'ready' for model 'foreign'",
    "strict": "[request id: <id_unknown>] expected number of inputs between 2 and 45 but got 0 "
    "inputs for model 'strict'. Got input(s) [], but missing required input(s) ['text_input'].",
}
"""Models that do not know the question whether they are ready -> Triton's words about it."""
Tensors = dict[str, Any]


class ModelError(Exception):
    """The behaviour answers with an error."""


class Broken(Exception):
    """The behaviour vanishes without a final response."""


@dataclass
class Arrival:
    """A request as it arrived."""

    request_id: str
    values: Tensors
    outputs: list[str]
    model: str
    is_left: threading.Event = field(default_factory=threading.Event)
    is_completed: threading.Event = field(default_factory=threading.Event)
    num_sent: int = 0  # responses of a stream


@dataclass
class LocalTriton:
    """What both servers share: the arrivals, the stop signals, and how to answer."""

    arrivals: list[Arrival] = field(default_factory=list)
    stops: set[str] = field(default_factory=set)
    shared: dict[str, queue.Queue[SharedPart | None]] = field(default_factory=dict)
    """What waits on each shared stream (gRPC), by name; None ends it."""
    refusal: str = ""  # to the question whether it is ready; "silent": no answer
    key: tuple[str, str] | None = None  # header that every call must have, as restricted APIs want

    def wants(self, headers: Mapping[str, str], prefix: str = "") -> str:
        """The header that is missing or wrong; empty if none."""
        name, value = self.key or ("", None)
        return "" if headers.get(prefix + name) == value else prefix + name

    @staticmethod
    def is_loaded(model: str) -> bool:
        """What Triton itself says of a model."""
        return model in (MODEL, "ensemble") or model in FOREIGN_MODELS

    def arrive(
        self, request_id: str, values: Tensors, outputs: list[str], model: str = MODEL
    ) -> Arrival:
        arrival = Arrival(request_id, values, outputs, model)
        self.arrivals.append(arrival)
        return arrival

    def answer(self, arrival: Arrival) -> Iterator[Tensors]:
        """The responses to a request; the prompt says how many, and what goes wrong when."""
        values = arrival.values
        if arrival.model != MODEL:
            unknown = f"Request for unknown model: '{arrival.model}' is not found"
            raise ModelError(FOREIGN_MODELS.get(arrival.model, unknown))
        if values.get("stop"):
            self.stops.add(arrival.request_id)
            yield {}
        elif values.get("stats"):
            yield from self._stats(bool(values["stream"]))
        elif values.get("why"):
            yield from self._why(arrival)
        elif values.get("ready"):
            yield from self._ready(arrival)
        elif values.get("live"):
            yield self._live(values)
        elif values.get("recording"):
            yield {"recording": ['{"inflight_recording": 1}\n']}
        elif "input_ids" in values:
            yield from self._tokens(values)
        else:
            yield from self._text(arrival)

    def _tokens(self, values: Tensors) -> Iterator[Tensors]:
        last, count = values["input_ids"][-1], values["request_output_len"]
        num_answers = values.get("num_return_sequences", 1)
        ids = list(range(last + 1, last + 1 + count))
        for part in [[number] for number in ids] if values["streaming"] else [ids]:
            for index in reversed(range(num_answers)):  # each ten times the one before
                own = [number * 10**index for number in part]
                tensors: Tensors = {"output_ids": own, "sequence_length": [len(own)]}
                if values.get("return_finish_reason"):
                    tensors["finish_reason"] = ["length"]
                if num_answers > 1:
                    tensors["sequence_index"] = [index]
                yield tensors

    def _stats(self, is_feed: bool) -> Iterator[Tensors]:
        yield {"stats": ['{"Iteration Counter": 1}']}
        while is_feed:
            time.sleep(GAP_SECONDS)
            yield {"stats": ['{"Iteration Counter": 2}', '{"Iteration Counter": 3}']}

    def _ready(self, arrival: Arrival) -> Iterator[Tensors]:
        while self.refusal == "silent" and not arrival.is_left.is_set():
            time.sleep(GAP_SECONDS)
        if self.refusal:
            raise ModelError(self.refusal)
        yield {}

    @staticmethod
    def _live(values: Tensors) -> Tensors:
        since = str(values["live_since"] or "0")
        if since == "broken":
            raise ModelError("the state of the server could not be put together")
        blocks = {"blocks": [[1, 2], [-1, 6]]} if values["live_blocks"] else {}
        answer = {"cursor": str(int(since) + 1), "cost_us": 100, "since": since, **blocks}
        return {"live": [json.dumps(answer)]}

    def _why(self, arrival: Arrival) -> Iterator[Tensors]:
        if arrival.request_id == "silent":
            while not arrival.is_left.is_set() and arrival.request_id not in self.stops:
                time.sleep(GAP_SECONDS)
        elif arrival.request_id == "broken":
            yield {"why": ["[}"]}
        elif arrival.request_id == "gone":
            yield {"why": [json.dumps({"state": NOT_IN_FLIGHT, "reason": "no such request"})]}
        else:
            reason = "waiting for KV blocks: needs 5, free 3"
            numbers = {"place": 2, "num_waiting": 7}
            if arrival.request_id == "second":
                numbers |= {"sequence": 2, "num_sequences": 4}
            yield {"why": [json.dumps({"state": "waiting", "reason": reason, **numbers})]}

    def _text(self, arrival: Arrival) -> Iterator[Tensors]:
        prompt = arrival.values["text_input"]
        if prompt == "refuse":
            raise ModelError("'text_input' is refused: say something else")
        if prompt == "silent":
            while arrival.request_id not in self.stops and not arrival.is_left.is_set():
                time.sleep(GAP_SECONDS)
            return
        count = arrival.values["max_tokens"]
        before = "é" if prompt == "accents" else " "
        for number in range(1, count + 1):
            if arrival.request_id in self.stops:
                return
            if prompt == "break" and number > 2:
                raise Broken
            if prompt == "fail late" and number > 2:
                raise ModelError("a step of the engine failed")
            if arrival.values["stream"]:
                yield {"text_output": [f"{before}{number}"]}
                arrival.num_sent += 1
                time.sleep(GAP_SECONDS)
        if not arrival.values["stream"]:
            text = "".join(f" {number}" for number in range(1, count + 1))
            yield {"text_output": [text], "finish_reason": ["length"]}


class GrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """`LocalTriton` over gRPC."""

    def __init__(self, triton: LocalTriton) -> None:
        self._triton = triton
        self._server = grpc.server(ThreadPoolExecutor(16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(grace=None).wait()

    def _check_key(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        if wanted := self._triton.wants(metadata, "triton-grpc-protocol-"):
            words = f"This protocol is restricted, expecting header '{wanted}'"
            context.abort(grpc.StatusCode.UNAVAILABLE, words)

    def ModelReady(self, request: Any, context: Any) -> Any:
        self._check_key(context)
        return service_pb2.ModelReadyResponse(ready=self._triton.is_loaded(request.name))

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self._check_key(context)
        for request in requests:
            outputs = [output.name for output in request.outputs]
            values = _values(request)
            arrival = self._triton.arrive(request.id, values, outputs, request.model_name)
            context.add_callback(arrival.is_left.set)
            if values.get("shared"):
                yield from self._share(request.id, arrival)
                continue
            place = request.parameters["inflight_shared"].string_param
            name, _, tag = place.partition(" ")
            shared = self._triton.shared.get(name)
            try:
                for tensors in self._triton.answer(arrival):
                    asked = {n: tensor for n, tensor in tensors.items() if n in outputs}
                    if shared is None:
                        yield _response(asked, is_final=False)
                    else:
                        shared.put(SharedPart(tag, _packed(asked)))
                        shared.put(SharedPart("nobody", {}))
            except ModelError as error:
                yield service_pb2.ModelStreamInferResponse(error_message=str(error))
            except Broken:
                return
            else:
                assert request.parameters["triton_enable_empty_final_response"].bool_param
                yield _response({}, is_final=True)
                if shared is not None:
                    shared.put(SharedPart(tag, None))
            # A client that hangs up instead of reading to the end is seen in this time.
            time.sleep(5 * GAP_SECONDS)
            if not arrival.is_left.is_set():
                arrival.is_completed.set()

    def _share(self, name: str, arrival: Arrival) -> Iterator[Any]:
        parts = self._triton.shared[name] = queue.Queue()
        yield _response({"shared": pack_parts([])}, is_final=False)
        while not arrival.is_left.is_set():
            with suppress(queue.Empty):
                if (part := parts.get(timeout=GAP_SECONDS)) is None:
                    return
                yield _response({"shared": pack_parts([part])}, is_final=False)


def _packed(tensors: Tensors) -> dict[str, list[Any]]:
    return {
        name: [each.encode() if isinstance(each, str) else each for each in values]
        for name, values in tensors.items()
    }


def _values(request: Any) -> Tensors:
    values: Tensors = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            texts = [item.decode() for item in deserialize_bytes_tensor(raw)]
            values[tensor.name] = texts if len(texts) > 1 else texts[0]
        else:
            array = np.frombuffer(raw, DTYPE_TO_NUMPY[tensor.datatype]).reshape(tensor.shape)
            assert array.shape[0] == 1
            values[tensor.name] = array[0].tolist() if array.size != 1 else array.item()
    if isinstance(values.get("input_ids"), int):
        values["input_ids"] = [values["input_ids"]]
    return values


def _response(tensors: Tensors, is_final: bool) -> Any:
    message = service_pb2.ModelStreamInferResponse()
    response = message.infer_response
    for name, value in tensors.items():
        if isinstance(value, bytes):
            array, raw, datatype = np.frombuffer(value, np.uint8)[None], value, "UINT8"
        elif isinstance(value[0], str):
            array = np.array([[item.encode() for item in value]], dtype=np.object_)
            raw, datatype = serialize_byte_tensor(array).item(), "BYTES"
        else:
            array = np.array([[value]], dtype=np.int32)
            raw, datatype = array.tobytes(), "INT32"
        response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        response.raw_output_contents.append(raw)
    response.parameters["triton_final_response"].bool_param = is_final
    return message


class HttpServer:
    """`LocalTriton` over HTTP; events leave in pieces of seven bytes."""

    def __init__(self, triton: LocalTriton) -> None:
        class Handler(_HttpHandler):
            local = triton

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, args=(GAP_SECONDS,), daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _HttpHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    local: LocalTriton

    def do_GET(self) -> None:
        if wanted := self.local.wants(dict(self.headers)):
            self._refuse(wanted)
            return
        self.send_response(200 if self.local.is_loaded(self.path.split("/")[3]) else 400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if wanted := self.local.wants(dict(self.headers)):
            self._refuse(wanted)
            return
        model = self.path.split("/")[3]
        arrival = self.local.arrive(body.pop("id", ""), body, [], model)
        try:
            self._answer(arrival)
        except Broken:
            self.close_connection = True
        except OSError:
            self.close_connection = True
            arrival.is_left.set()

    def _answer(self, arrival: Arrival) -> None:
        is_started = False
        try:
            for tensors in self.local.answer(arrival):
                if not is_started:
                    is_started = self._start()
                self._send_event({"model_name": "tensorrt_llm", **_plain(tensors)})
        except ModelError as error:
            if not is_started:
                self._send_error(400, f'data: {{"error":"{error}"}}\n\n')
                return
            self._send_event({"error": str(error)})
        if not is_started:
            self._start()
        self.wfile.write(b"0\r\n\r\n")
        arrival.is_completed.set()

    def _start(self) -> bool:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        return True

    def _send_event(self, fields: Tensors) -> None:
        data = f"data: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()
        for start in range(0, len(data), 7):
            piece = data[start : start + 7]
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    def _refuse(self, wanted: str) -> None:
        words = f"This API is restricted, expecting header '{wanted}'"
        self._send_error(403, json.dumps({"error": words}))

    def _send_error(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the output of the tests clean."""


def _plain(tensors: Tensors) -> Tensors:
    """Triton writes a tensor of one element as a plain value."""
    return {name: value[0] if len(value) == 1 else value for name, value in tensors.items()}
