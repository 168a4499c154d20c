"""What comes out of a message of gRPC, and how a channel is opened."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from inflight_client.address import Address
from inflight_client.grpc_transport import channel_options, decode_response
from inflight_client.http_transport import client_settings


def test_bytes_that_are_no_text_are_marked() -> None:
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 2])
    array = np.array([[b"caf\xc3\xa9", b"\xff"]], dtype=np.object_)
    message.infer_response.raw_output_contents.append(serialize_byte_tensor(array).item())

    response, is_final = decode_response(message)

    assert response.tensors == {"text_output": ["café", "\ufffd"]}
    assert not is_final


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("10.0.0.1", False), ("box", False)],
)
def test_no_proxy_for_this_machine(host: str, is_local: bool) -> None:
    address = Address("http", host, 9)

    assert (("grpc.enable_http_proxy", 0) in channel_options(address)) is is_local
    assert client_settings(address)["trust_env"] is not is_local


def test_a_server_that_is_back_is_found_soon() -> None:
    """gRPC's own patience grows to two minutes while a server is away."""
    options = dict(channel_options(Address("grpc", "box", 9)))
    assert options["grpc.initial_reconnect_backoff_ms"] <= 1000
    assert options["grpc.max_reconnect_backoff_ms"] <= 1000
