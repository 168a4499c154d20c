"""The sync and the asyncio client with one interface, so that each test runs both."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from typing import Any

from inflight_client import AsyncInflightClient, GenerateChunk, GenerateResult, InflightClient
from inflight_client.address import Protocol as Wire

Prompt = str | Sequence[int]

LONG = 5_000
"""Tokens of an answer that no test reads to its end."""


class Caller(ABC):
    """Each call opens a client, does one thing and closes it."""

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

    def generate(self, prompt: Prompt, max_tokens: int, **options: Any) -> GenerateResult:
        result: GenerateResult = self._call("generate", prompt, max_tokens, **options)
        return result

    def generate_many(self, prompt: Prompt, **options: Any) -> list[GenerateResult]:
        results: list[GenerateResult] = self._call("generate_many", prompt, **options)
        return results

    def stop(self, request_id: str) -> None:
        self._call("stop", request_id)

    def why(self, request_id: str, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._call("why", request_id, **options)
        return answer

    def recording(self) -> str:
        return str(self._call("recording"))

    def health(self) -> bool:
        return bool(self._call("health"))

    @abstractmethod
    def _call(self, method: str, *arguments: Any, **options: Any) -> Any: ...

    @abstractmethod
    def stream(
        self, prompt: Prompt, max_tokens: int, leave_after: int | None = None, **options: Any
    ) -> list[GenerateChunk]: ...

    @abstractmethod
    def cancel_when(self, prompt: str, is_time: Callable[[], bool]) -> list[GenerateChunk]:
        """Cancel a stream from another thread or task once ``is_time``; all its chunks."""

    @abstractmethod
    def close_when(self, prompt: str, is_time: Callable[[], bool]) -> None:
        """Read a stream whose client another thread or task closes once ``is_time``."""

    @abstractmethod
    def stats(self, count: int, follow: bool = True) -> list[dict[str, Any]]: ...


def _run_when(is_time: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """A thread that acts once ``is_time``."""

    def run() -> None:
        while not is_time():
            threading.Event().wait(0.01)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


async def _wait_for(is_time: Callable[[], bool]) -> None:
    while not is_time():
        await asyncio.sleep(0.01)


class SyncCaller(Caller):
    """`InflightClient`."""

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        with InflightClient(**self._settings) as client:
            return getattr(client, method)(*arguments, **options)

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
            thread = _run_when(is_time, stream.cancel)
            chunks = list(stream)
            thread.join()
            return chunks

    def close_when(self, prompt: str, is_time: Callable[[], bool]) -> None:
        client = InflightClient(**self._settings)
        thread = _run_when(is_time, client.close)
        try:
            for _ in client.stream(prompt, LONG):
                pass
        finally:
            thread.join()

    def stats(self, count: int, follow: bool = True) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with InflightClient(**self._settings) as client, closing(client.stats(follow)) as feed:
            for stats in feed:
                found.append(stats)
                if len(found) == count:
                    break
        return found


class AsyncCaller(Caller):
    """`AsyncInflightClient`, in an event loop per call."""

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        async def run() -> Any:
            async with AsyncInflightClient(**self._settings) as client:
                return await getattr(client, method)(*arguments, **options)

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
                    await _wait_for(is_time)
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
            await _wait_for(is_time)
            await client.close()
            await task

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


CALLERS: dict[str, type[SyncCaller] | type[AsyncCaller]] = {
    "sync": SyncCaller,
    "asyncio": AsyncCaller,
}
