"""The answer to one request in the form its client asked for: tokens, cut at a stop word, or all
beams of a search from their beginning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from inflight_backend.requests.inference_request import Array
from inflight_backend.requests.tensors import (
    INT32,
    OBJECT,
    finish_reason_tensor,
    number_tensor,
    row,
    scalar,
)
from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.triton_io.sender import ResponseSender
from inflight_backend.triton_io.stop_text import StopText, StopTokens
from inflight_scheduler import FinishReason

_TOKEN_AXIS = 2
_COUNT = "num_output_tokens"  # of the tokens of one response
_PER_TOKEN = frozenset(  # [1, beam, tokens, ...]
    {
        "output_log_probs",
        "output_log_prob_ranks",
        "generation_logits",
        "top_log_probs",
        "top_log_prob_ids",
    }
)


class TokenExtras:
    """What comes with several responses: rows of tokens are joined, numbers of tokens are added, of
    all others the last value counts.

    ``last`` is the latter two, by name; of rows it has what came first.
    """

    __slots__ = ("_rows", "last")

    def __init__(self) -> None:
        self.last: dict[str, Array] = {}
        self._rows: dict[str, list[Array]] | None = None  # of those that came more than once

    def add(self, name: str, tensor: Array) -> None:
        """What the next response says in tensor ``name``."""
        if name not in self.last or name not in _PER_TOKEN:
            is_more = name == _COUNT and name in self.last
            self.last[name] = self.last[name] + tensor if is_more else tensor
            return
        if self._rows is None:
            self._rows = {}
        self._rows.setdefault(name, [self.last[name]]).append(tensor)

    def joined(self) -> dict[str, Array]:
        """All of it, by name; O(tokens)."""
        if self._rows is None:
            return self.last
        return self.last | {name: _joined(parts) for name, parts in self._rows.items()}


def _joined(parts: Sequence[Array]) -> Array:
    filled = [part for part in parts if part.shape[_TOKEN_AXIS]]
    return np.concatenate(filled, axis=_TOKEN_AXIS) if filled else parts[-1]


def without_last(extras: Mapping[str, Array], num_tokens: int) -> dict[str, Array]:
    """``extras`` as if the last ``num_tokens`` of their tokens had not been drawn."""
    if num_tokens == 0:
        return dict(extras)
    kept = dict(extras)
    if "cum_log_probs" in extras:
        dropped = extras["output_log_probs"][:, :, -num_tokens:]
        kept["cum_log_probs"] = extras["cum_log_probs"] - dropped.sum(axis=_TOKEN_AXIS)
    if _COUNT in extras:
        kept[_COUNT] = extras[_COUNT] - np.int32(num_tokens)
    for name in _PER_TOKEN & extras.keys():
        kept[name] = extras[name][:, :, :-num_tokens]
    return kept


def after_the_end(extras: Mapping[str, Array], last: Mapping[str, Array]) -> dict[str, Array]:
    """``extras`` of tokens that do not belong to the answer; ``last``: those at its end."""
    kept = dict(extras)
    if "cum_log_probs" in last:
        kept["cum_log_probs"] = last["cum_log_probs"]
    if _COUNT in extras:
        kept[_COUNT] = np.zeros_like(extras[_COUNT])
    for name in _PER_TOKEN & kept.keys():
        kept[name] = kept[name][:, :, :0]
    return kept


@dataclass(frozen=True, slots=True)
class Zeros:
    """The tensors ``names`` of a request that asked for none of them, as the peer sends them.

    Its clients up to v0.13 name no outputs, and read these in the last response all the same.
    ``num_prompt_ids``: how many of the ids of that response are the prompt's.
    """

    names: frozenset[str]
    num_prompt_ids: int = 0

    def tensors(self, num_beams: int, num_ids: int) -> dict[str, Array]:
        """Zeros of ``num_beams`` answers, of which the longest has ``num_ids`` with its prompt; of
        logits one number."""
        shapes = {
            "cum_log_probs": (1, num_beams),
            "output_log_probs": (1, num_beams, max(num_ids - self.num_prompt_ids, 0)),
            "context_logits": (1, 1, 1),
            "generation_logits": (1, 1, 1, 1),
        }
        return {
            name: np.zeros(shape, dtype=np.float32)
            for name, shape in shapes.items()
            if name in self.names
        }


@dataclass(slots=True)
class TextWriter:
    """Makes text of tokens.

    ``prefix`` is the prompt, for an answer that includes it, and ``num_prompt_ids`` how many of the
    first ids are the prompt's. Stop words are left out: ``stop_tokens`` as tokens, ``stop_text`` as
    text. Where one of each ends with the same token that of tokens counts, unless
    ``prefers_text``.
    """

    detokenizer: IncrementalDetokenizer
    prefix: str = ""
    num_prompt_ids: int = 0
    stop_tokens: StopTokens | None = None
    stop_text: StopText | None = None
    prefers_text: bool = False

    @property
    def is_stopped(self) -> bool:
        """True once a stop word was found in the text."""
        return self.stop_text is not None and self.stop_text.is_hit

    def write(self, ids: Sequence[int], is_final: bool) -> tuple[str, int]:
        """Text that the next ``ids`` make certain, and how many of them belong to the answer."""
        prefix, self.prefix = self.prefix, ""
        skipped, self.num_prompt_ids = self.num_prompt_ids, 0
        new_ids: Sequence[int] = ids[skipped:]
        held: Sequence[int] = ()
        num_held_before = 0
        if self.stop_tokens is not None:
            num_held_before = len(self.stop_tokens.held)
            new_ids = self.stop_tokens.push(new_ids, is_final=is_final)
            held = self.stop_tokens.held
        if self.stop_text is None:
            text = self.detokenizer.push(new_ids)
            if is_final:
                text += self.detokenizer.finish()
            return prefix + text, len(ids)
        ahead = held[:-1] if is_final and not self.prefers_text else held
        text, num_used = self._write_until_stop(self.stop_text, new_ids, ahead, is_final)
        num_used -= num_held_before  # in which there was no stop word, as the last call has seen
        return prefix + text, skipped + num_used if self.is_stopped else len(ids)

    def _write_until_stop(
        self, stop: StopText, ids: Sequence[int], ahead: Sequence[int], is_final: bool
    ) -> tuple[str, int]:
        """The text before a stop word, and how many of the tokens it took to complete that.

        ``ahead``: tokens that were drawn after ``ids``, and are text only if that stops in them.
        """
        tokens = [*ids, *ahead]
        before = (self.detokenizer.fork(), stop.fork()) if len(tokens) > 1 else None
        text = stop.push(self.detokenizer.push(ids), is_final=False)
        if ahead and not stop.is_hit:
            looking = stop.fork()
            more = looking.push(self.detokenizer.fork().push(ahead), is_final=False)
            if looking.is_hit:
                self.stop_text = stop = looking
                text += more
        if not stop.is_hit:
            if is_final:
                text += stop.push(self.detokenizer.finish(), is_final=True)
            return text, len(ids)
        num_used = len(tokens)
        if before is not None:  # once more, token by token: which one was it?
            detokenizer, again = before
            num_used = 0
            while not again.is_hit and num_used < len(tokens):
                again.push(detokenizer.push(tokens[num_used : num_used + 1]), is_final=False)
                num_used += 1
        return text, num_used


@dataclass(slots=True, eq=False)
class AnswerStream(ABC):
    """The way back of one request, or of one sequence of it; of the dispatcher's thread.

    ``outputs`` are the names of the tensors to send, ``final_outputs`` of more that go with the
    last response. ``constants`` go with every response, ``zeros`` with the last one.
    ``num_left_out``: tokens so far that were drawn behind a stop word. ``repeats_all``: each
    response says all that is known, so that one replaces those before it.

    Sequences of one Triton request share its ``stream``, which ends with the last of them, and
    ``open_``, those that have not ended; ``stop_all`` stops them when one has failed.
    """

    repeats_all: ClassVar[bool] = False

    stream: ResponseSender
    outputs: frozenset[str]
    final_outputs: frozenset[str] = frozenset()
    constants: Mapping[str, Array] = field(default_factory=dict)
    zeros: Zeros | None = None
    num_left_out: int = 0
    open_: set[AnswerStream] = field(default_factory=set)
    stop_all: Callable[[], None] = lambda: None

    def set_index(self, name: str, index: int, *, is_asked: bool) -> None:
        """Which row of its request this is, or which sequence of that: ``name`` is the output.

        ``is_asked``: say so in every response.
        """
        self.constants = {**self.constants, name: number_tensor(index)}
        if is_asked:
            self.outputs |= {name}

    def send(self, ids: Sequence[int], extras: Mapping[str, Array]) -> bool:
        """Send what is new since the last call as one response, which is not the last.

        True: the text has come to a stop word just now, and the request should be stopped.
        """
        tensors, is_hit = self._make(ids, extras, False)
        if tensors is not None:
            self.stream.send(tensors, is_final=False)
        return is_hit

    def make_last(self, ids: Sequence[int], extras: Mapping[str, Array]) -> dict[str, Array]:
        """The last response, for a caller that must act before it is sent."""
        tensors, _ = self._make(ids, extras, True)
        assert tensors is not None, "the last one always says something"
        return tensors

    def finish(self, tensors: dict[str, Array]) -> None:
        """Send the last response, and with that of the last sequence the end."""
        self.stream.send(tensors, is_final=self._is_last())

    def finish_with_error(self, message: str, code: str) -> None:
        """End this sequence, and the stream with an error once all others have ended."""
        self.fail(message, code)
        if self._is_last():
            self.stream.send_error(message, code)

    def fail(self, message: str, code: str = "INTERNAL") -> None:
        """Stop all sequences; the end of the last one is this error."""
        self.stream.end_with(message, code)
        self.stop_all()

    def abandon(self, message: str) -> None:
        """After an end that could not be sent: end this sequence and stop the others; never
        raise."""
        self.fail(message)
        if self._is_last():
            self.stream.abandon(message)

    def _is_last(self) -> bool:
        """End this sequence; true if all have ended."""
        self.open_.discard(self)
        return not self.open_

    @abstractmethod
    def _make(
        self, ids: Sequence[int], extras: Mapping[str, Array], is_final: bool
    ) -> tuple[dict[str, Array] | None, bool]:
        """The response, None if there is nothing to say yet, and whether to stop the request."""


@dataclass(slots=True, eq=False)
class TokenStream(AnswerStream):
    """The tokens of one sequence.

    ``text`` is set when text is among the outputs. ``is_whole``: one response with everything,
    although the tokens come one by one; ``ids`` then begin with the prompt if it is part of the
    answer.
    """

    text: TextWriter | None = None
    is_whole: bool = False
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    extras: TokenExtras = field(default_factory=TokenExtras)
    is_stopped: bool = False

    def _make(
        self, ids: Sequence[int], extras: Mapping[str, Array], is_final: bool
    ) -> tuple[dict[str, Array] | None, bool]:
        was_stopped, text = self.is_stopped, ""
        if was_stopped:  # these were generated before the stop could be heard
            self.num_left_out += len(ids)
            ids, extras = (), after_the_end(extras, self.extras.last)
        elif self.text is not None:
            text, num_ids = self.text.write(ids, is_final)
            self.is_stopped = self.text.is_stopped
            if self.is_stopped:
                self.num_left_out += len(ids) - num_ids
                extras = without_last(extras, len(ids) - num_ids)
                ids = ids[:num_ids]
        if self.is_whole or self.is_stopped:
            for name, tensor in extras.items():
                self.extras.add(name, tensor)
        is_hit = self.is_stopped and not was_stopped and not is_final
        if self.is_whole:
            self.ids.extend(ids)
            self.texts.append(text)
            if not is_final:
                return None, is_hit
            ids, text, extras = self.ids, "".join(self.texts), self.extras.joined()
        tensors = self._tensors(ids, text, extras, is_final)
        # A stream of text alone has nothing to say while a token completes no character.
        says_nothing = tensors.keys() - self.constants.keys() == {"text_output"} and not text
        return (None if says_nothing and not is_final else tensors), is_hit

    def _tensors(
        self, ids: Sequence[int], text: str, extras: Mapping[str, Array], is_final: bool
    ) -> dict[str, Array]:
        tensors: dict[str, Array] = {}
        outputs = self.outputs | self.final_outputs if is_final else self.outputs
        if "output_ids" in self.outputs:
            tensors["output_ids"] = row(ids, INT32)
        if "sequence_length" in self.outputs:
            tensors["sequence_length"] = number_tensor(len(ids))
        if "text_output" in self.outputs:
            tensors["text_output"] = scalar(text.encode(), OBJECT)[0]
        if "finish_reason" in outputs:
            tensors["finish_reason"] = self._finish_reason(extras, is_final)
        for name, tensor in extras.items():
            if name in outputs and name != "finish_reason":
                tensors[name] = tensor
        for name, tensor in self.constants.items():
            if name in outputs:
                tensors[name] = tensor
        if is_final and self.zeros is not None:
            tensors |= self.zeros.tensors(1, len(ids))
        return tensors

    def _finish_reason(self, extras: Mapping[str, Array], is_final: bool) -> Array:
        if is_final and self.is_stopped:
            return finish_reason_tensor(FinishReason.STOP_WORDS)
        return extras.get("finish_reason", finish_reason_tensor(FinishReason.NOT_FINISHED))


@dataclass(slots=True, eq=False)
class BeamStream(AnswerStream):
    """All beams of one request in each response; nothing is put together.

    ``make_writer`` is set when text is among the outputs: each beam of each response is written
    from its beginning. Words that end an answer are found by the search.
    """

    repeats_all: ClassVar[bool] = True

    make_writer: Callable[[], TextWriter] | None = None

    def _make(
        self, ids: Sequence[int], extras: Mapping[str, Array], is_final: bool
    ) -> tuple[dict[str, Array], bool]:
        """``extras`` hold all that is known of the beams, and ``ids`` are empty."""
        tensors = dict(extras)
        if self.make_writer is not None:
            texts = []
            beams = zip(tensors["output_ids"][0], tensors["sequence_length"][0], strict=True)
            for beam, length in beams:
                text, _ = self.make_writer().write(beam[:length].tolist(), is_final)
                texts.append(text.encode())
            tensors["text_output"] = np.array(texts, dtype=np.object_)
        tensors.setdefault("finish_reason", finish_reason_tensor(FinishReason.NOT_FINISHED))
        tensors.update(self.constants)
        if is_final and self.zeros is not None and "output_ids" in tensors:
            tensors |= self.zeros.tensors(*tensors["output_ids"].shape[1:])
        outputs = self.outputs | self.final_outputs if is_final else self.outputs
        return {name: tensor for name, tensor in tensors.items() if name in outputs}, False
