"""`TritonPythonModel` of ``postprocessing``: token ids to text, whole answers only.

A stream is better read as ``text_output`` of ``tensorrt_llm``: a token by itself may be half a
character.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import Array
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_models.text_base import TextModel

MAX_TOKENS = 2**22
"""Tokens to decode."""

_PASSED_ON = (
    "CUM_LOG_PROBS",
    "OUTPUT_LOG_PROBS",
    "CONTEXT_LOGITS",
    "GENERATION_LOGITS",
    "BATCH_INDEX",
)
"""What comes back as it is under the name ``OUT_...``: the peer's model had these to v0.13."""


class Postprocessor:
    """Decodes the first ``SEQUENCE_LENGTH`` ids of every beam, all of them if that is not sent."""

    def __init__(self, codec: TextCodec, *, skips_special_tokens: bool) -> None:
        self._codec = codec
        self._skips_special_tokens = skips_special_tokens

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See `inflight_backend.triton_models.text_base.Convert`."""
        if "TOKENS_BATCH" not in inputs:  # Triton only counts what came
            raise InvalidRequest("'TOKENS_BATCH' is missing")
        tokens = inputs["TOKENS_BATCH"]
        whole = np.full(tokens.shape[:2], tokens.shape[2], dtype=np.int32)
        lengths = inputs.get("SEQUENCE_LENGTH", whole)
        if tokens.shape[:2] != lengths.shape:
            raise InvalidRequest(
                f"'SEQUENCE_LENGTH' has shape {list(lengths.shape)}, "
                f"expected {list(tokens.shape[:2])}: one length per beam of 'TOKENS_BATCH'"
            )
        longest, highest = tokens.shape[2], self._codec.vocab_size - 1
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= longest:
            raise InvalidRequest(f"'SEQUENCE_LENGTH' must hold numbers from 0 to {longest}")
        if (num_tokens := int(lengths.sum(dtype=np.int64))) > MAX_TOKENS:
            raise InvalidRequest(
                f"'SEQUENCE_LENGTH' asks for {num_tokens} tokens, more than {MAX_TOKENS}"
            )
        texts = np.empty(lengths.shape, dtype=np.object_)
        for place in np.ndindex(*lengths.shape):
            ids = tokens[place][: lengths[place]]
            if ids.size and not 0 <= ids.min() <= ids.max() <= highest:
                raise InvalidRequest(f"'TOKENS_BATCH' holds an id outside 0..{highest}")
            text = self._codec.decode(ids.tolist(), skip_special_tokens=self._skips_special_tokens)
            texts[place] = text.encode()
        passed_on = {f"OUT_{name}": inputs[name] for name in _PASSED_ON if name in inputs}
        return {"OUTPUT": texts.reshape(-1), **passed_on}


class TritonPythonModel(TextModel):
    """The model ``postprocessing``."""

    switch = "skip_special_tokens"

    def make_converter(
        self, args: Mapping[str, str], parameters: Mapping[str, str], codec: TextCodec, is_on: bool
    ) -> Postprocessor:
        """See `TextModel.make_converter`."""
        return Postprocessor(codec, skips_special_tokens=is_on)
