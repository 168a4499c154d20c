"""What a front needs to know of the model to stand in for it: its limits, and how text is read."""

from __future__ import annotations

import json
from pathlib import Path

from inflight_backend.models.checkpoint_files import find_file
from inflight_backend.private_log import get_logger
from inflight_backend.requests.request_validation import RequestLimits, longest_text
from inflight_backend.text.tokenizer import TextCodec

_logger = get_logger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""The files of a checkpoint that say how text becomes tokens and messages become text."""


class ModelDescription:
    """One JSON object: ``model`` (a name), the limits in tokens, ``end_id``, the
    ``stop_token_ids`` that end answers beside it, and ``files``.

    The limits are those of one request alone, whatever sets them: more is always refused.

    ``files`` maps the name of every file of `TOKENIZER_FILES` that exists to its text, that of
    tokenizer.json to what `text.tokenizer_file` makes of it. No path of this machine is told. The
    files are read when first asked for; `CheckpointError` at once, and then, if one of them is a
    link that leaves the folder.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        limits: RequestLimits,
        codec: TextCodec | None,
        *,
        takes_stop_tokens: bool = True,
    ) -> None:
        """``takes_stop_tokens`` False: nobody can send any; none are told, and the log says so."""
        self._name = name
        self._folder = folder
        self._limits = limits
        self._end_id = -1 if codec is None else codec.end_id
        self._stop_token_ids = () if codec is None else codec.more_end_ids
        self._tokenizer_json = None if codec is None else codec.changed_json
        if self._stop_token_ids and not takes_stop_tokens:
            _logger.warning(
                "config.pbtxt of this model is of an older version, without the input "
                "stop_token_ids: `inflight openai` and others that send token ids can end answers "
                "at %d alone, not at %s, where the checkpoint %s ends them as well; write it anew "
                "with `inflight model-repository --force`",
                self._end_id,
                list(self._stop_token_ids),
                name,
            )
            self._stop_token_ids = ()
        self._text = ""
        self._paths()

    def to_json(self) -> str:
        """The description; ``OSError`` or ``ValueError`` if a file cannot be read as text."""
        if not self._text:
            longest = longest_text(self._limits)
            files = {p.name: p.read_text(encoding="utf-8") for p in self._paths()}
            if self._tokenizer_json is not None:
                files["tokenizer.json"] = self._tokenizer_json
            content = {
                "model": self._name,
                "max_input_len": min(self._limits.max_input_len, longest),
                "max_seq_len": longest,
                "vocab_size": self._limits.vocab_size,
                "end_id": self._end_id,
                "stop_token_ids": self._stop_token_ids,
                "files": files,
            }
            self._text = json.dumps(content)
        return self._text

    def _paths(self) -> list[Path]:
        found = (find_file(self._folder, name) for name in TOKENIZER_FILES)
        return [path for path in found if path is not None]
