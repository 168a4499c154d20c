"""The responses of a beam search: each holds all beams from their beginning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inflight_backend.requests.inference_request import Array
from inflight_backend.requests.tensors import finish_reason_tensor
from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_io.stop_text import StopText, StopTokens
from inflight_backend.triton_io.token_stream import AnswerStream
from inflight_scheduler import FinishReason, LlmRequest
from inflight_scheduler.sampling import Word


@dataclass(frozen=True, slots=True)
class BeamTexts:
    """Makes the text of each beam: the prompt, if it is part of the answer, and what follows it.

    Stop words are left out, as tokens and as text.
    """

    codec: TextCodec
    prompt_ids: tuple[int, ...]
    prefix: str
    num_prompt_ids: int
    stop_words: tuple[Word, ...]
    stop_texts: tuple[str, ...]

    @classmethod
    def of(
        cls, codec: TextCodec, request: LlmRequest, prompt: str, stop_texts: Sequence[str]
    ) -> BeamTexts:
        """For ``request``, whose prompt reads ``prompt``."""
        includes_prompt = not (request.is_streaming or request.exclude_input_in_output)
        return cls(
            codec,
            tuple(request.tokens),
            prompt if includes_prompt else "",
            len(request.tokens) if includes_prompt else 0,
            tuple(sorted(request.stop_words)),  # to sort them again for each text takes no time
            tuple(stop_texts),
        )

    def text(self, ids: Sequence[int], *, is_final: bool) -> bytes:
        """The text of one beam; O(tokens). Without what may be the beginning of a stop word, or of
        a character, unless ``is_final``."""
        new_ids = list(ids[self.num_prompt_ids :])
        text, has_stopped = self._write(new_ids, is_final)
        if self.stop_words and not has_stopped:  # a text goes as far as a word in it
            certain = StopTokens(self.stop_words).push(new_ids, is_final=is_final)
            text, _ = self._write(certain, is_final)
        return (self.prefix + text).encode()

    def _write(self, ids: list[int], is_final: bool) -> tuple[str, bool]:
        """The text of ``ids`` up to a word given as text, and whether there is one."""
        detokenizer = IncrementalDetokenizer(self.codec, self.prompt_ids)
        text = detokenizer.push(ids)
        if is_final:
            text += detokenizer.finish()
        if not self.stop_texts:
            return text, False
        stop = StopText(self.stop_texts)
        text = stop.push(text, is_final=is_final)
        return text, stop.is_hit


@dataclass(slots=True)
class BeamStream(AnswerStream):
    """All beams of one request; nothing is put together.

    ``texts`` is set when text is among the outputs. Words that end an answer are found by the
    search.
    """

    texts: BeamTexts | None = None

    def _make(
        self, ids: Sequence[int], extras: Mapping[str, Array], is_final: bool
    ) -> tuple[dict[str, Array], bool]:
        """``extras`` hold all that is known of the beams, and ``ids`` are empty."""
        tensors = dict(extras)
        if self.texts is not None:
            beams = zip(tensors["output_ids"][0], tensors["sequence_length"][0], strict=True)
            texts = [
                self.texts.text(beam[:length].tolist(), is_final=is_final) for beam, length in beams
            ]
            tensors["text_output"] = np.array(texts, dtype=np.object_)
        tensors.setdefault("finish_reason", finish_reason_tensor(FinishReason.NOT_FINISHED))
        tensors.update(self.constants)
        if is_final and self.zeros is not None and "output_ids" in tensors:
            tensors |= self.zeros.tensors(*tensors["output_ids"].shape[1:])
        outputs = self.outputs | self.final_outputs if is_final else self.outputs
        return {name: tensor for name, tensor in tensors.items() if name in outputs}, False
