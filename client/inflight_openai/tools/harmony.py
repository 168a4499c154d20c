"""gpt-oss: an answer is messages with a header each, which names a channel and perhaps a tool.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>``: what is said in the channel ``analysis`` are thoughts,
what is written ``to=`` a function are the arguments of a call, and everything else is content. The
prompt ends with ``<|start|>assistant``; tokens that end the answer are not part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from inflight_openai.tools.reader import Part, held_back

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader:
    """Reads headers whole and messages as they come."""

    def __init__(self) -> None:
        self._buffer = ""
        self._part: Part | None = None  # what the message that is being read is; None in a header
        self._num_calls = 0

    def feed(self, text: str) -> Iterator[Part]:
        """See `Reader`."""
        self._buffer += text
        while self._buffer:
            if self._part is None:
                header, has_end, rest = self._buffer.partition(_MESSAGE)
                if not has_end:
                    return
                self._buffer = rest
                self._part = self._read_header(header)
                if self._part.kind == "call":
                    yield self._part
                continue
            places = [place for each in _ENDS if (place := self._buffer.find(each)) >= 0]
            end = min(places) if places else len(self._buffer) - held_back(self._buffer, _ENDS)
            if end:
                yield Part(self._part.kind, self._buffer[:end], self._part.index)
            self._buffer = self._buffer[end:]
            if not places:
                return
            self._part = None

    def finish(self) -> Iterator[Part]:
        """See `Reader`."""
        if self._part is not None and self._buffer:
            yield Part(self._part.kind, self._buffer, self._part.index)
        elif self._part is None and self._buffer and "<|" not in self._buffer:
            yield Part("content", self._buffer)  # not in the format at all

    def _read_header(self, header: str) -> Part:
        if recipient := _RECIPIENT.search(header):
            self._num_calls += 1
            return Part("call", "", self._num_calls - 1, recipient[1])
        channel = _CHANNEL.search(header)
        return Part("reasoning" if channel and channel[1] == "analysis" else "content")
