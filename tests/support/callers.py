"""The sync and the asyncio client with one interface, so that each test runs both."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import islice
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
    def _read(self, method: str, count: int | None, *arguments: Any, **options: Any) -> list[Any]:
        """The first ``count`` items of a stream or feed, all for None."""

    def stream(
        self, prompt: Prompt, max_tokens: int, leave_after: int | None = None, **options: Any
    ) -> list[GenerateChunk]:
        return self._read("stream", leave_after, prompt, max_tokens, **options)

    def stats(self, count: int, follow: bool = True) -> list[dict[str, Any]]:
        return self._read("stats", count, follow)

    @abstractmethod
    def cancel_when(self, prompt: str, is_time: Callable[[], bool]) -> list[GenerateChunk]:
        """Cancel a stream from another thread or task once ``is_time``; all its chunks."""

    @abstractmethod
    def close_when(self, prompt: str, is_time: Callable[[], bool]) -> None:
        """Read a stream whose client another thread or task closes once ``is_time``."""


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

    def _read(self, method: str, count: int | None, *arguments: Any, **options: Any) -> list[Any]:
        with InflightClient(**self._settings) as client:
            items = getattr(client, method)(*arguments, **options)
            found = list(islice(items, count))
            if method == "stats":
                items.close()  # ends the feed
            return found

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


class AsyncCaller(Caller):
    """`AsyncInflightClient`, in an event loop per call."""

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        async def run() -> Any:
            async with AsyncInflightClient(**self._settings) as client:
                return await getattr(client, method)(*arguments, **options)

        return asyncio.run(run())

    def _read(self, method: str, count: int | None, *arguments: Any, **options: Any) -> list[Any]:
        async def run() -> list[Any]:
            found: list[Any] = []
            async with (
                AsyncInflightClient(**self._settings) as client,
                aclosing(getattr(client, method)(*arguments, **options)) as items,
            ):
                async for item in items:
                    found.append(item)
                    if len(found) == count:
                        break
            return found

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


CALLERS: dict[str, type[SyncCaller] | type[AsyncCaller]] = {
    "sync": SyncCaller,
    "asyncio": AsyncCaller,
}
