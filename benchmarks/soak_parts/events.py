"""An answer as Triton's `generate_stream` sends it over HTTP, on a connection that can be reset."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from soak_parts.server import HOST
from soak_parts.wire import LLM_MODEL

_PREFIX = b"data: "


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
    async def send(cls, port: int, values: dict[str, Any]) -> EventStream:
        """Connect and ask."""
        body = json.dumps(values)
        stream = cls(*await asyncio.open_connection(HOST, port))
        head = (
            f"POST /v2/models/{LLM_MODEL}/generate_stream HTTP/1.1\r\nHost: {HOST}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        stream._writer.write((head + body).encode())
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
            return str(json.loads(body.removeprefix(_PREFIX))["error"])
        return repr(body)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What was sent, until the answer ends."""
        received = b""
        while piece := await self._read():
            *whole, received = (received + piece).split(b"\n\n")
            for event in whole:
                if not event.startswith(_PREFIX):
                    raise ValueError(f"no event: {event!r:.200}")
                yield json.loads(event[len(_PREFIX) :])

    def reset(self) -> None:
        """Have the kernel tell the server that nobody is there any more."""
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
