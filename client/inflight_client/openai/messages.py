"""What the front says. Nothing that it does depends on whether that can be said: whoever read its
pipe may be gone or stand still, the disk of its log may be full."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_PATIENCE_SECONDS = 0.5


def say(text: str, *, err: bool = False) -> None:
    """A line on stdout, or stderr; what cannot be written is lost, or comes later."""
    stream = sys.stderr if err else sys.stdout
    if stream is None:
        return
    # Past the buffer, which Python would try to write once more when everything else is over; it
    # ends with exit code 120 if that fails. On a thread, since a write may wait for ever.
    data = f"{text}\n".encode(stream.encoding, errors="replace")
    writer = threading.Thread(target=_write, args=(stream.fileno(), data), daemon=True)
    with suppress(RuntimeError):  # there may be no room for a thread
        writer.start()
        writer.join(_PATIENCE_SECONDS)


def _write(descriptor: int, data: bytes) -> None:
    with suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
