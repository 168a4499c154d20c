"""Which outputs a client gets, and the stream that writes them."""

from __future__ import annotations

from collections.abc import Callable

import inflight_protocol as protocol
from inflight_backend.errors import InvalidRequest, UnsupportedRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.tensors import number_tensor
from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_io.answer_stream import (
    AnswerStream,
    BeamStream,
    TextWriter,
    TokenStream,
    Zeros,
)
from inflight_backend.triton_io.request import Prompt
from inflight_backend.triton_io.sender import ResponseSender
from inflight_backend.triton_io.stop_text import StopText, StopTokens
from inflight_scheduler import LlmRequest, OutputParams

_TOKEN_OUTPUTS = frozenset({"output_ids", "sequence_length"})
_TEXT_OUTPUTS = frozenset({"text_output"})
_ANSWERS = frozenset({"stats", "why", "recording", "description", "live", "shared"})
_OUTPUTS = frozenset(spec.name for spec in protocol.OUTPUTS if spec.is_honoured) - _ANSWERS
# Sent to clients that name them; those of `_BY_INPUT` also to clients that name no output.
_BY_NAME_ONLY = frozenset({"finish_reason", "batch_index", "sequence_index"})
# Clients of tensorrtllm_backend up to v0.13 read it of every response and name no outputs.
_ALWAYS = frozenset({"batch_index"})
_BY_INPUT = _OUTPUTS - _TOKEN_OUTPUTS - _TEXT_OUTPUTS - _BY_NAME_ONLY
_ENSEMBLE_OUTPUTS = frozenset(protocol.ENSEMBLE_OUTPUT_MAP.values())
_FIRST = {name: number_tensor(0) for name in ("batch_index", "sequence_index")}


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


def make_answer_stream(
    stream: ResponseSender,
    request: InferenceRequest,
    prompt: Prompt,
    requested: frozenset[str],
    codec: TextCodec | None,
) -> AnswerStream:
    """The way back for a validated request (`request.llm_request` is set)."""
    llm_request = request.llm_request
    assert llm_request is not None, "validate the request first"
    outputs = choose_outputs(requested, is_text=prompt.text is not None)
    needs_codec = "text_output" in outputs or bool(prompt.stop_words)
    if needs_codec and codec is None:
        name = "stop_words" if prompt.stop_words else "text_output"
        raise UnsupportedRequest(f"'{name}' needs a tokenizer, and the checkpoint has none")
    # A whole answer starts with the prompt unless the client leaves it out (the peer's rule).
    is_whole = not (prompt.is_streaming and llm_request.is_streaming)
    includes_prompt = is_whole and not llm_request.exclude_input_in_output
    # The ensemble names them all; perhaps its client did.
    final_outputs = _BY_NAME_ONLY if requested == _ENSEMBLE_OUTPUTS else frozenset[str]()
    if prompt.wants_finish_reason:
        final_outputs |= {"finish_reason"}
    unasked = _unasked(llm_request.outputs, requested)
    zeros = Zeros(unasked, llm_request.prompt_len if includes_prompt else 0) if unasked else None
    shared = (stream, outputs, final_outputs, _FIRST, zeros)
    if llm_request.beams is not None:
        _check_beams(prompt)
        beams = BeamStream(*shared)
        if "text_output" in outputs and codec is not None:
            beams.make_writer = _text_writers(prompt, llm_request, codec, includes_prompt)
        return beams
    answer = TokenStream(*shared)
    if is_whole and llm_request.is_streaming:
        answer.is_whole = True
        answer.ids = list(llm_request.tokens) if includes_prompt else []
    if codec is not None and needs_codec:
        answer.text = _text_writers(prompt, llm_request, codec, includes_prompt)()
    return answer


def _check_beams(prompt: Prompt) -> None:
    if prompt.keeps_stop_word or not prompt.skips_special_tokens:
        name = "include_stop_str_in_output" if prompt.keeps_stop_word else "skip_special_tokens"
        raise UnsupportedRequest(f"'{name}' is not supported together with beams")


def _text_writers(
    prompt: Prompt, request: LlmRequest, codec: TextCodec, includes_prompt: bool
) -> Callable[[], TextWriter]:
    """Makes writers of the text of ``request``, which has not begun."""
    detokenizer = IncrementalDetokenizer(
        codec, request.tokens, skip_special_tokens=prompt.skips_special_tokens
    )
    prefix, num_prompt_ids = "", 0
    if includes_prompt:
        is_text = prompt.text is not None and not request.encoder_length  # else it is another one
        prefix = prompt.text if is_text and prompt.text else codec.decode(request.tokens)
        if not request.is_streaming:  # else the prompt's ids do not come with the answer's
            num_prompt_ids = request.prompt_len
    keeps_word = prompt.keeps_stop_word
    words = () if keeps_word else sorted(request.stop_words)  # to sort them again takes no time

    def make() -> TextWriter:
        return TextWriter(
            detokenizer.fork(),
            prefix,
            num_prompt_ids,
            StopTokens(words) if words else None,
            StopText(prompt.stop_words, keeps_word=keeps_word) if prompt.stop_words else None,
            prefers_text=request.beams is not None,  # which has the same words also as tokens
        )

    return make
