"""What is wrong with a recording."""

from __future__ import annotations


class RecordingError(Exception):
    """A recording that cannot be read or cannot have happened; the message names the place."""
