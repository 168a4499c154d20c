"""Server-sent events, as far as Triton's ``generate_stream`` uses them.

Rules: the event stream format of the WHATWG HTML standard, section 9.2: lines end in LF, CR LF or
CR, ``data`` lines of one event are joined by LF, a blank line ends the event, an event that the end
of the stream cuts off is dropped, lines that start with a colon are comments.
"""

from __future__ import annotations


class SseParser:
    """Takes bytes as they arrive, cut anywhere, and gives the data of every complete event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """The data of the events that ``received`` completes, in order."""
        # A CR at the end may be half of a CR LF: it waits for the next bytes. Lines are cut before
        # decoding, so a character split between two reads is whole again here.
        block = self._rest + received
        held = b"\r" if block.endswith(b"\r") else b""
        block = block[: len(block) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, tail = block.split(b"\n")
        self._rest = tail + held
        events: list[str] = []
        for line in lines:
            if line:
                self._read_line(line.decode("utf-8", errors="replace"))
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _read_line(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
