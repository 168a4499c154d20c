"""The local servers of the client's tests, and one event loop for all tests of a process."""

from __future__ import annotations

import pytest
from client.conftest import free_port, local_grpc, local_http

__all__ = ["free_port", "local_grpc", "local_http"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def one_loop(anyio_backend: str) -> None:
    """An event loop that outlives each test.

    All loops of a process share one completion queue of grpc.aio: an answer that comes for a call
    whose loop is closed is an error in the loop that happens to read the queue.
    """
