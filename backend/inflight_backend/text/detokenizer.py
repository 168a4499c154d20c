"""Incremental detokenisation: text as tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

from inflight_backend.text.tokenizer import TextCodec

_REPLACEMENT = "\ufffd"  # of a decoder, for bytes that are no character (yet)
_MAX_WITHHELD_TOKENS = 8  # a character has at most 4 bytes, and a token at least one
_MAX_OPEN_TOKENS = 3  # tokens of an incomplete character
_CONTEXT_TOKENS = 6  # tokens of the prompt a decoder looks at before the first new one
_MAX_EMITTED_TOKENS = 8  # more context costs more time in each decoding

# Why not `tokenizers.decoders.DecodeStream` (0.23)? On random answers with bytes that are no
# character it raises "Invalid prefix" (18 % of them with byte fallback, as of Llama 2), or loses or
# repeats text (11 % of them there, 14 % with byte-level tokenizers). Every answer must have a text.


class IncrementalDetokenizer:
    """Turns a growing list of tokens into pieces of text whose sum is the text of the answer.

    A token by itself has no text: it may be part of a character, or its leading space may depend
    on what stands before it. So a window of tokens is decoded without and with the new ones, and
    the difference is emitted once it ends in a whole character. The window starts with the last
    tokens of the prompt, which are never emitted. It grows to `_MAX_EMITTED_TOKENS` before it moves
    on, so that the text with the new tokens of last time is the one without those of this time.
    """

    def __init__(
        self, codec: TextCodec, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decode = codec.decoder(skip_special_tokens=skip_special_tokens)
        self._window = _context(self._decode, prompt_ids)
        self._num_emitted = len(self._window)
        self._emitted: str | None = None  # text of the emitted part, if that was decoded before
        self._decoded = ""  # text of the whole window, last time

    def fork(self) -> IncrementalDetokenizer:
        """A copy with the same state, for a second continuation."""
        twin = copy(self)
        twin._window = self._window.copy()
        return twin

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became certain, possibly none."""
        if len(ids) > _MAX_WITHHELD_TOKENS:
            starts = range(0, len(ids), _MAX_WITHHELD_TOKENS)
            return "".join([self.push(ids[i : i + _MAX_WITHHELD_TOKENS]) for i in starts])
        num_before = len(self._window)
        self._window += ids
        piece = self._new_text(self._window)
        if piece and not piece.endswith(_REPLACEMENT):
            self._move_on()
            return piece
        if len(ids) > 1:  # only a part is certain: add the tokens one by one
            del self._window[num_before:]
            return "".join([self.push((token,)) for token in ids])
        num_new = len(self._window) - self._num_emitted
        return "" if num_new < _MAX_WITHHELD_TOKENS else self._give_up(piece)

    def finish(self) -> str:
        """The remaining text at the end, without an incomplete character."""
        num_new = len(self._window) - self._num_emitted
        if num_new == 0:
            return ""
        piece = self._new_text(self._window)
        text = self._decode(self._window[-num_new:]) if piece is None else piece
        self._move_on()
        return text.rstrip(_REPLACEMENT)

    def _move_on(self) -> None:
        """All of the window was emitted; keep the last part, which begins with a character."""
        if len(self._window) > _MAX_EMITTED_TOKENS:
            del self._window[: self._num_emitted]
            self._emitted = None
        else:
            self._emitted = self._decoded
        self._num_emitted = len(self._window)

    def _give_up(self, piece: str | None) -> str:
        """So many tokens are not an incomplete character: emit their text."""
        if piece == "":  # special tokens: they have no text, and the next one's space depends on
            del self._window[self._num_emitted :]  # what stands before them
            return ""
        if piece is not None and (whole := piece.rstrip(_REPLACEMENT)):
            # Tokens that each end inside a character, which the next one begins with.
            del self._window[:-_MAX_EMITTED_TOKENS]
            self._emitted = self._decode(self._window).rstrip(_REPLACEMENT)
            self._num_emitted = len(self._window)
            return whole
        head = self._window[:-_MAX_OPEN_TOKENS]  # the last ones may yet become a character
        text = self._new_text(head)
        if text is None:
            text = self._decode(head[self._num_emitted :])
        del self._window[: self._num_emitted]
        self._num_emitted = len(self._window) - _MAX_OPEN_TOKENS
        self._emitted = None
        return text

    def _new_text(self, window: Sequence[int]) -> str | None:
        """The text that ``window`` adds to its emitted part; None if that part decodes differently.

        A decoder with byte fallback makes a whole run of bytes invalid if one of them is.
        """
        before = self._emitted
        if before is None:
            before = self._emitted = self._decode(window[: self._num_emitted])
        after = self._decoded = self._decode(window)
        if after.startswith(before):
            return after[len(before) :]
        # The new tokens may have completed a character that the old ones began.
        whole = before.rstrip(_REPLACEMENT)
        return after[len(whole) :] if after.startswith(whole) else None


def _context(decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> list[int]:
    """The last tokens of the prompt, from where a character begins."""
    sizes = range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_OPEN_TOKENS + 1)
    contexts = [list(prompt_ids[-size:]) for size in sizes]
    for context in contexts:
        if not decode(context).startswith(_REPLACEMENT):
            return context
    return contexts[0]
