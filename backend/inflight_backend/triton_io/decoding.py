"""From the tensors of a Triton request to an `InferenceRequest`, and what the client wants back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import inflight_protocol as protocol
from inflight_backend.errors import InvalidRequest, UnsupportedRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.request_validation import RequestLimits
from inflight_backend.text.tokenizer import IncrementalDetokenizer, TextCodec
from inflight_backend.triton_io.beam_stream import (
    BeamStream,
    BeamTexts,
    has_beams,
    set_beam_tensors,
)
from inflight_backend.triton_io.extras import Zeros
from inflight_backend.triton_io.stop_text import StopText, StopTokens
from inflight_backend.triton_io.stream import Stream
from inflight_backend.triton_io.texts import (
    MAX_STOP_WORDS,
    add_special_words,
    read_texts,
    set_text_tensors,
)
from inflight_backend.triton_io.token_stream import TextWriter, TokenStream
from inflight_scheduler import OutputParams

Array = npt.NDArray[Any]

_TOKEN_OUTPUTS = frozenset({"output_ids", "sequence_length"})
_TEXT_OUTPUTS = frozenset({"text_output"})
_ANSWERS = frozenset({"stats", "why", "recording", "description"})
_OUTPUTS = frozenset(spec.name for spec in protocol.OUTPUTS if spec.is_honoured) - _ANSWERS
# Sent to who names them; those of `_BY_INPUT` also to who names no output at all.
_BY_NAME_ONLY = frozenset({"finish_reason", "batch_index", "sequence_index"})
# Clients of tensorrtllm_backend up to v0.13 read it of every response and name no outputs.
_ALWAYS = frozenset({"batch_index"})
_BY_INPUT = _OUTPUTS - _TOKEN_OUTPUTS - _TEXT_OUTPUTS - _BY_NAME_ONLY
_ENSEMBLE_OUTPUTS = frozenset(protocol.ENSEMBLE_OUTPUT_MAP.values())


_FIRST = {name: np.zeros((1, 1), np.int32) for name in ("batch_index", "sequence_index")}


def read_inputs(triton_request: Any) -> dict[str, Array]:
    """Every tensor of the request by name, as numpy; `InvalidRequest` for one in a GPU's memory.

    UINT32, which `repository.UINT32_INPUTS` may be, becomes INT32 bit by bit, as in the peer: -1
    stays -1.
    """
    tensors = triton_request.inputs()
    try:
        return {tensor.name(): _signed(tensor.as_numpy()) for tensor in tensors}
    except Exception:
        for tensor in tensors:
            if not tensor.is_cpu():
                raise InvalidRequest(_on_gpu(tensor.name())) from None
        raise


def _signed(tensor: Array) -> Array:
    return tensor.view(np.int32) if tensor.dtype == np.uint32 else tensor


def _on_gpu(name: str) -> str:
    return (
        f"'{name}' is in a GPU's memory: FORCE_CPU_ONLY_INPUT_TENSORS must be yes in config.pbtxt"
    )


def read_flag(inputs: Mapping[str, Array], name: str) -> bool | None:
    """A boolean control input; None when it was not sent. Rows may all say false."""
    tensor = inputs.get(name)
    if tensor is None:
        return None
    if tensor.size != 1:
        if tensor.size and not tensor.any():
            return False
        raise InvalidRequest(f"'{name}' must hold one value, got {tensor.size}")
    return bool(tensor.reshape(-1)[0])


def is_streaming(inputs: Mapping[str, Array]) -> bool | None:
    """``streaming``, or ``stream`` as text clients call it; None when neither was sent."""
    token_flag, text_flag = read_flag(inputs, "streaming"), read_flag(inputs, "stream")
    if token_flag is not None and text_flag is not None:
        raise InvalidRequest("'streaming' is given twice (also as 'stream')")
    return text_flag if token_flag is None else token_flag


def check_streaming(said: bool | None, inputs: Mapping[str, Array], *, is_stop: bool) -> None:
    """`InvalidRequest` if the parameter of that name, ``said``, is not what the input says.

    A stop request says it of the request that it stops.
    """
    if said is None or is_stop:
        return
    flags = [inputs[name] for name in ("streaming", "stream") if name in inputs]
    if any((flag.astype(np.bool_) != said).any() for flag in flags) or (said and not flags):
        raise InvalidRequest(
            f"request parameter '{protocol.STREAMING_PARAMETER}' must say what input 'streaming' "
            "says, or be left out"
        )


def read_text(inputs: Mapping[str, Array]) -> str | None:
    """``text_input`` as a string; None when it was not sent."""
    tensor = inputs.get("text_input")
    if tensor is None:
        return None
    if "input_ids" in inputs:
        raise InvalidRequest("'text_input' and 'input_ids' are both given; send one of them")
    if tensor.size != 1:
        raise InvalidRequest(f"'text_input' must hold one string, got {tensor.size}")
    value = tensor.reshape(-1)[0]
    try:
        text = value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InvalidRequest("'text_input' is not valid UTF-8") from None
    if not text:
        raise InvalidRequest("'text_input' is empty: a prompt needs at least one token")
    return text


def make_request(
    number: int, inputs: Mapping[str, Array], codec: TextCodec | None, limits: RequestLimits
) -> InferenceRequest:
    """The request for the batch manager; texts are encoded here.

    With stop words to be found in the text its tokens must come as they are drawn. Beams look for
    those words as tokens, and so does everybody for those with special tokens, which have no text.
    """
    stop_texts = read_texts(inputs, "stop_words", MAX_STOP_WORDS)
    comes_in_pieces = bool(is_streaming(inputs)) or (bool(stop_texts) and not has_beams(inputs))
    request = InferenceRequest(number, is_streaming=comes_in_pieces)
    text = read_text(inputs)
    for name, tensor in inputs.items():
        if name not in protocol.CONTROL_INPUTS:
            request.set_tensor(name, tensor)
    if text is not None:
        if codec is None:
            raise UnsupportedRequest("'text_input' needs a tokenizer, and the checkpoint has none")
        ids = codec.encode(text, limits.max_input_len)
        request.set_tensor("input_ids", np.array([ids], dtype=np.int32))
        if not request.has_tensor("end_id"):
            set_end_ids(request, codec)
    set_text_tensors(request, inputs, codec, limits.vocab_size)
    if has_beams(inputs):
        set_beam_tensors(request, inputs, stop_texts, codec, limits.vocab_size)
    elif stop_texts and codec is not None:
        add_special_words(request, stop_texts, codec, limits.vocab_size)
    return request


def set_end_ids(request: InferenceRequest, codec: TextCodec) -> None:
    """End the answer where the checkpoint ends texts, beside what the client has named."""
    if codec.end_id >= 0:
        request.set_tensor("end_id", np.array([codec.end_id], dtype=np.int32))
    if codec.more_end_ids:
        more = np.array([codec.more_end_ids], dtype=np.int32)
        if request.has_tensor("stop_token_ids"):
            named = request.get_tensor("stop_token_ids")
            if named.dtype != np.int32:
                return  # validation says so
            more = np.concatenate((named.reshape(1, -1), more), axis=1)
        request.replace_tensor("stop_token_ids", more)


def names_none(requested: frozenset[str]) -> bool:
    """True for a client that names no output.

    The ensemble always requests what it has, and keeps those from its client that it did not name.
    """
    return not requested or requested == _ENSEMBLE_OUTPUTS


def choose_outputs(requested: frozenset[str], *, is_text: bool) -> frozenset[str]:
    """The tensors to send, as far as there are any: inputs like ``return_log_probs`` decide that.

    A client that names none gets those of the kind of its prompt, and which row each is of.

    A token prompt needs ``output_ids`` or ``text_output``; the peer's rule that ``output_ids`` and
    ``sequence_length`` come together holds for clients that name one of them.
    """
    if names_none(requested):
        return (_TEXT_OUTPUTS if is_text else _TOKEN_OUTPUTS) | _BY_INPUT | _ALWAYS
    if not requested & (_TOKEN_OUTPUTS | _TEXT_OUTPUTS):
        raise InvalidRequest(
            "none of the requested outputs can be sent; request 'output_ids' with "
            "'sequence_length', or 'text_output'"
        )
    if refused := sorted(requested - _OUTPUTS):
        raise InvalidRequest(f"output '{refused[0]}' cannot be requested here: it is not sent")
    return requested


def _unasked(outputs: OutputParams, requested: frozenset[str]) -> frozenset[str]:
    """What a client that names no outputs is told though it has not asked for it: zeros."""
    if not names_none(requested):
        return frozenset()
    asked = {
        "cum_log_probs": outputs.log_probs,
        "output_log_probs": outputs.log_probs,
        "context_logits": outputs.context_logits,
        "generation_logits": outputs.generation_logits,
    }
    return frozenset(name for name, is_asked in asked.items() if not is_asked)


def make_token_stream(
    stream: Stream,
    request: InferenceRequest,
    inputs: Mapping[str, Array],
    requested: frozenset[str],
    codec: TextCodec | None,
) -> TokenStream | BeamStream:
    """The way back for a validated request (`request.llm_request` is set)."""
    llm_request = request.llm_request
    assert llm_request is not None, "validate the request first"
    text = read_text(inputs)
    outputs = choose_outputs(requested, is_text=text is not None)
    # The ensemble names them all; perhaps its client did.
    final_outputs = _BY_NAME_ONLY if requested == _ENSEMBLE_OUTPUTS else frozenset[str]()
    if read_flag(inputs, "return_finish_reason"):
        final_outputs |= {"finish_reason"}
    stop_words = read_texts(inputs, "stop_words", MAX_STOP_WORDS)
    keeps_stop_word = bool(read_flag(inputs, "include_stop_str_in_output"))
    skips_special = read_flag(inputs, "skip_special_tokens") is not False
    needs_codec = "text_output" in outputs or stop_words
    if needs_codec and codec is None:
        name = "stop_words" if stop_words else "text_output"
        raise UnsupportedRequest(f"'{name}' needs a tokenizer, and the checkpoint has none")
    # A whole answer starts with the prompt unless the client leaves it out (the peer's rule).
    is_whole = not (is_streaming(inputs) and llm_request.is_streaming)
    includes_prompt = is_whole and not llm_request.exclude_input_in_output
    unasked = _unasked(llm_request.outputs, requested)
    zeros = Zeros(unasked, llm_request.prompt_len if includes_prompt else 0) if unasked else None
    if llm_request.beams is not None:
        if keeps_stop_word or not skips_special:
            name = "include_stop_str_in_output" if keeps_stop_word else "skip_special_tokens"
            raise UnsupportedRequest(f"'{name}' is not supported together with beams")
        beams = BeamStream(stream, outputs, constants=_FIRST)
        beams.final_outputs = final_outputs
        beams.zeros = zeros
        if "text_output" in outputs and codec is not None:
            prompt = codec.decode(llm_request.tokens) if text is None else text
            beams.texts = BeamTexts.of(codec, llm_request, prompt, stop_words)
        return beams
    token_stream = TokenStream(stream, outputs, constants=_FIRST)
    token_stream.zeros = zeros
    token_stream.final_outputs = final_outputs
    if is_whole and llm_request.is_streaming:
        token_stream.is_whole = True
        token_stream.ids = list(llm_request.tokens) if includes_prompt else []
    if codec is None or not needs_codec:
        return token_stream
    token_stream.text = TextWriter(
        IncrementalDetokenizer(codec, llm_request.tokens, skip_special_tokens=skips_special),
        stop_tokens=(
            StopTokens(llm_request.stop_words)
            if llm_request.stop_words and not keeps_stop_word
            else None
        ),
        stop_text=StopText(stop_words, keeps_word=keeps_stop_word) if stop_words else None,
    )
    if includes_prompt:
        token_stream.text.prefix = codec.decode(llm_request.tokens) if text is None else text
        if not llm_request.is_streaming:  # else the prompt's ids do not come with the answer's
            token_stream.text.num_prompt_ids = llm_request.prompt_len
    return token_stream
