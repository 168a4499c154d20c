"""The sync and the asyncio client behind one face, so that one test holds both to the promise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from typing import Any, Protocol

from inflight_client import AsyncInflightClient, GenerateChunk, GenerateResult, InflightClient
from inflight_client.address import Protocol as Wire

Prompt = str | Sequence[int]

LONG = 5_000
"""Tokens of an answer that nobody waits for the end of."""


class Caller(Protocol):
    """Every call opens a client, does one thing and closes it."""

    def generate(self, prompt: Prompt, max_tokens: int, **options: Any) -> GenerateResult: ...

    def generate_many(self, prompt: Prompt, **options: Any) -> list[GenerateResult]: ...

    def stream(
        self, prompt: Prompt, max_tokens: int, leave_after: int | None = None, **options: Any
    ) -> list[GenerateChunk]: ...

    def cancel_when(self, prompt: str, is_time: Callable[[], bool]) -> list[GenerateChunk]:
        """Cancel a stream from the side once ``is_time``; what it has given until its end."""

    def close_when(self, prompt: str, is_time: Callable[[], bool]) -> None:
        """Read a stream whose client is closed from the side once ``is_time``."""

    def stop(self, request_id: str) -> None: ...

    def stats(self, count: int, follow: bool = True) -> list[dict[str, Any]]: ...

    def why(self, request_id: str, **options: Any) -> dict[str, Any]: ...

    def recording(self) -> str: ...

    def health(self) -> bool: ...


class _Connects:
    """Keeps what a client is made with."""

    def __init__(
        self,
        url: str,
        protocol: Wire,
        model: str = "tensorrt_llm",
        headers: dict[str, str] | None = None,
    ) -> None:
        self._settings: Any = {
            "url": url,
            "protocol": protocol,
            "model": model,
            "headers": headers,
        }


class SyncCaller(_Connects):
    """`InflightClient`."""

    def generate(self, prompt: Prompt, max_tokens: int, **options: Any) -> GenerateResult:
        with InflightClient(**self._settings) as client:
            return client.generate(prompt, max_tokens, **options)

    def generate_many(self, prompt: Prompt, **options: Any) -> list[GenerateResult]:
        with InflightClient(**self._settings) as client:
            return client.generate_many(prompt, **options)

    def stream(
        self, prompt: Prompt, max_tokens: int, leave_after: int | None = None, **options: Any
    ) -> list[GenerateChunk]:
        chunks: list[GenerateChunk] = []
        with InflightClient(**self._settings) as client:
            for chunk in client.stream(prompt, max_tokens, **options):
                chunks.append(chunk)
                if len(chunks) == leave_after:
                    break
        return chunks

    def cancel_when(self, prompt: str, is_time: Callable[[], bool]) -> list[GenerateChunk]:
        with InflightClient(**self._settings) as client:
            stream = client.stream(prompt, LONG)

            def cancel() -> None:
                while not is_time():
                    threading.Event().wait(0.01)
                stream.cancel()

            thread = threading.Thread(target=cancel)
            thread.start()
            chunks = list(stream)
            thread.join()
            return chunks

    def close_when(self, prompt: str, is_time: Callable[[], bool]) -> None:
        client = InflightClient(**self._settings)

        def close() -> None:
            while not is_time():
                threading.Event().wait(0.01)
            client.close()

        thread = threading.Thread(target=close)
        thread.start()
        try:
            for _ in client.stream(prompt, LONG):
                pass
        finally:
            thread.join()

    def stop(self, request_id: str) -> None:
        with InflightClient(**self._settings) as client:
            client.stop(request_id)

    def stats(self, count: int, follow: bool = True) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with InflightClient(**self._settings) as client, closing(client.stats(follow)) as feed:
            for stats in feed:
                found.append(stats)
                if len(found) == count:
                    break
        return found

    def why(self, request_id: str, **options: Any) -> dict[str, Any]:
        with InflightClient(**self._settings) as client:
            return client.why(request_id, **options)

    def recording(self) -> str:
        with InflightClient(**self._settings) as client:
            return client.recording()

    def health(self) -> bool:
        with InflightClient(**self._settings) as client:
            return client.health()


class AsyncCaller(_Connects):
    """`AsyncInflightClient`, in an event loop per call."""

    def generate(self, prompt: Prompt, max_tokens: int, **options: Any) -> GenerateResult:
        async def run() -> GenerateResult:
            async with AsyncInflightClient(**self._settings) as client:
                return await client.generate(prompt, max_tokens, **options)

        return asyncio.run(run())

    def generate_many(self, prompt: Prompt, **options: Any) -> list[GenerateResult]:
        async def run() -> list[GenerateResult]:
            async with AsyncInflightClient(**self._settings) as client:
                return await client.generate_many(prompt, **options)

        return asyncio.run(run())

    def stream(
        self, prompt: Prompt, max_tokens: int, leave_after: int | None = None, **options: Any
    ) -> list[GenerateChunk]:
        async def run() -> list[GenerateChunk]:
            chunks: list[GenerateChunk] = []
            async with (
                AsyncInflightClient(**self._settings) as client,
                aclosing(client.stream(prompt, max_tokens, **options)) as stream,
            ):
                async for chunk in stream:
                    chunks.append(chunk)
                    if len(chunks) == leave_after:
                        break
            return chunks

        return asyncio.run(run())

    def cancel_when(self, prompt: str, is_time: Callable[[], bool]) -> list[GenerateChunk]:
        async def run() -> list[GenerateChunk]:
            async with AsyncInflightClient(**self._settings) as client:
                stream = client.stream(prompt, LONG)

                async def cancel() -> None:
                    while not is_time():
                        await asyncio.sleep(0.01)
                    await stream.cancel()

                task = asyncio.create_task(cancel())
                chunks = [chunk async for chunk in stream]
                await task
                return chunks

        return asyncio.run(run())

    def close_when(self, prompt: str, is_time: Callable[[], bool]) -> None:
        async def run() -> None:
            client = AsyncInflightClient(**self._settings)

            async def read() -> None:
                async for _ in client.stream(prompt, LONG):
                    pass

            task = asyncio.create_task(read())
            while not is_time():
                await asyncio.sleep(0.01)
            await client.close()
            await task

        asyncio.run(run())

    def stop(self, request_id: str) -> None:
        async def run() -> None:
            async with AsyncInflightClient(**self._settings) as client:
                await client.stop(request_id)

        asyncio.run(run())

    def stats(self, count: int, follow: bool = True) -> list[dict[str, Any]]:
        async def run() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            async with (
                AsyncInflightClient(**self._settings) as client,
                aclosing(client.stats(follow)) as feed,
            ):
                async for stats in feed:
                    found.append(stats)
                    if len(found) == count:
                        break
            return found

        return asyncio.run(run())

    def why(self, request_id: str, **options: Any) -> dict[str, Any]:
        async def run() -> dict[str, Any]:
            async with AsyncInflightClient(**self._settings) as client:
                return await client.why(request_id, **options)

        return asyncio.run(run())

    def recording(self) -> str:
        async def run() -> str:
            async with AsyncInflightClient(**self._settings) as client:
                return await client.recording()

        return asyncio.run(run())

    def health(self) -> bool:
        async def run() -> bool:
            async with AsyncInflightClient(**self._settings) as client:
                return await client.health()

        return asyncio.run(run())


CALLERS: dict[str, type[SyncCaller] | type[AsyncCaller]] = {
    "sync": SyncCaller,
    "asyncio": AsyncCaller,
}
