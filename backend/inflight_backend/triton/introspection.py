"""Answers requests for information: why a request waits, recent decisions, what is served.

Nothing here waits for the engine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight_backend.errors import CapacityExceeded
from inflight_backend.log import get_logger
from inflight_backend.manager.wait_reasons import NOT_IN_FLIGHT, PREPARING, describe_queued
from inflight_backend.models.checkpoint_files import find_file
from inflight_backend.requests.validation import RequestLimits, longest_text
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton.queue import RequestQueue
from inflight_backend.triton_io.sender import ResponseSender

if TYPE_CHECKING:
    from inflight_backend.manager.gpt_manager import GptManager

_logger = get_logger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""The files of a checkpoint that say how text becomes tokens and messages become text."""


class ModelInfo:
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
        """``takes_stop_tokens`` False: requests cannot send any; the log says so."""
        self._name = name
        self._folder = folder
        self._limits = limits
        self._codec = codec
        self._end_id = -1 if codec is None else codec.end_id
        self._stop_token_ids = () if codec is None else codec.more_end_ids
        if self._stop_token_ids and not takes_stop_tokens:
            _logger.warning(
                "config.pbtxt of this model is of an older version, without the input "
                "stop_token_ids: `inflight openai` and others that send token ids can end answers "
                "at %d alone, not at %s, where the checkpoint %s ends them as well; write it again "
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
            if self._codec is not None and self._codec.changed_json is not None:
                files["tokenizer.json"] = self._codec.changed_json
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


MAX_OPEN = 1024
"""Requests for information that wait; more than come at once, unless something is stuck."""


_NO_RECORDING = "the recording could not be put together"


class Introspection:
    """Answers on the thread of the dispatcher; a recording is put together on one of its own."""

    def __init__(
        self,
        manager: GptManager,
        queue: RequestQueue,
        dispatcher: ResponseDispatcher,
        model_info: ModelInfo,
    ) -> None:
        self._manager = manager
        self._model_info = model_info
        self._queue = queue
        self._dispatcher = dispatcher
        self._recording_for: ResponseSender | None = None  # until it is sent: it may be long
        self._waiting: set[ResponseSender] = set()  # for the loop or the dispatcher
        self._waiting_lock = threading.Lock()

    def answer_why(self, numbers: Sequence[int], stream: ResponseSender) -> None:
        """Send why the request with these sequences waits; without any it is not in flight.

        The answer is about the first sequence that has not ended.
        """
        self._open(stream)
        num_before, queued = self._find_queued(numbers)
        if num_before == 0:
            self._dispatcher.answer(stream, "why", json.dumps(queued))
            return

        def send(done: Future[dict[str, Any]]) -> None:
            answer = done.result()
            if answer is NOT_IN_FLIGHT:
                answer = queued
            else:
                answer = answer | _which(numbers.index(answer["request"]), numbers)
            self._dispatcher.answer(stream, "why", json.dumps(answer))

        self._manager.why(*numbers[:num_before]).add_done_callback(
            lambda done: _or_fail(stream, "the request could not be explained", partial(send, done))
        )

    def answer_description(self, stream: ResponseSender) -> None:
        """Send what is served."""
        self._open(stream)
        self._dispatcher.answer(stream, "description", self._model_info.to_json())

    def answer_recording(self, stream: ResponseSender) -> None:
        """Send the recording; `CapacityExceeded` while another one is put together."""
        self._open(stream, is_recording=True)

        def send(lines: Future[Iterator[str]]) -> None:
            self._dispatcher.answer(stream, "recording", "".join(lines.result()))

        def start(done: Future[Iterator[str]]) -> None:
            run = partial(_or_fail, stream, _NO_RECORDING, partial(send, done))
            thread = threading.Thread(target=run, name="Recording", daemon=True)
            _or_fail(stream, _NO_RECORDING, thread.start)

        self._manager.recording().add_done_callback(start)

    def fail_all(self, message: str) -> None:
        """End every question without an answer with an error: the loop or the dispatcher does not
        move. Never raises."""
        with self._waiting_lock:
            waiting = list(self._waiting)
        for stream in waiting:
            stream.abort(message)

    def _open(self, stream: ResponseSender, *, is_recording: bool = False) -> None:
        """Have `fail_all` end ``stream`` until it ends; `CapacityExceeded` while nothing moves, or
        if very many wait already, or another one for a recording."""
        stream.on_final(lambda: self._forget(stream))  # before others may end it
        with self._waiting_lock:
            if len(self._waiting) >= MAX_OPEN:
                raise CapacityExceeded(
                    f"{MAX_OPEN} questions wait for an answer, which is the limit; try again later"
                )
            if is_recording:
                if self._recording_for is not None:
                    raise CapacityExceeded(
                        "another recording is being put together; try again later"
                    )
                self._recording_for = stream
            self._waiting.add(stream)
        if refusal := self._queue.refusal:  # after the other, since `fail_all` comes after it
            raise CapacityExceeded(refusal)

    def _forget(self, stream: ResponseSender) -> None:
        with self._waiting_lock:
            self._waiting.discard(stream)
            if self._recording_for is stream:
                self._recording_for = None

    def _find_queued(self, numbers: Sequence[int]) -> tuple[int, dict[str, Any]]:
        """The index of the first sequence in the queue, and the answer about it.

        Without active ones, the number of sequences and that they have ended.
        """
        for index, number in enumerate(numbers):
            place = self._queue.find_place(number)
            if place is not None:
                is_preparing = self._queue.is_preparing(number)
                reason = PREPARING if is_preparing else self._manager.why_queued()
                return index, describe_queued(*place, reason) | _which(index, numbers)
        return len(numbers), NOT_IN_FLIGHT


def _which(index: int, numbers: Sequence[int]) -> dict[str, int]:
    """Which of several sequences an answer is about, from 1."""
    if len(numbers) == 1:
        return {}
    return {"sequence": index + 1, "num_sequences": len(numbers)}


def _or_fail(stream: ResponseSender, message: str, action: Callable[[], None]) -> None:
    """End ``stream`` with an error if ``action`` raises: callbacks and threads have nobody else to
    tell."""
    try:
        action()
    except BaseException:
        _logger.exception(message)
        stream.fail(message)
