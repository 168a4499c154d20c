"""Requests and answers as they are on the wire: KServe's gRPC stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

LLM_MODEL = "tensorrt_llm"
_DTYPES: dict[str, Any] = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32}


@dataclass
class Answer:
    """What came on one stream until now."""

    responses: list[dict[str, np.ndarray[Any, Any]]] = field(default_factory=list)
    """Tensors by name, of responses that hold any."""
    errors: list[str] = field(default_factory=list)
    num_finals: int = 0

    @property
    def text(self) -> str:
        """Of a stream of a single sequence: its pieces in one."""
        return "".join(self.texts)

    @property
    def texts(self) -> list[str]:
        """Text by sequence; a stream of a single one is number 0."""
        pieces: dict[int, list[str]] = {}
        for response in self.responses:
            if "text_output" in response:
                index = int(response["sequence_index"][0]) if "sequence_index" in response else 0
                pieces.setdefault(index, []).append(text_of(response))
        return ["".join(pieces[index]) for index in sorted(pieces)]

    def add(self, message: Any) -> None:
        """Take in one message of the stream; an error is the end of its request."""
        if message.error_message:
            self.errors.append(message.error_message)
            self.num_finals += 1
            return
        infer = message.infer_response
        tensors = {
            tensor.name: _decode(tensor.datatype, raw)
            for tensor, raw in zip(infer.outputs, infer.raw_output_contents, strict=True)
        }
        if tensors:
            self.responses.append(tensors)
        final = infer.parameters.get("triton_final_response")
        self.num_finals += final is not None and final.bool_param


def text_of(response: dict[str, np.ndarray[Any, Any]], beam: int = 0) -> str:
    """The text in one response."""
    return bytes(response["text_output"][beam]).decode(errors="replace")


def encode(name: str, values: dict[str, Any], model: str = LLM_MODEL) -> Any:
    """The request with the id ``name``; a list of texts or numbers is one row of them."""
    request = service_pb2.ModelInferRequest(model_name=model, id=name)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for key, value in values.items():
        first = value[0] if isinstance(value, list) else value
        if isinstance(first, str | bytes):
            datatype, array = "BYTES", np.asarray([np.ravel(value)], dtype=np.object_)
            raw = serialize_byte_tensor(array).item()
        else:
            kind = {bool: ("BOOL", np.bool_), float: ("FP32", np.float32)}.get(type(first))
            datatype, dtype = kind or ("INT32", np.int32)
            array = np.asarray([np.ravel(value)], dtype=dtype)
            raw = array.tobytes()
        request.inputs.add(name=key, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(raw)
    return request


async def with_limit(call: Any, seconds: float) -> AsyncIterator[Any]:
    """The messages of a call; ``asyncio.TimeoutError`` if one takes longer than ``seconds``."""
    messages = call.__aiter__()
    while True:
        try:
            yield await asyncio.wait_for(messages.__anext__(), seconds)
        except StopAsyncIteration:
            return


def _decode(datatype: str, raw: bytes) -> np.ndarray[Any, Any]:
    """Flat; the shape is not needed."""
    if datatype == "BYTES":
        array: np.ndarray[Any, Any] = deserialize_bytes_tensor(raw)
        return array
    return np.frombuffer(raw, _DTYPES[datatype])
