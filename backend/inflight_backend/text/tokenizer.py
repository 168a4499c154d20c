"""The checkpoint's tokenizer: tokenizer.json or another file, and the files that add to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from inflight_backend.errors import CheckpointError, InvalidRequest
from inflight_backend.gguf_files import SUFFIX, open_gguf
from inflight_backend.models.checkpoint_files import is_lfs_pointer
from inflight_backend.text.tokenizer_files import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    find_tokenizer,
    no_tokenizer,
    read_json,
    special_token,
)

_ENDING_CLASSES = ("T5Tokenizer", "MT5Tokenizer")  # texts end with eos_token, whatever files say
_OBEYING_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer")  # and with Fast behind it
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def read_tokenizer(folder: Path) -> tuple[Tokenizer, str | None]:
    """The tokenizer in ``folder``, and its JSON where that is not the file tokenizer.json.

    * It cuts and pads nothing, though the file may say so: training leaves its limits there.
    * For tokenizers that call themselves Llama's, ``add_bos_token`` and ``add_eos_token`` of
      tokenizer_config.json count, not the file: that of DeepSeek-R1-Distill adds nothing by itself.
      So it is with TensorRT-LLM's clients, that is with transformers 4; 5 leaves the keys unread.
    * They count as well where there is no tokenizer.json, but another file (`conversion`), or a
      GGUF file (`gguf_tokenizer`).

    `CheckpointError` if there is none, or none that can be read.
    """
    path = find_tokenizer(folder)
    if path is None:
        raise no_tokenizer(folder)
    if is_lfs_pointer(path):
        raise CheckpointError(f"{path.name}: a pointer of Git LFS, not the file; run git lfs pull")
    if path.name != TOKENIZER:
        text = _convert(path, folder, _changes(path.parent))
        return Tokenizer.from_str(text), text
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise CheckpointError(f"{path.name} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, tokenizer.to_str() if _set_ends(tokenizer, folder) else None


def _changes(folder: Path) -> tuple[tuple[str, int], ...]:
    """The files of ``folder``, and when each was changed last."""
    return tuple(sorted((each.name, each.stat().st_mtime_ns) for each in folder.iterdir()))


@lru_cache(maxsize=1)  # the model and its guides have a tokenizer each, and this takes seconds
def _convert(path: Path, folder: Path, _: tuple[tuple[str, int], ...]) -> str:
    """The JSON of the tokenizer in another file."""
    from inflight_backend.text.conversion import convert
    from inflight_backend.text.gguf_tokenizer import convert_gguf

    config = read_json(folder, TOKENIZER_CONFIG)
    try:
        special = _special_texts(folder, config)
        if path.suffix == SUFFIX:
            found = convert_gguf(open_gguf(path))
        else:
            found = convert(path, config, _added_tokens(folder, config, special), special)
    except CheckpointError:
        raise
    except Exception as error:  # ours, or of the library, which raises bare Exception
        raise CheckpointError(f"{path.name} cannot be read: {error}") from None
    tokens = {**found.ends, **config}
    adds_eos = str(config.get("tokenizer_class")).startswith(_ENDING_CLASSES)
    _put_ends(found.tokenizer, folder, tokens, {"bos": found.adds_bos, "eos": adds_eos})
    text: str = found.tokenizer.to_str()
    return text


def _added_tokens(
    folder: Path, config: Mapping[str, Any], special: Collection[str]
) -> dict[int, AddedToken]:
    """The tokens by id that tokenizer_config.json and added_tokens.json add to a vocabulary."""
    found = {
        number: AddedToken(text, normalized=False, special=text in special)
        for text, number in read_json(folder, "added_tokens.json").items()
        if type(number) is int
    }
    entries = config.get("added_tokens_decoder")
    for number, entry in entries.items() if isinstance(entries, dict) else ():
        if str(number).isdecimal() and isinstance(entry, dict):
            flags = {name: bool(entry.get(name, False)) for name in _FLAGS}
            found[int(number)] = AddedToken(str(entry.get("content")), **flags)
    return found


def _special_texts(folder: Path, config: Mapping[str, Any]) -> set[str]:
    """The tokens that tokenizer_config.json and special_tokens_map.json name for some purpose."""
    found: set[str] = set()
    for content in (config, read_json(folder, "special_tokens_map.json")):
        for key, value in content.items():
            if key.endswith(("_token", "_special_tokens")):
                for each in value if isinstance(value, list) else [value]:
                    found.add(str(each.get("content") if isinstance(each, dict) else each))
    return found


def _set_ends(tokenizer: Tokenizer, folder: Path) -> bool:
    """Let texts begin and end as tokenizer_config.json says; True if the file says otherwise."""
    config = read_json(folder, TOKENIZER_CONFIG)
    is_llama = str(config.get("tokenizer_class")).startswith(_OBEYING_CLASSES)
    if not (is_llama and ("add_bos_token" in config or "add_eos_token" in config)):
        return False
    # Beside add_eos_token alone a text begins with the token.
    return _put_ends(tokenizer, folder, config, {"bos": True, "eos": False})


def _put_ends(
    tokenizer: Tokenizer, folder: Path, config: Mapping[str, object], defaults: Mapping[str, bool]
) -> bool:
    """Let texts begin and end as ``add_bos_token`` and ``add_eos_token`` of ``config`` say, else
    as ``defaults`` do; False if they do already."""
    template = ["$A"]
    special: list[dict[str, Any]] = []
    for kind, default in defaults.items():
        if not config.get(f"add_{kind}_token", default):
            continue
        if (token := _end_token(tokenizer, folder, config, kind)) is not None:
            template.insert(0 if kind == "bos" else 2, kind)
            special.append({"id": kind, "ids": [token[1]], "tokens": [token[0]]})
    if tokenizer.encode("").ids == [number for each in special for number in each["ids"]]:
        return False
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    return True


def _end_token(
    tokenizer: Tokenizer, folder: Path, config: Mapping[str, object], kind: str
) -> tuple[str, int] | None:
    """The text and id of ``bos_token`` (``kind`` bos) or ``eos_token``; None if it is not told."""
    told = config.get(f"{kind}_token")
    text = special_token(folder, kind) or (told if isinstance(told, str) else None)
    if text is None:
        return None
    number = tokenizer.token_to_id(text)
    if number is None:
        raise CheckpointError(
            f"{TOKENIZER_CONFIG}: add_{kind}_token is true, and the tokenizer has no {text!r}, "
            f"the {kind}_token"
        )
    return text, int(number)


_MAX_BYTES_PER_TOKEN = 128
_MAX_END_IDS = 64  # that a checkpoint may name


class TextCodec:
    """A tokenizer with the few facts the server needs. Thread-safe (tokenizers are)."""

    def __init__(self, folder: Path, checkpoint: Path | None = None) -> None:
        """The tokenizer in ``folder``, for the model in ``checkpoint`` if that is another folder.

        ``end_id`` ends answers, -1 for none, and so do ``more_end_ids``, which the model names
        beside it: a chat model may end its turn with one token and a text with another.
        ``changed_json`` is the tokenizer as JSON where that differs from tokenizer.json.
        """
        self._tokenizer, self.changed_json = read_tokenizer(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._id_to_special = {
            number: token.content for number, token in added.items() if token.special
        }
        self.end_id = self._find_id(folder, "eos")
        if self.end_id < 0 and checkpoint is not None:  # a folder of tokenizer.json alone
            self.end_id = self._find_id(checkpoint, "eos")
        ends = set(_read_ids(checkpoint or folder, "eos"))
        self.more_end_ids = tuple(sorted(ends - {self.end_id, -1}))
        pad_id = self._find_id(folder, "pad")
        self.pad_id = pad_id if pad_id < self.vocab_size else -1  # some name one that is not there

    @classmethod
    def load(cls, checkpoint: Path, tokenizer_dir: str | None) -> TextCodec | None:
        """The tokenizer of ``tokenizer_dir``, else the checkpoint's; None if it ships none."""
        if tokenizer_dir:
            return cls(Path(tokenizer_dir), checkpoint)
        return None if find_tokenizer(checkpoint) is None else cls(checkpoint)

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
        # Only the batch call releases the interpreter lock, so a long text delays no other request.
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

        The token for unknown words does not count: ``ids`` has it for words that do not name it.
        """
        names = (self._id_to_special.get(number) for number in ids)
        return any(name is not None and name in text for name in names)

    def special_text(self, token_id: int) -> str:
        """The name of a special token; "" for any other."""
        return self._id_to_special.get(token_id, "")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of some tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decoder(self, *, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
        """`decode` for every token of a stream: nothing in Python lies between."""
        return partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token as it stands behind another: with the space that it begins with.

        Special tokens have theirs; bytes that are no whole character are U+FFFD.
        """
        # A decoder drops a space that a text begins with, so the token is made the second one.
        once = self.decode([token_id], skip_special_tokens=False)
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once

    def _find_id(self, folder: Path, kind: str) -> int:
        """The id of the tokenizer's ``eos_token`` (``kind`` eos), else of the model's; -1: none."""
        token = special_token(folder, kind)
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        if token_id is not None:
            return int(token_id)
        return next(iter(_read_ids(folder, kind)), -1)


def _read_ids(folder: Path, kind: str) -> list[int]:
    """The ids of ``eos_token_id`` (``kind`` eos) of the model in ``folder``; -1 stands for none.

    As for `transformers`, generation_config.json says it, else config.json.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder, name).get(f"{kind}_token_id")
        if value is None or value == []:
            continue
        ids: list[Any] = value if isinstance(value, list) else [value]
        if len(ids) > _MAX_END_IDS:
            raise CheckpointError(
                f"{name}: '{kind}_token_id' holds {len(ids)} ids, more than {_MAX_END_IDS}"
            )
        if any(type(each) is not int or each < -1 for each in ids):
            raise CheckpointError(
                f"{name}: '{kind}_token_id' must be a token id, -1 for none, or a list of these, "
                f"not {json.dumps(value)[:200]}"
            )
        return ids
    return []
