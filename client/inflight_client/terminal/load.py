"""Requests as streams over HTTP, and when each of them produced what.

As thin as it can be: it shares the cores with the server that is measured.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from inflight_client.address import Address

_PREFIX = b"data: "
_DONE = b"data: [DONE]"
_LIMIT = 2**20  # bytes of a head or the length of a chunk


class EventStream:
    """One request and what comes of it.

    `EOFError` or `OSError` where the connection ends before the answer does, `ValueError` for what
    is no HTTP or no JSON.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `send`."""
        self._reader = reader
        self._writer = writer
        self._headers: dict[str, str] = {}
        self.status = 0
        """Of HTTP, once `read_head` is done."""

    @classmethod
    async def send(
        cls,
        address: Address,
        path: str,
        values: Mapping[str, Any],
        headers: Sequence[tuple[str, str]] = (),
    ) -> EventStream:
        """Connect and post ``values`` as JSON."""
        body = json.dumps(values).encode()
        is_safe = address.scheme == "https"
        stream = cls(
            *await asyncio.open_connection(
                address.host, address.port, ssl=is_safe or None, limit=_LIMIT
            )
        )
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {address.target}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers),
        ]
        stream._writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + body)
        return stream

    async def read_head(self) -> None:
        """Wait for the status."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        self.status = int(first.split(" ")[1])
        fields = (line.partition(":") for line in lines)
        self._headers = {name.lower(): value.strip().lower() for name, _, value in fields}

    async def read_error(self) -> str:
        """What a refusal says; all of its body if that is not the JSON of an error."""
        body = b""
        if self._is_chunked:
            while piece := await self._read():
                body += piece
        else:
            body = await self._reader.readexactly(int(self._headers.get("content-length", "0")))
        with suppress(ValueError, KeyError, TypeError):
            error = json.loads(body.removeprefix(_PREFIX))["error"]
            return str(error["message"] if isinstance(error, dict) else error)
        return repr(body)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What was sent, until the answer ends."""
        received = b""
        while piece := await self._read():
            *whole, received = (received + piece).split(b"\n\n")
            for event in whole:
                if event == _DONE:
                    return
                if not event.startswith(_PREFIX):
                    raise ValueError(f"no event: {event!r:.200}")
                yield json.loads(event[len(_PREFIX) :])

    def reset(self) -> None:
        """Have the kernel tell the server that the client is gone."""
        raw: socket.socket = self._writer.get_extra_info("socket")
        with suppress(OSError):  # it is closed already
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    @property
    def _is_chunked(self) -> bool:
        return "chunked" in self._headers.get("transfer-encoding", "")

    async def _read(self) -> bytes:
        """What came next; nothing at the end."""
        if not self._is_chunked:
            return await self._reader.read(2**16)
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]


@dataclass
class Trace:
    """When one stream produced what: (seconds since its request, number of tokens)."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """One measured round of ``num_streams`` simultaneous requests."""

    num_streams: int
    seconds: float
    traces: list[Trace]

    def figures(self) -> dict[str, float]:
        """The figures of the table; times in milliseconds."""
        num_tokens = sum(sum(trace.counts) for trace in self.traces)
        num_responses = sum(len(trace.counts) for trace in self.traces)
        firsts = [trace.times[0] * 1e3 for trace in self.traces]
        gaps = [gap * 1e3 for trace in self.traces for gap in gaps_of(trace)]
        gaps = gaps or [0.0]  # each stream was one response
        return {
            "tokens_per_second": num_tokens / self.seconds,
            "first_token_ms_p50": quantile(firsts, 0.5),
            "first_token_ms_p99": quantile(firsts, 0.99),
            "gap_ms_p50": quantile(gaps, 0.5),
            "gap_ms_p99": quantile(gaps, 0.99),
            "tokens_per_response": num_tokens / num_responses,
        }


def gaps_of(trace: Trace) -> list[float]:
    """Seconds from each response to the next one."""
    pairs = zip(trace.times, trace.times[1:], strict=False)
    return [later - earlier for earlier, later in pairs]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so many are not above; of at least one."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
