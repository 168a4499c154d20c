"""`TritonPythonModel` of ``preprocessing``: text to token ids, words to word lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.families.registry import read_model
from inflight_backend.requests.inference_request import Array
from inflight_backend.requests.sampling import MAX_WORDS
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.text.tokenizer_files import read_json
from inflight_backend.triton_io.inputs import MAX_TEXT_SIZE
from inflight_backend.triton_io.word_lists import check_table, embedding_bias, word_table
from inflight_backend.triton_models.text_base import TextModel, texts

MAX_CHARACTERS = 2**22
"""Characters of all prompts, some million tokens; it takes seconds to encode them."""


class Preprocessor:
    """Turns the tensors of a request into those ``tensorrt_llm`` takes, row by row."""

    def __init__(
        self,
        codec: TextCodec,
        *,
        adds_special_tokens: bool,
        num_embeddings: int = 0,
        length_type: type[np.generic] = np.int32,
        start_ids: Sequence[int] = (),
    ) -> None:
        """``num_embeddings``: the model's vocabulary, which may be larger than the tokenizer's.
        ``length_type``: of ``REQUEST_OUTPUT_LEN``, which is handed on. ``start_ids``: what a
        decoder's text begins with, where an encoder reads the prompt."""
        self._start_ids = np.array([start_ids], dtype=np.int32)
        self._length_type = length_type
        self._vocab_size = max(codec.vocab_size, num_embeddings)
        self._codec = codec
        self._adds_special_tokens = adds_special_tokens
        self._pad_id = codec.end_id if codec.pad_id < 0 else codec.pad_id

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See `inflight_backend.triton_models.text_base.Convert`."""
        for name in ("QUERY", "REQUEST_OUTPUT_LEN"):  # Triton only counts what came
            if name not in inputs:
                raise InvalidRequest(f"'{name}' is missing")
        num_rows = len(inputs["QUERY"])
        pad_ids = _ids(inputs, "PAD_ID", num_rows, self._pad_id)
        input_ids, input_lengths = self._encode(inputs, "QUERY", pad_ids)
        outputs = {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": input_lengths,
            **self._decoder(inputs, pad_ids),
            "BAD_WORDS_IDS": self._words(inputs, "BAD_WORDS_DICT", num_rows),
            "STOP_WORDS_IDS": self._words(inputs, "STOP_WORDS_DICT", num_rows),
            "EMBEDDING_BIAS": self._bias(inputs, num_rows),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"].astype(self._length_type),
            "OUT_END_ID": _ids(inputs, "END_ID", num_rows, self._codec.end_id),
            "OUT_PAD_ID": pad_ids,
            "OUT_STOP_TOKEN_IDS": self._more_ends(num_rows, has_own="END_ID" in inputs),
        }
        if "PROMPT_TABLE_EXTRA_ID" in inputs:  # marks rows of a prompt table; a text has none
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.zeros(input_ids.shape, dtype=np.uint64)
        return outputs

    def _encode(
        self, inputs: Mapping[str, Array], name: str, pad_ids: Array
    ) -> tuple[Array, Array]:
        """Ids ``[num_rows, longest]``, shorter rows padded, and their lengths ``[num_rows, 1]``."""
        prompts = ["".join(row) for row in texts(inputs, name, len(pad_ids))]
        num_characters = sum(map(len, prompts))
        if num_characters > MAX_CHARACTERS:
            raise InvalidRequest(
                f"'{name}' holds {num_characters} characters, more than {MAX_CHARACTERS}"
            )
        rows = [
            self._codec.encode_raw(prompt, add_special_tokens=self._adds_special_tokens)
            for prompt in prompts
        ]
        if not all(rows):
            raise InvalidRequest(f"'{name}' is empty: a prompt needs at least one token")
        check_table(name, len(rows), max(map(len, rows)))
        lengths = np.array([[len(row)] for row in rows], dtype=np.int32)
        ids = np.repeat(pad_ids, lengths.max(), axis=1)
        for target, row in zip(ids, rows, strict=True):
            target[: len(row)] = row
        return ids, lengths

    def _more_ends(self, num_rows: int, *, has_own: bool) -> Array:
        """What the checkpoint ends texts with beside ``OUT_END_ID`` ``[num_rows, n]``, n = 0 for a
        client with an end id of its own."""
        ends = () if has_own else self._codec.more_end_ids
        return np.repeat(np.array([ends], dtype=np.int32), num_rows, axis=0)

    def _decoder(self, inputs: Mapping[str, Array], pad_ids: Array) -> dict[str, Array]:
        ids, lengths = pad_ids, np.ones_like(pad_ids)
        if self._start_ids.size:
            ids = np.repeat(self._start_ids, len(pad_ids), axis=0)
            lengths = np.full_like(pad_ids, ids.shape[1])
        if "DECODER_QUERY" in inputs:
            ids, lengths = self._encode(inputs, "DECODER_QUERY", pad_ids)
        return {"DECODER_INPUT_ID": ids, "REQUEST_DECODER_INPUT_LEN": lengths}

    def _words(self, inputs: Mapping[str, Array], name: str, num_rows: int) -> Array:
        rows = _read_words(inputs, name, num_rows)
        return word_table(
            [[ids for word in row if (ids := self._encode_word(word))] for row in rows]
        )

    def _bias(self, inputs: Mapping[str, Array], num_rows: int) -> Array:
        weights = inputs.get("EMBEDDING_BIAS_WEIGHTS", np.zeros((num_rows, 0), dtype=np.float32))
        return embedding_bias(
            _read_words(inputs, "EMBEDDING_BIAS_WORDS", num_rows),
            [row.reshape(-1).tolist() for row in weights],
            self._encode_word,
            self._vocab_size,
        )

    def _encode_word(self, word: str) -> list[int]:
        return self._codec.encode_word(word) if word else []


class TritonPythonModel(TextModel):
    """The model ``preprocessing``."""

    switch = "add_special_tokens"

    def make_converter(
        self, args: Mapping[str, str], parameters: Mapping[str, str], codec: TextCodec, is_on: bool
    ) -> Preprocessor:
        """See `TextModel.make_converter`."""
        return Preprocessor(
            codec,
            adds_special_tokens=is_on,
            num_embeddings=_read_num_embeddings(parameters.get("gpt_model_path", "")),
            length_type=np.uint32 if "TYPE_UINT32" in args["model_config"] else np.int32,
            start_ids=read_start_ids(parameters.get("gpt_model_path", "")),
        )


def _read_num_embeddings(folder: str) -> int:
    """``vocab_size`` of the checkpoint in ``folder``; 0 if there is none."""
    content = read_json(Path(folder), "config.json") if folder else {}
    return JsonReader(content, "config.json").integer("vocab_size") if content else 0


def read_start_ids(folder: str) -> tuple[int, ...]:
    """What the decoder's text begins with, if the checkpoint in ``folder`` has an encoder."""
    content = read_json(Path(folder), "config.json") if folder else {}
    return read_model(Path(folder)).start_ids if content.get("is_encoder_decoder") else ()


def _read_words(inputs: Mapping[str, Array], name: str, num_rows: int) -> list[list[str]]:
    """The words of every row, not more than `tensorrt_llm` takes."""
    rows = texts(inputs, name, num_rows)
    for row in rows:
        num_characters = sum(map(len, row))
        if len(row) > MAX_WORDS:
            raise InvalidRequest(f"'{name}' holds {len(row)} texts in a row, more than {MAX_WORDS}")
        if num_characters > MAX_TEXT_SIZE:
            raise InvalidRequest(
                f"'{name}' holds {num_characters} characters in a row, more than {MAX_TEXT_SIZE}"
            )
    return rows


def _ids(inputs: Mapping[str, Array], name: str, num_rows: int, default: int) -> Array:
    """A token id per row ``[num_rows, 1]``."""
    if name in inputs:
        return inputs[name].reshape(num_rows, 1)
    return np.full((num_rows, 1), default, dtype=np.int32)
