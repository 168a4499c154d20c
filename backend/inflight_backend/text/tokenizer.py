"""Text in, text out: the checkpoint's own tokenizer, and pieces of text as tokens arrive."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path

from inflight_backend.errors import CheckpointError, InvalidRequest
from inflight_backend.models.checkpoint_files import find_file
from inflight_backend.text.tokenizer_file import read_json, read_tokenizer, special_token

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
_MAX_WITHHELD_TOKENS = 8  # a character has at most 4 bytes, and a token at least one
_MAX_OPEN_TOKENS = 3  # tokens of a character that is not whole yet
_CONTEXT_TOKENS = 6  # tokens of the prompt a decoder looks at before the first new one
_MAX_EMITTED_TOKENS = 8  # more context costs more time in each decoding
_MAX_BYTES_PER_TOKEN = 128
_MAX_END_IDS = 64  # that a checkpoint may name


class TextCodec:
    """A tokenizer with the few facts the server needs. Thread-safe (tokenizers are)."""

    def __init__(self, folder: Path, checkpoint: Path | None = None) -> None:
        """The tokenizer in ``folder``, for the model in ``checkpoint`` if that is another folder.

        ``end_id`` ends answers, -1 for none, and so do ``more_end_ids``, which the model names
        beside it: a chat model may end its turn with one token and a text with another.
        ``changed_json`` is what tokenizer.json would have to say, where that is not what it says.
        """
        self._tokenizer, self.changed_json = read_tokenizer(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._id_to_special = {
            number: token.content for number, token in added.items() if token.special
        }
        self.end_id = self._find_id(folder, "eos")
        if self.end_id < 0 and checkpoint is not None:  # a folder of tokenizer.json alone
            self.end_id = self._find_id(checkpoint, "eos")
        ends = _read_end_ids(checkpoint or folder)
        self.more_end_ids = tuple(token for token in ends if token != self.end_id)
        pad_id = self._find_id(folder, "pad")
        self.pad_id = pad_id if pad_id < self.vocab_size else -1  # some name one that is not there

    @classmethod
    def load(cls, checkpoint: Path, tokenizer_dir: str | None) -> TextCodec | None:
        """The tokenizer of ``tokenizer_dir``, else the checkpoint's; None if it ships none."""
        if tokenizer_dir:
            return cls(Path(tokenizer_dir), checkpoint)
        return None if find_file(checkpoint, "tokenizer.json") is None else cls(checkpoint)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id the tokenizer can produce."""
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(vocab.values(), default=-1) + 1

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json would have it."""
        text: str = self._tokenizer.to_str()
        return text

    def check_fits(self, num_rows: int) -> None:
        """`CheckpointError` if the tokenizer can produce ids the model has no embedding for, or
        the checkpoint ends texts with such an id."""
        if self.vocab_size > num_rows:
            raise CheckpointError(
                f"the tokenizer has {self.vocab_size} tokens, the model's embedding "
                f"only {num_rows} rows: {self._way_out(num_rows)}"
            )
        if (end_id := max(self.end_id, *self.more_end_ids, -1)) >= num_rows:
            raise CheckpointError(
                f"the checkpoint's end id, {end_id}, is outside the model's embedding, "
                f"which has {num_rows} rows"
            )

    def _way_out(self, num_rows: int) -> str:
        """Some checkpoints add a token for padding that the model never got a row for."""
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        if max(vocab.values(), default=-1) >= num_rows:
            return "they do not belong together"
        added = self._tokenizer.get_added_tokens_decoder()
        first = min(number for number in added if number >= num_rows)
        return (
            "they do not belong together, unless you take what the model never had out of "
            f"added_tokens in tokenizer.json, from {added[first].content!r} (id {first}) on"
        )

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of a prompt, special tokens added as the checkpoint has it.

        Raises `InvalidRequest` for a text so long that it cannot fit ``max_tokens``.
        """
        if len(text) > max_tokens * _MAX_BYTES_PER_TOKEN:
            raise InvalidRequest(
                f"'text_input' has {len(text)} characters, "
                f"more than can fit max_input_len = {max_tokens} tokens"
            )
        return self.encode_raw(text, add_special_tokens=True)

    def encode_raw(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of any text, of any length."""
        # Only the batch call gives the interpreter lock back: a long text stops nobody's tokens.
        [encoding] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a word inside a text: nothing is added to it."""
        return self.encode_raw(text, add_special_tokens=False)

    def names_special(self, text: str, ids: Sequence[int]) -> bool:
        """True if ``text``, which is ``ids`` as tokens, names a special one: those have no text.

        That for unknown words, which stands in ``ids`` for what it does not name, does not count.
        """
        names = (self._id_to_special.get(number) for number in ids)
        return any(name is not None and name in text for name in names)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of some tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token as it stands behind another: with the space that it begins with.

        Special tokens have theirs; what is no whole character is U+FFFD.
        """
        # A decoder drops a space that a text begins with, so the token is made the second one.
        once = self.decode([token_id], skip_special_tokens=False)
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once

    def _find_id(self, folder: Path, kind: str) -> int:
        """The id of the tokenizer's ``eos_token`` (``kind`` eos), else of the model's."""
        token = special_token(folder, kind)
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        if token_id is not None:
            return int(token_id)
        for name in ("generation_config.json", "config.json"):
            value = read_json(folder, name).get(f"{kind}_token_id")
            if isinstance(value, list) and value:
                value = value[0]
            if isinstance(value, bool) or (isinstance(value, int) and value < -1):
                raise CheckpointError(
                    f"{name}: '{kind}_token_id' must be a token id, or -1 for none, "
                    f"not {json.dumps(value)}"
                )
            if isinstance(value, int):
                return value
        return -1


class IncrementalDetokenizer:
    """Turns a growing list of tokens into pieces of text whose sum is the text of the answer.

    A token by itself has no text: it may be part of a character, or its leading space may depend
    on what stands before it. So a window of tokens is decoded without and with the new ones, and
    the difference is emitted once it ends in a whole character. The window starts with the last
    tokens of the prompt, which are never emitted. It grows to `_MAX_EMITTED_TOKENS` before it moves
    on, so that what was decoded with the new tokens last time is what comes without them this time.
    """

    def __init__(
        self, codec: TextCodec, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decode = partial(codec.decode, skip_special_tokens=skip_special_tokens)
        self._window = _context(self._decode, prompt_ids)
        self._num_emitted = len(self._window)
        self._emitted: str | None = None  # text of the emitted part, if that was decoded before
        self._decoded = ""  # text of the whole window, last time

    def fork(self) -> IncrementalDetokenizer:
        """Another one that goes on from here."""
        twin = copy(self)
        twin._window = self._window.copy()
        return twin

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became certain, possibly none."""
        if len(ids) == 1:
            self._window.append(ids[0])
            return self._take()
        parts = [
            ids[i : i + _MAX_WITHHELD_TOKENS] for i in range(0, len(ids), _MAX_WITHHELD_TOKENS)
        ]
        return "".join(map(self._push_some, parts))

    def _push_some(self, ids: Sequence[int]) -> str:
        num_before = len(self._window)
        self._window += ids
        piece = self._new_text(self._window)
        if piece and not piece.endswith(_REPLACEMENT):
            self._move_on()
            return piece
        del self._window[num_before:]  # not all of it is certain: which part is?
        return "".join([self.push((token,)) for token in ids])

    def finish(self) -> str:
        """What is left at the end; half a character is left out."""
        num_new = len(self._window) - self._num_emitted
        if num_new == 0:
            return ""
        piece = self._new_text(self._window)
        text = self._decode(self._window[-num_new:]) if piece is None else piece
        self._move_on()
        return text.rstrip(_REPLACEMENT)

    def _take(self) -> str:
        """The text that is certain now; moves the window on."""
        piece = self._new_text(self._window)
        if piece and not piece.endswith(_REPLACEMENT):
            self._move_on()
            return piece
        num_new = len(self._window) - self._num_emitted
        return "" if num_new < _MAX_WITHHELD_TOKENS else self._give_up(piece)

    def _move_on(self) -> None:
        """All of the window was emitted; it keeps what was last, which begins with a character."""
        if len(self._window) > _MAX_EMITTED_TOKENS:
            del self._window[: self._num_emitted]
            self._emitted = None
        else:
            self._emitted = self._decoded
        self._num_emitted = len(self._window)

    def _give_up(self, piece: str | None) -> str:
        """So many tokens are no half character: say what they are and go on."""
        if piece == "":  # special tokens: they have no text, and the next one's space depends on
            del self._window[self._num_emitted :]  # what stands before them
            return ""
        head = self._window[:-_MAX_OPEN_TOKENS]  # the last ones may yet become a character
        text = self._new_text(head)
        if text is None:
            text = self._decode(head[self._num_emitted :])
        del self._window[: self._num_emitted]
        self._num_emitted = len(self._window) - _MAX_OPEN_TOKENS
        self._emitted = None
        return text

    def _new_text(self, window: Sequence[int]) -> str | None:
        """What ``window`` adds to its emitted part; None if the decoder reads that anew.

        A decoder with byte fallback makes a whole run of bytes invalid if one of them is.
        """
        before = self._emitted
        if before is None:
            before = self._emitted = self._decode(window[: self._num_emitted])
        after = self._decoded = self._decode(window)
        if after.startswith(before):
            return after[len(before) :]
        # The new tokens may have completed a character that the old ones had begun.
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


def _read_end_ids(folder: Path) -> list[int]:
    """All that the model in ``folder`` ends texts with, sorted; -1 stands for none.

    As for `transformers`, generation_config.json says it, else config.json.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder, name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if len(ids) > _MAX_END_IDS:
            raise CheckpointError(
                f"{name}: 'eos_token_id' holds {len(ids)} ids, more than {_MAX_END_IDS}"
            )
        wrong = [each for each in ids if type(each) is not int or each < -1]
        if wrong:
            raise CheckpointError(
                f"{name}: 'eos_token_id' must be a token id, -1 for none, or a list of these, "
                f"not {json.dumps(value)[:200]}"
            )
        return sorted(set(ids) - {-1})
    return []
