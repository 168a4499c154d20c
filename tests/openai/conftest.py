"""The local servers of the client's tests."""

from client.conftest import free_port, local_grpc, local_http

__all__ = ["free_port", "local_grpc", "local_http"]
