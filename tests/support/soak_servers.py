"""Servers that play what the soak must judge, each request answered by a script."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from soak_parts.answers import continuation
from soak_parts.traffic import Traffic

Script = Callable[[Any], AsyncIterator[Any]]


def response(
    text: str = "", *, error: str = "", is_final: bool = False, name: str = "text_output"
) -> Any:
    message = service_pb2.ModelStreamInferResponse(error_message=error)
    message.infer_response.parameters["triton_final_response"].bool_param = is_final
    if text:
        message.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        array = np.asarray([text], dtype=np.object_)
        message.infer_response.raw_output_contents.append(serialize_byte_tensor(array).item())
    return message


def asked(script: Script, ask: Callable[[Traffic], Awaitable[Any]]) -> Any:
    """What ``ask`` returns with a server that answers each request with ``script``."""

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            async for each in requests:
                async for message in script(each):
                    yield message

    async def run() -> Any:
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        traffic = Traffic(f"127.0.0.1:{port}", 0, 1)
        try:
            return await ask(traffic)
        finally:
            await traffic.close()
            await server.stop(None)

    return asyncio.run(run())


def names_of(each: Any) -> list[str]:
    """Of the tensors of a request."""
    return [tensor.name for tensor in each.inputs]


def pieces_of(each: Any, num_pieces: int) -> str:
    """The right answer; each letter is a token."""
    return continuation(each.raw_input_contents[0][4:].decode(), num_pieces)
