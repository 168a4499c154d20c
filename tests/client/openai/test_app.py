"""The front over a local server: health, and requests that are many, slow or fail."""

from __future__ import annotations

import asyncio

import pytest
from client.conftest import Local
from client.openai.front import front_of


@pytest.mark.parametrize("refusal", ["", "[UNAVAILABLE] the server is shutting down"])
def test_health_is_what_the_model_says(local_grpc: Local, refusal: str) -> None:
    """Triton calls it ready all the same."""
    local_grpc.triton.refusal = refusal

    async def ask() -> int:
        async with front_of(local_grpc) as client, client.get("/health") as answer:
            return answer.status

    assert asyncio.run(ask()) == (503 if refusal else 200)
