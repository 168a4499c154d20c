"""Speculative decoding with a draft model, for ``tensorrt_llm_bls``.

Round by round the draft model guesses some tokens, and the target verifies them as drafts of a
client (`docs/speculative_decoding.md`); what it answers is the text of the next round. Noise
depends on seed and position in the text only, so the tokens are those of one request to the target
alone, greedy or seeded. Blocks of the text so far are found in the cache.

A request that the target answers token by token whatever is guessed (guides, penalties, beams), or
that needs all of its answer in one request (logits), goes to the target as it is; so do all of a
target with an encoder, which would read the text of the next round as another source.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import Array, InferenceRequest
from inflight_backend.requests.outputs import read_outputs
from inflight_backend.requests.validation import RequestLimits
from inflight_backend.requests.values import flag
from inflight_backend.text.generation_config import to_inputs
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.relay_wire import (
    RelayedRequest,
    RelayedResponse,
    Tensors,
    pack,
)
from inflight_backend.triton_io.answer_stream import AnswerStream, TokenStream
from inflight_backend.triton_io.outputs import make_answer_stream
from inflight_backend.triton_io.request import Prompt
from inflight_backend.triton_io.sender import ResponseSender
from inflight_backend.triton_models.relay_client import RelayedCall
from inflight_protocol import ENSEMBLE_OUTPUT_MAP
from inflight_scheduler import LlmRequest

_logger = get_logger(__name__)

_LENGTH = b"length"
_DRAWS = (
    "temperature",
    "runtime_top_k",
    "runtime_top_p",
    "min_p",
    "random_seed",
)
"""How a token is drawn. The draft model draws its guesses in the same way, with the same noise."""
_IN_ROUNDS = frozenset(
    {
        *_DRAWS,
        *("text_input", "max_tokens", "request_output_len", "stop_words", "stop_token_ids"),
        *("exclude_input_in_output", "end_id", "pad_id", "min_length", "min_tokens", "seed"),
        *("embedding_bias_words", "embedding_bias_weights", "len_penalty", "priority"),
        *("return_log_probs", "return_perf_metrics", "return_finish_reason", "cache_salt"),
        *("return_num_input_tokens", "return_num_output_tokens", "return_kv_cache_reuse_stats"),
        *("return_num_cached_tokens", "input_ids", "embedding_bias"),
        *("lora_task_id", "lora_weights", "lora_config", "lora_name", "stream", "streaming"),
    }
)
"""Inputs that mean the same in every round; others only if they ask for nothing."""
_NEUTRAL = {"beam_width": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
_OF_FIRST = frozenset(
    {
        *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "num_input_tokens"),
        *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
        "num_cached_tokens",
    }
)
"""Outputs that tell of the beginning of an answer."""
_SUMS = ("cum_log_probs", "total_draft_tokens", "total_accepted_draft_tokens")
_COUNT = "num_output_tokens"
_ROUND_OUTPUTS = [
    *("output_ids", "sequence_length"),
    *(name for name in ENSEMBLE_OUTPUT_MAP.values() if name != "text_output"),
]


@dataclass(frozen=True, slots=True)
class Target:
    """What the target says of itself (`introspection.ModelInfo`)."""

    limits: RequestLimits
    max_draft_len: int
    default_sampling: Mapping[str, float]
    has_encoder: bool

    @classmethod
    def read(cls, description: str) -> Target:
        """From its JSON."""
        content = json.loads(description)
        limits = RequestLimits(
            content["vocab_size"],
            content["max_input_len"],
            content["max_seq_len"],
            exclude_input_in_output=False,
            refusal_reason=lambda request: None,
        )
        return cls(
            limits,
            content["max_draft_len"],
            to_inputs(content["default_sampling"]),
            has_encoder=content["start_ids"] is not None,
        )


class DraftModel:
    """The models that work together; what the target says of itself is asked for once."""

    def __init__(self, target_name: str, name: str, codec: TextCodec) -> None:
        """``name``: of the draft model. ``codec``: the tokenizer of the target."""
        self.target_name = target_name
        self.name = name
        self.codec = codec
        self.target: Target | None = None
        self._has_warned = False

    def warn(self, error: str) -> None:
        """Note once that there were no guesses; the target answers alone."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("%s guesses nothing: %s", self.name, error)


def has_rounds(inputs: Mapping[str, Array]) -> bool:
    """True for the tensors of a request that can be answered in several rounds."""
    return all(
        name in _IN_ROUNDS or not (tensor.size and (tensor != _NEUTRAL.get(name, 0)).any())
        if tensor.dtype != np.object_
        else name in _IN_ROUNDS or not any(tensor.reshape(-1).tolist())
        for name, tensor in inputs.items()
    )


class DraftedCall(RelayedCall):
    """One request, answered in rounds, all on one connection to each model: a target that drains
    sees by it that the answer goes on."""

    def __init__(
        self, model: DraftModel, stream: ResponseSender, request: RelayedRequest, num_drafts: int
    ) -> None:
        """``num_drafts``: guesses in a round. `InvalidRequest` names an input that is wrong."""
        super().__init__(model.target_name, stream, request)
        self._models = model
        self._num_drafts = num_drafts
        # Its arrays may be Triton's, which takes them back.
        inputs = {name: tensor.copy() for name, tensor in request.inputs.items()}
        self._prompt = Prompt.read(inputs)
        self._requested = frozenset(request.requested)

    def responses(self) -> Iterator[Tensors]:
        """See `RelayedCall.responses`: one response with all of the answer."""
        if (target := self._describe_target()) is None:
            return
        if self._num_drafts > target.max_draft_len:
            self._fail(
                InvalidRequest(
                    f"'num_draft_tokens' is {self._num_drafts}, outside 0..{target.max_draft_len} "
                    "(max_draft_len)"
                )
            )
            return
        if target.has_encoder:
            yield from super().responses()
            return
        try:
            request = self._prompt.make_request(
                0, self._models.codec, target.limits, target.default_sampling
            )
        except InvalidRequest as error:
            self._fail(error)
            return
        ids = request.get_tensor("input_ids").reshape(-1).tolist()
        num_tokens = int(request.get_tensor("request_output_len").reshape(-1)[0])
        limits = target.limits
        is_too_long = len(ids) + num_tokens > min(limits.max_seq_len, limits.max_input_len + 1)
        is_plain = request.has_tensor("stop_words_list")  # words of several tokens, too
        # What the client leaves out may come from the checkpoint.
        if is_too_long or is_plain or not has_rounds(request.tensors):
            yield from super().responses()
            return
        yield from _Rounds(self, target, request, ids, num_tokens).run()

    def _describe_target(self) -> Target | None:
        """None if it could not be asked; `last` says why."""
        if self._models.target is None:
            question = RelayedRequest({"describe": np.array([[True]])}, ["description"])
            tensors = self.ask_whole(self._models.target_name, question, is_own=True)
            if tensors is not None:
                text = tensors["description"].reshape(-1)[0]
                self._models.target = Target.read(text)
        return self._models.target

    def ask_whole(
        self, model_name: str, request: RelayedRequest, *, is_own: bool
    ) -> Tensors | None:
        """The tensors of a request with one response; None without an answer, which ends this
        call if ``is_own``."""
        tensors = None
        for response in self.ask(model_name, pack(request)):
            if response.is_final and (response.error or self._is_stopped):
                if is_own:
                    self.last = response
                elif response.error:  # else the client has left
                    self._models.warn(response.error)
                return None
            if response.tensors:
                tensors = response.tensors
        return tensors

    def guess(self, request: RelayedRequest) -> list[int]:
        """The tokens that the draft model answers; none if it does not."""
        tensors = self.ask_whole(self._models.name, request, is_own=False)
        return [] if tensors is None else _ids(tensors)

    def _fail(self, error: InvalidRequest) -> None:
        self.last = RelayedResponse(None, str(error), error.code, is_final=True)


class _Rounds:
    """The rounds of one request."""

    def __init__(
        self,
        call: DraftedCall,
        target: Target,
        request: InferenceRequest,
        ids: list[int],
        num_tokens: int,
    ) -> None:
        self._call = call
        self._target = target
        self._request = request
        self._num_prompt_ids = len(ids)
        self._ids = ids
        self._num_tokens = num_tokens
        self._sums: dict[str, Array] = {}
        self._first: dict[str, Array] = {}
        self._begun = time.monotonic()

    @property
    def _num_left(self) -> int:
        return self._num_tokens - (len(self._ids) - self._num_prompt_ids)

    def run(self) -> Iterator[Tensors]:
        """The whole answer as one response, unless the call has failed."""
        answer: AnswerStream | None = None
        drafts: list[int] = []
        num_wanted = 1  # nothing is guessed before the target has taken the request
        while True:
            tensors = self._verify(drafts, num_wanted)
            if tensors is None:
                return
            count = int(tensors[_COUNT].item())
            new = _ids(tensors)
            if answer is None:
                answer = self._open_answer(includes_prompt=len(new) > count)
            new = new[len(new) - count :]
            self._ids += new
            is_over = tensors["finish_reason"].item() != _LENGTH or self._num_left <= 0
            if answer.send(new, self._extras(tensors)) or is_over:
                break
            drafts = self._guess()
            # Without a guess the target answers what is left alone.
            num_wanted = len(drafts) + 1 if drafts or self._num_left == 1 else self._num_left
        self._call.last = RelayedResponse(is_final=True)
        yield answer.make_last((), {})

    def _open_answer(self, *, includes_prompt: bool) -> TokenStream:
        """What puts the answer together; ``includes_prompt`` as client or server have it."""
        call, request = self._call, self._request
        request.llm_request = LlmRequest(
            0,
            self._ids,
            self._num_tokens,
            is_streaming=True,  # it comes in pieces
            exclude_input_in_output=not includes_prompt,
            outputs=read_outputs(
                request, len(self._ids), self._num_tokens, self._target.limits.vocab_size
            ),
        )
        answer = make_answer_stream(
            call.stream, request, call._prompt, call._requested, call._models.codec
        )
        assert isinstance(answer, TokenStream)
        return answer

    def _guess(self) -> list[int]:
        """Drafts of the next round: one token less than there is room for comes from the target."""
        num_drafts = min(self._call._num_drafts, self._num_left - 1)
        if num_drafts < 1:
            return []
        tensors = self._round_inputs(self._ids, num_drafts)
        tensors["exclude_input_in_output"] = np.array([[True]])
        draws = {name: tensor for name, tensor in self._request.tensors.items() if name in _DRAWS}
        guesses = self._call.guess(
            RelayedRequest(draws | tensors, ["output_ids", "sequence_length"])
        )
        known = self._target.limits.vocab_size
        num_known = next((i for i, token in enumerate(guesses) if token >= known), len(guesses))
        return guesses[:num_known]

    def _verify(self, drafts: Sequence[int], num_tokens: int) -> Tensors | None:
        """One round of the target; None if it has failed, and so has the call."""
        tensors = {
            **self._request.tensors,
            **self._round_inputs(self._ids, num_tokens),
            f"return_{_COUNT}": np.array([[True]]),
        }
        is_first = len(self._ids) == self._num_prompt_ids
        if not is_first:
            tensors["exclude_input_in_output"] = np.array([[True]])
        if drafts:
            tensors["draft_input_ids"] = np.array([drafts], dtype=np.int32)
        if "min_length" in tensors:
            num_done = len(self._ids) - self._num_prompt_ids
            rest = np.clip(tensors["min_length"] - num_done, 0, num_tokens)
            tensors["min_length"] = rest.astype(np.int32)
        request = RelayedRequest(tensors, _ROUND_OUTPUTS, None if is_first else self._begun)
        return self._call.ask_whole(self._call._models.target_name, request, is_own=True)

    @staticmethod
    def _round_inputs(ids: Sequence[int], num_tokens: int) -> dict[str, Array]:
        return {
            "input_ids": np.array([ids], dtype=np.int32),
            "request_output_len": np.array([[num_tokens]], dtype=np.int32),
        }

    def _extras(self, tensors: Tensors) -> dict[str, Array]:
        """What comes with the tokens of a round, as of the whole answer so far."""
        extras = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in ("output_ids", "sequence_length", "batch_index", "sequence_index")
        }
        if not flag(self._request, f"return_{_COUNT}", False):
            del extras[_COUNT]
        for name in _OF_FIRST & extras.keys():
            extras[name] = self._first.setdefault(name, extras[name])
        for name in _SUMS:
            if name in extras:
                extras[name] = self._sums[name] = extras[name] + self._sums.get(name, 0)
        if "acceptance_rate" in extras:
            num_accepted, num_drafts = (extras[name] for name in reversed(_SUMS[1:]))
            rate = num_accepted / np.maximum(num_drafts, 1)
            extras["acceptance_rate"] = rate.astype(np.float32)
        return extras


def _ids(tensors: Mapping[str, Array]) -> list[int]:
    ids: list[Any] = tensors["output_ids"].reshape(-1).tolist()
    return ids
