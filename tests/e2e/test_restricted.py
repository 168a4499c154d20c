"""A Triton that wants a key with every inference: `--grpc-restricted-protocol` and its twin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.calls import assert_counts
from support.front_process import FrontProcess
from support.plain_triton import PlainServer, repository_server

from inflight_client import AccessDenied, AsyncInflightClient, InflightClient
from inflight_client.address import Protocol

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "1 2 3 4"
VALUE = "s3cret of mine"
NAMES: dict[Protocol, str] = {"grpc": "triton-grpc-protocol-infer-key", "http": "infer-key"}


@pytest.fixture(scope="module")
def server() -> Iterator[PlainServer]:
    """Over gRPC its health needs the key as well."""
    options = [
        f"--grpc-restricted-protocol=inference,health:infer-key={VALUE}",
        f"--http-restricted-api=inference:infer-key={VALUE}",
    ]
    with repository_server(server_options=options) as running:
        yield running


def address(server: PlainServer, protocol: Protocol) -> str:
    return server.grpc_url if protocol == "grpc" else server.http_url


@pytest.mark.parametrize("protocol", NAMES)
def test_a_client_sends_the_key(server: PlainServer, protocol: Protocol) -> None:
    url, headers = address(server, protocol), {NAMES[protocol]: VALUE}
    with InflightClient(url, protocol=protocol, headers=headers) as client:
        assert client.health()
        assert_counts(PROMPT, client.generate(PROMPT, 20).text, 20)
        assert_counts(PROMPT, "".join(chunk.text for chunk in client.stream(PROMPT, 20)), 20)

    async def generate() -> str:
        async with AsyncInflightClient(url, protocol=protocol, headers=headers) as client:
            assert await client.health()
            return (await client.generate(PROMPT, 20)).text

    assert_counts(PROMPT, asyncio.run(generate()), 20)


@pytest.mark.parametrize("value", [None, "another"])
@pytest.mark.parametrize("protocol", NAMES)
def test_without_it_the_header_is_named(
    server: PlainServer, protocol: Protocol, value: str | None
) -> None:
    url, headers = address(server, protocol), {NAMES[protocol]: value} if value else None

    async def generate() -> None:
        async with AsyncInflightClient(url, protocol=protocol, headers=headers) as client:
            await client.generate(PROMPT, 20)

    with InflightClient(url, protocol=protocol, headers=headers) as client:
        for call in (
            client.health,
            lambda: client.generate(PROMPT, 20),
            lambda: asyncio.run(generate()),
        ):
            with pytest.raises(AccessDenied, match=f"expecting header '{NAMES[protocol]}'"):
                call()


def test_the_front_sends_the_key(server: PlainServer, tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text(f"{NAMES['grpc']}: {VALUE}\n")
    with FrontProcess(tmp_path, server.grpc_url, [f"--header=@{file}"]) as front:
        body = {"model": "demo_model", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        answer = httpx.post(f"{front.url}/v1/completions", json=body, timeout=60, trust_env=False)
        assert_counts(PROMPT, answer.json()["choices"][0]["text"], 20)
        assert httpx.get(f"{front.url}/health", trust_env=False).status_code == httpx.codes.OK
    assert VALUE not in front.output


def test_a_front_without_the_key_says_which_header_it_needs(
    server: PlainServer, tmp_path: Path
) -> None:
    front = FrontProcess(tmp_path, server.grpc_url)
    assert front.process.wait(timeout=60) == 1
    assert f"expecting header '{NAMES['grpc']}'" in front.output
