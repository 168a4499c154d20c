"""Collects the outputs of requests beside tokens: log probabilities, logits, times and counts.

Only requests that asked for outputs are known here; the others cost nothing. Times are those of
`time.monotonic_ns`. The rows of log probabilities and generation logits are those of the tokens
sent, and ``num_output_tokens`` counts these; ``cum_log_probs`` is the sum of the log probabilities
so far. The logits of the prompt go with the first response.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inflight_backend.engine.interface import ContextLogits, ContextLogProbs, Logits, StepOutputs
from inflight_backend.errors import CapacityExceeded
from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.requests.outputs import MAX_LOGITS_BYTES, names_of_logits, num_logits_rows
from inflight_backend.requests.tensors import FLOAT32, INT32, INT64, row, scalar
from inflight_scheduler import NO_OUTPUTS, LlmRequest, ScheduledBatch

_ROWS = {
    "log_probs": "log_probs",
    "log_prob_ranks": "ranks",
    "num_top_log_probs": "top_log_probs",
    "generation_logits": "generation_logits",
}
"""Field of `OutputParams` -> field of `StepOutputs`, of outputs with a row for each token."""


class _PromptLogProbs:
    """Log probabilities of a prompt's tokens from the second on, as far as they are known; NaN for
    others."""

    def __init__(self, request: LlmRequest) -> None:
        self._tokens = request.tokens[: request.orig_prompt_len]
        num = len(self._tokens) - 1
        self._values = np.full(num, np.nan, dtype=np.float32)
        shape = (num, request.outputs.num_top_log_probs)
        self._top_ids = np.zeros(shape, dtype=np.int32)
        self._top_log_probs = np.full(shape, np.nan, dtype=np.float32)

    def keep(self, found: ContextLogProbs) -> None:
        """Keep rows of the prompt: after a pause the context also holds the answer so far."""
        start, num = found.start, len(found.top_ids)
        end = min(start + num - 1, len(self._values))
        if end > start:
            self._values[start:end] = found.log_probs[: end - start]
        last = start + num - 1
        if last < len(self._values):
            self._values[last] = found.last[self._tokens[last + 1]]
        end = min(start + num, len(self._values))
        if end > start:
            self._top_ids[start:end] = found.top_ids[: end - start]
            self._top_log_probs[start:end] = found.top_log_probs[: end - start]

    def tensors(self) -> list[NamedTensor]:
        """The outputs."""
        tensors = [NamedTensor("context_log_probs", self._values[None])]
        if self._top_ids.size:
            tensors.append(NamedTensor("top_context_log_prob_ids", self._top_ids[None]))
            tensors.append(NamedTensor("top_context_log_probs", self._top_log_probs[None]))
        return tensors


@dataclass(slots=True)
class _Gathered:
    """Outputs of one request. ``num_logits_bytes``: reserved for its logits; ``has_totals``: it
    asked for outputs that are not rows of its tokens."""

    request: LlmRequest
    arrival_ns: int
    num_logits_bytes: int
    has_totals: bool
    awaits_context: bool  # its context logits, which go with the first response only
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_blocks: int = 0
    num_reused_blocks: int = 0
    num_cached_tokens: int | None = None  # until it is told
    rows: dict[str, list[Any]] = field(default_factory=dict)  # of `StepOutputs`, one for each token
    context_logits: Logits | None = None
    num_context_rows: int = 0  # computed so far
    prompt: _PromptLogProbs | None = None
    num_sent: int = 0
    cum_log_prob: float = 0.0


class OutputGatherer:
    """Owner of the gathered outputs, by request id, and of the room for logits."""

    def __init__(self, vocab_size: int) -> None:
        self._row_bytes = 4 * vocab_size
        self._gathered: dict[int, _Gathered] = {}

    def add(self, request: LlmRequest, arrival_ns: int) -> None:
        """Gather for ``request`` from now on, if it asked for outputs.

        `CapacityExceeded` if there is no room for its logits beside those of the others.
        """
        asked = request.outputs
        if asked is not NO_OUTPUTS:
            has_totals = (
                asked.needs_whole_context
                or asked.num_input_tokens
                or asked.num_output_tokens
                or asked.perf_metrics
                or asked.num_cached_tokens
            )
            self._gathered[request.request_id] = _Gathered(
                request,
                arrival_ns,
                self._reserve(request),
                has_totals,
                asked.needs_whole_context,
                num_cached_tokens=0 if asked.num_cached_tokens else None,
                prompt=_PromptLogProbs(request) if asked.context_log_probs else None,
                rows={name: [] for output, name in _ROWS.items() if getattr(asked, output)},
            )

    def _reserve(self, request: LlmRequest) -> int:
        """The largest size of the logits of ``request``, in bytes, if there is room for them."""
        asked = request.outputs
        num_rows = num_logits_rows(asked, request.orig_prompt_len, request.max_new_tokens)
        num_bytes = num_rows * self._row_bytes
        num_reserved = sum(each.num_logits_bytes for each in self._gathered.values())
        if num_bytes + num_reserved > MAX_LOGITS_BYTES:
            raise CapacityExceeded(
                f"{names_of_logits(asked)} would take {num_bytes} bytes, and the logits of active "
                f"requests take {num_reserved} of {MAX_LOGITS_BYTES} already; try again later"
            )
        return num_bytes

    def planned(self, batch: ScheduledBatch) -> None:
        """A step is about to run: note its first-scheduled requests and new blocks."""
        if not self._gathered:
            return
        now, num_blocks = time.monotonic_ns(), Counter(block.slot for block in batch.new_blocks)
        started = {setup.slot for setup in batch.setups}
        for gathered in self._gathered.values():
            slot = gathered.request.seq_slot
            if slot is None:
                continue
            rows = range(slot, slot + gathered.request.num_rows)
            gathered.num_blocks += sum(num_blocks[row] for row in rows)
            if slot in started:
                if gathered.num_cached_tokens is not None and not gathered.first_scheduled_ns:
                    gathered.num_cached_tokens = gathered.request.num_reused_tokens
                gathered.num_reused_blocks += gathered.request.num_reused_blocks
                gathered.first_scheduled_ns = gathered.first_scheduled_ns or now

    def executed(self, advanced: Sequence[LlmRequest], outputs: StepOutputs | None) -> None:
        """A step has run, and ``advanced`` have a new token."""
        if not self._gathered:
            return
        now = time.monotonic_ns()
        for request in advanced:
            gathered = self._gathered.get(request.request_id)
            if gathered is not None:
                gathered.first_token_ns = gathered.first_token_ns or now
                gathered.last_token_ns = now
        if outputs is not None:
            self._keep(advanced, outputs)

    def _keep(self, advanced: Sequence[LlmRequest], outputs: StepOutputs) -> None:
        for name in _ROWS.values():
            if found := getattr(outputs, name):
                self._keep_rows(name, found, advanced)
        for prompt in outputs.context_log_probs:
            one = self._gathered.get(prompt.request_id)
            if one is not None and one.prompt is not None:
                one.prompt.keep(prompt)
        for context in outputs.context_logits:
            if context.request_id in self._gathered:
                _keep_context(self._gathered[context.request_id], context)

    def _keep_rows(
        self, name: str, found: Mapping[int, Sequence[Any]], advanced: Sequence[LlmRequest]
    ) -> None:
        """Keep the rows of accepted tokens: those behind a wrong draft do not count."""
        for request in advanced:
            gathered = self._gathered.get(request.request_id)
            if gathered is None or (kept := gathered.rows.get(name)) is None:
                continue
            rows = found.get(request.request_id, ())
            if len(rows) == 1:  # nearly always, and accepted
                kept.append(rows[0])
            else:
                kept += rows[: request.num_generated_tokens - len(kept)]

    def take(self, request: LlmRequest, num_tokens: int, is_final: bool) -> list[NamedTensor]:
        """The tensors that go with the next ``num_tokens`` tokens of the answer.

        Of a beam search without log probabilities, which the search itself has.
        """
        gathered = self._gathered.get(request.request_id)
        if gathered is None:
            return []
        if is_final:
            self.discard(request.request_id)
        if request.beams is not None:
            return _take_totals(gathered, num_tokens)
        return _take_tensors(gathered, num_tokens)

    def discard(self, request_id: int) -> None:
        """Forget a request."""
        self._gathered.pop(request_id, None)


def _keep_context(gathered: _Gathered, context: ContextLogits) -> None:
    """Keep rows of the prompt: after a pause the context also holds the answer so far."""
    if not gathered.awaits_context:
        return
    prompt_len = gathered.request.orig_prompt_len
    if gathered.context_logits is None:
        shape = (prompt_len, context.logits.shape[1])
        gathered.context_logits = np.zeros(shape, dtype=np.float32)
    end = min(context.start + len(context.logits), prompt_len)
    if end > context.start:
        gathered.context_logits[context.start : end] = context.logits[: end - context.start]
        gathered.num_context_rows = max(gathered.num_context_rows, end)


def _take_tensors(gathered: _Gathered, num_tokens: int) -> list[NamedTensor]:
    outputs = gathered.request.outputs
    start, end = gathered.num_sent, gathered.num_sent + num_tokens
    gathered.num_sent = end
    kept = gathered.rows
    tensors: list[NamedTensor] = []
    if outputs.log_probs:
        log_probs = kept["log_probs"][start:end]
        gathered.cum_log_prob += log_probs[0] if num_tokens == 1 else sum(log_probs)
        tensors.append(NamedTensor("output_log_probs", row(log_probs, FLOAT32)))
        tensors.append(NamedTensor("cum_log_probs", scalar(gathered.cum_log_prob, FLOAT32)))
    if outputs.log_prob_ranks:
        tensors.append(NamedTensor("output_log_prob_ranks", row(kept["ranks"][start:end], INT32)))
    if outputs.num_top_log_probs:
        tops, shape = kept["top_log_probs"][start:end], (1, 1, -1, outputs.num_top_log_probs)
        ids = np.array([ids for ids, _ in tops], dtype=np.int32).reshape(shape)
        values = np.array([values for _, values in tops], dtype=np.float32).reshape(shape)
        tensors.append(NamedTensor("top_log_probs", values))
        tensors.append(NamedTensor("top_log_prob_ids", ids))
    if outputs.generation_logits:
        rows = kept["generation_logits"][start:end]
        logits = np.stack(rows) if rows else np.empty((0, 0), dtype=np.float32)
        tensors.append(NamedTensor("generation_logits", logits[None, None]))
    if gathered.has_totals:
        tensors += _take_totals(gathered, num_tokens)
    return tensors


def _take_totals(gathered: _Gathered, num_output_tokens: int) -> list[NamedTensor]:
    """Outputs that do not depend on the number of beams."""
    outputs = gathered.request.outputs
    tensors: list[NamedTensor] = []
    if gathered.awaits_context and gathered.prompt is not None:
        tensors += gathered.prompt.tensors()
        gathered.prompt, gathered.awaits_context = None, outputs.context_logits
    if gathered.awaits_context:
        logits = gathered.context_logits
        if logits is None:  # stopped before its first step
            logits = np.empty((0, 0), dtype=np.float32)
        # A request that is stopped in its context gets the rows computed so far.
        logits = logits[: gathered.num_context_rows]
        tensors.append(NamedTensor("context_logits", logits[None]))
        gathered.context_logits, gathered.awaits_context = None, False
    if gathered.num_cached_tokens is not None:
        tensors.append(NamedTensor("num_cached_tokens", scalar(gathered.num_cached_tokens, INT32)))
        gathered.num_cached_tokens = None
    if outputs.num_input_tokens:
        request = gathered.request
        prompt_len = request.encoder_length or request.orig_prompt_len
        tensors.append(NamedTensor("num_input_tokens", scalar(prompt_len, INT32)))
    if outputs.num_output_tokens:
        tensors.append(NamedTensor("num_output_tokens", scalar(num_output_tokens, INT32)))
    if outputs.perf_metrics:
        tensors += _perf_metrics(gathered)
    return tensors


def _perf_metrics(gathered: _Gathered) -> list[NamedTensor]:
    """The ten metrics of the contract, as of now."""
    request = gathered.request
    new = gathered.num_blocks - gathered.num_reused_blocks
    metrics: tuple[tuple[str, float, np.dtype[Any]], ...] = (
        ("kv_cache_alloc_new_blocks", new, INT32),
        ("kv_cache_reused_blocks", gathered.num_reused_blocks, INT32),
        ("kv_cache_alloc_total_blocks", new, INT32),  # TensorRT-LLM's also excludes reused ones
        ("arrival_time_ns", gathered.arrival_ns, INT64),
        ("first_scheduled_time_ns", gathered.first_scheduled_ns, INT64),
        ("first_token_time_ns", gathered.first_token_ns, INT64),
        ("last_token_time_ns", gathered.last_token_ns, INT64),
        (
            "acceptance_rate",
            request.num_accepted_drafts / max(request.num_verified_drafts, 1),
            FLOAT32,
        ),
        ("total_accepted_draft_tokens", request.num_accepted_drafts, INT32),
        ("total_draft_tokens", request.num_verified_drafts, INT32),
    )
    return [NamedTensor(name, scalar(value, dtype)) for name, value, dtype in metrics]
