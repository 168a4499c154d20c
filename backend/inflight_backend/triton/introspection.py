"""Answers requests for information: why a request waits, recent decisions, what is served.

Nothing here waits for the engine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from inflight_backend.errors import CapacityExceeded, ServingError, UnsupportedRequest
from inflight_backend.gguf_files import find_gguf
from inflight_backend.log import get_logger
from inflight_backend.manager.wait_reasons import NOT_IN_FLIGHT, PREPARING, describe_queued
from inflight_backend.models.checkpoint_files import find_file
from inflight_backend.requests.validation import RequestLimits, longest_text
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.text.tokenizer_files import TOKENIZER_CONFIG, read_json
from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton.live import LiveView, look_at_queue
from inflight_backend.triton.queue import RequestQueue
from inflight_backend.triton_io.sender import ResponseSender
from inflight_protocol import INPUT_BY_NAME

if TYPE_CHECKING:
    from inflight_backend.adapters.service import AdapterService
    from inflight_backend.manager.gpt_manager import GptManager

_logger = get_logger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files of a checkpoint that say how text becomes tokens and messages become text."""

_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"


class ModelInfo:
    """One JSON object: ``model`` (a name), the limits in tokens, ``end_id``, the
    ``stop_token_ids`` that end answers beside it, ``default_sampling``, the names of the
    configuration's ``inputs`` and of ``lora_adapters``, and ``files``.

    The limits are those of one request alone, whatever sets them: more is always refused.

    ``files`` maps the name of every file of `TOKENIZER_FILES`, or of a named chat template, that
    exists to its text, that of tokenizer.json to what `text.tokenizer` makes of it; a GGUF file
    stands for these two. No path of this machine is told. The files are read when first asked for;
    `CheckpointError` at once, and then, if one of them is a link that leaves the folder.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        limits: RequestLimits,
        codec: TextCodec | None,
        *,
        default_sampling: Mapping[str, float] = MappingProxyType({}),
        inputs: Set[str] = frozenset(INPUT_BY_NAME),
        adapters: AdapterService | None = None,
    ) -> None:
        """``inputs``: those of the model's configuration, which may be older than we are; the log
        says so where requests cannot send stop tokens."""
        self.default_sampling = default_sampling
        self._name = name
        self._folder = folder
        self._limits = limits
        self._codec = codec
        self._end_id = -1 if codec is None else codec.end_id
        self._stop_token_ids = () if codec is None else codec.more_end_ids
        if self._stop_token_ids and "stop_token_ids" not in inputs:
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
        self._inputs = sorted(inputs)
        self._adapters = adapters
        self._content: dict[str, Any] = {}
        self._paths()

    def to_json(self) -> str:
        """The description; ``OSError`` or ``ValueError`` if a file cannot be read as text."""
        if not self._content:
            longest = longest_text(self._limits)
            files = {name: p.read_text(encoding="utf-8") for name, p in self._paths().items()}
            if find_gguf(self._folder) is not None:
                content = read_json(self._folder, TOKENIZER_CONFIG)
                files[TOKENIZER_CONFIG] = json.dumps(content)
            if self._codec is not None and self._codec.changed_json is not None:
                files["tokenizer.json"] = self._codec.changed_json
            self._content = {
                "model": self._name,
                "max_input_len": self._limits.max_encoder_len
                or min(self._limits.max_input_len, longest),
                "start_ids": self._limits.start_ids if self._limits.max_encoder_len else None,
                "max_seq_len": longest,
                "max_draft_len": self._limits.max_draft_len,
                "vocab_size": self._limits.vocab_size,
                "end_id": self._end_id,
                "stop_token_ids": self._stop_token_ids,
                "default_sampling": dict(self.default_sampling),
                "inputs": self._inputs,
                "files": files,
            }
        names = [] if self._adapters is None else self._adapters.names
        return json.dumps({**self._content, "lora_adapters": names})

    def _paths(self) -> dict[str, Path]:
        named = (path.relative_to(self._folder) for path in self._folder.glob(_NAMED_TEMPLATES))
        names = [*TOKENIZER_FILES, *sorted(each.as_posix() for each in named)]
        found = {name: find_file(self._folder, name) for name in names}
        return {name: path for name, path in found.items() if path is not None}


MAX_OPEN = 1024
"""Requests for information that wait; more than come at once, unless something is stuck."""


_NO_RECORDING = "the recording could not be put together"
_NO_LIVE_VIEW = "the state of the server could not be put together"


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

    def answer_live(
        self,
        cursor: str,
        wants_blocks: bool,
        names: Callable[[], Mapping[int, str]],
        stream: ResponseSender,
    ) -> None:
        """Send what is in flight, and what has happened since ``cursor`` (see `live`).

        ``names``: the ids of requests, by number; called after the look from any thread, since a
        request that came meanwhile is told once.
        """
        self._open(stream)
        queued = partial(look_at_queue, self._queue, self._manager.why_queued)
        adapters = self._manager.adapters
        name_of = None if adapters is None else adapters.name_of

        def send(done: Future[LiveView]) -> None:
            text = done.result().to_json(names(), name_of)
            self._dispatcher.answer(stream, "live", text)

        def start(done: Future[LiveView]) -> None:
            run = partial(_or_fail, stream, _NO_LIVE_VIEW, partial(send, done))
            thread = threading.Thread(target=run, name="Live", daemon=True)
            _or_fail(stream, _NO_LIVE_VIEW, thread.start)

        look = partial(LiveView.of, look_at_queue=queued, cursor=cursor, wants_blocks=wants_blocks)
        self._manager.inspect(look).add_done_callback(start)

    def answer_adapters(self, name: str, folder: str, stream: ResponseSender) -> None:
        """Load the adapter ``name`` from ``folder``, or unload it without one; then send the names
        of all, and the labels of `LORA_REQUESTS`. `InvalidRequest` says what is wrong."""
        adapters = self._manager.adapters
        if adapters is None and (name or folder):
            raise UnsupportedRequest("LoRA feature is not enabled.")
        self._open(stream)

        def change() -> None:
            try:
                if adapters is not None and folder:
                    adapters.load(name, folder)
                elif adapters is not None and name:
                    adapters.unload(name)
            except ServingError as error:
                stream.fail(str(error), error.code)
                return
            names = [] if adapters is None else adapters.names
            labels = self._manager.adapter_labels()
            text = json.dumps({"lora_adapters": names, "lora_requests": labels})
            self._dispatcher.answer(stream, "description", text)

        run = partial(_or_fail, stream, "the adapter could not be changed", change)
        threading.Thread(target=run, name="Adapters", daemon=True).start()  # it reads files

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
