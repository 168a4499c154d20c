"""Copies results to the host: sampled tokens, and log probabilities and logits where requested.

Log probabilities and logits are the model's own: before bias, temperature, penalties, bans and
filters. (So they are what `transformers` calls logits and their log-softmax.) Copies are started
and not waited for: those of a step have arrived when its tokens have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight_backend.engine.interface import ContextLogits, ContextLogProbs, StepOutputs, as_array
from inflight_backend.engine.step_buffer import new_event, to_device
from inflight_scheduler import ContextChunk, ScheduledBatch, SlotSetup

_DEPTH = 2  # steps whose tokens may be on their way at once


class PendingTokens:
    """The tokens of a step that may still run."""

    __slots__ = ("_outputs", "_tokens", "_wait")

    def __init__(
        self, tokens: Tensor, wait: Callable[[], object], outputs: PendingOutputs | None = None
    ) -> None:
        self._tokens = tokens
        self._wait = wait
        self._outputs = outputs

    def read(self) -> list[int]:
        """Wait for the step and return its tokens, in plan order."""
        self._wait()
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def read_outputs(self) -> StepOutputs | None:
        """What the step brought beside tokens, once these are read; None if no request asked."""
        return None if self._outputs is None else self._outputs.read()


class TokenReader:
    """Copies tokens to the host: on CUDA through pinned buffers, each with an event.

    The tokens of a step must be read before those of the step after the next are sent.
    """

    def __init__(self, max_tokens: int, device: str) -> None:
        self._turn = 0
        self._lanes: Sequence[tuple[Tensor, torch.cuda.Event]] = []
        if device != "cpu":
            self._lanes = [
                (torch.empty(max_tokens, dtype=torch.int64, pin_memory=True), new_event())
                for _ in range(_DEPTH)
            ]

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return sum(host.nbytes for host, _ in self._lanes)

    def send(self, tokens: Tensor, outputs: PendingOutputs | None = None) -> PendingTokens:
        """Start the copy of tokens [n] int64; the tensor may be overwritten by later steps.

        ``outputs``: copies that were started before this one.
        """
        if not self._lanes:
            return PendingTokens(tokens.clone(), _return_at_once, outputs)
        host, event = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        target = host[: len(tokens)]
        target.copy_(tokens, non_blocking=True)
        event.record()
        return PendingTokens(target, event.synchronize, outputs)


def _return_at_once() -> None:
    """On a CPU a step has run when it returns."""


_ROWS_AT_ONCE = 256  # of a prompt: 128 MiB of logits with a vocabulary of 128 K


@dataclass(slots=True)
class PendingOutputs:
    """Host tensors of a step that may still run; `read` when its tokens have been read."""

    rows: list[tuple[str, list[int], Tensor]] = field(default_factory=list)
    """A field of `StepOutputs`, request ids and for each what it is in turn."""

    tops: list[tuple[list[tuple[int, int]], Tensor, Tensor]] = field(default_factory=list)
    contexts: list[tuple[int, int, Tensor]] = field(default_factory=list)
    prompts: list[tuple[int, int, tuple[Tensor, Tensor, Tensor, Tensor]]] = field(
        default_factory=list
    )
    candidates: list[tuple[list[int], list[int], Tensor, Tensor]] = field(default_factory=list)

    def read(self) -> StepOutputs:
        """The same as numbers; NaN stands for a row whose logits are not finite."""
        outputs = StepOutputs()
        for name, ids, rows in self.rows:
            values = rows.tolist() if rows.dim() == 1 else as_array(rows)
            for request_id, value in zip(ids, values, strict=True):
                getattr(outputs, name).setdefault(request_id, []).append(value)
        for wanted, tokens, log_probs in self.tops:
            found = zip(wanted, tokens.tolist(), log_probs.tolist(), strict=True)
            for (request_id, num), likeliest, of_them in found:
                top = (likeliest[:num], of_them[:num])
                outputs.top_log_probs.setdefault(request_id, []).append(top)
        outputs.context_logits += [
            ContextLogits(request_id, start, as_array(rows))
            for request_id, start, rows in self.contexts
        ]
        outputs.context_log_probs += [
            ContextLogProbs(request_id, start, *map(as_array, values))
            for request_id, start, values in self.prompts
        ]
        for slots, numbers, tokens, log_probs in self.candidates:
            given = zip(slots, numbers, tokens.tolist(), log_probs.tolist(), strict=True)
            for slot, number, likeliest, of_them in given:
                outputs.candidates[slot] = list(zip(likeliest[:number], of_them, strict=False))
        return outputs


class OutputRecorder:
    """Knows which slots ask, and keeps what the current step has brought."""

    def __init__(self, num_slots: int, device: str) -> None:
        self._device = device
        self._request_ids = [0] * num_slots
        self._wants_log_probs = np.zeros(num_slots, dtype=np.bool_)
        self._wants_ranks = np.zeros(num_slots, dtype=np.bool_)
        self._wants_logits = np.zeros(num_slots, dtype=np.bool_)
        self._num_top = np.zeros(num_slots, dtype=np.int32)
        self._wants_context = np.zeros(num_slots, dtype=np.bool_)
        self._wants_prompt = np.zeros(num_slots, dtype=np.bool_)
        draws = (self._wants_log_probs, self._wants_ranks, self._wants_logits, self._num_top)
        self._draw_flags = draws
        self._is_used = False
        self._pending: PendingOutputs | None = None

    def set_up(self, setups: Sequence[SlotSetup]) -> None:
        """Take over the setups of a plan, and forget what a step that failed has left."""
        self._pending = None
        for setup in setups:
            slot, outputs = setup.slot, setup.outputs
            self._request_ids[slot] = setup.request_id
            # A search tells the log probabilities it has chosen by.
            self._wants_log_probs[slot] = outputs.log_probs and not setup.num_candidates
            self._wants_ranks[slot] = outputs.log_prob_ranks
            self._wants_logits[slot] = outputs.generation_logits
            self._num_top[slot] = outputs.num_top_log_probs
            self._wants_context[slot] = outputs.context_logits
            self._wants_prompt[slot] = outputs.context_log_probs
        if setups:
            flags = (*self._draw_flags, self._wants_context, self._wants_prompt)
            self._is_used = any(bool(flag.any()) for flag in flags)

    def wants_samples(self, slots: Sequence[int]) -> bool:
        """Whether any of the rows that draw now is to be observed."""
        if not self._is_used:
            return False
        rows = list(slots)
        return any(bool(flag[rows].any()) for flag in self._draw_flags)

    def observed_chunks(self, batch: ScheduledBatch) -> list[tuple[int, ContextChunk]]:
        """The chunks whose logits are wanted, each with its first row in the packed tokens."""
        if not self._is_used:
            return []
        found, first = [], len(batch.generation_slots)
        for chunk in batch.context_chunks:
            if self._wants_context[chunk.slot] or self._wants_prompt[chunk.slot]:
                found.append((first, chunk))
            first += chunk.num_tokens
        return found

    def record_samples(
        self, slots: Sequence[int], logits: Tensor, tokens: Tensor, log_probs: Tensor | None = None
    ) -> None:
        """Keep what was drawn: the model's logits [N, vocab] float32, tokens [N] int64.

        ``log_probs`` [N] take the place of those that follow from the logits.
        """
        if rows := self._rows(slots, self._wants_log_probs):
            index = self.index(rows, len(slots))
            if log_probs is None:
                chosen = logits[index]
                values = _of_tokens(chosen, tokens[index]) - chosen.logsumexp(dim=-1)
            else:
                values = log_probs[index]
            self._keep("log_probs", slots, rows, values)
        if rows := self._rows(slots, self._wants_ranks):
            index = self.index(rows, len(slots))
            self._keep("ranks", slots, rows, _ranks(logits[index], tokens[index]))
        if rows := self._rows(slots, self._num_top):
            self._keep_top(slots, rows, logits[self.index(rows, len(slots))])
        if rows := self._rows(slots, self._wants_logits):
            chosen = logits[self.index(rows, len(slots))]
            self._keep("generation_logits", slots, rows, chosen)

    def _rows(self, slots: Sequence[int], wants: npt.NDArray[np.generic]) -> list[int]:
        """The rows of ``slots`` that want something."""
        return [row for row, slot in enumerate(slots) if wants[slot]]

    def _keep(self, name: str, slots: Sequence[int], rows: Sequence[int], values: Tensor) -> None:
        self._open().rows.append((name, self._ids(slots, rows), self._to_host(values)))

    def _keep_top(self, slots: Sequence[int], rows: Sequence[int], logits: Tensor) -> None:
        """The likeliest tokens of rows of logits [R, vocab], as many as the most that one wants."""
        nums = [int(self._num_top[slots[row]]) for row in rows]
        best = logits.topk(min(max(nums), logits.shape[1]))
        values = best.values - logits.logsumexp(dim=-1, keepdim=True)
        wanted = list(zip(self._ids(slots, rows), nums, strict=True))
        self._open().tops.append((wanted, self._to_host(best.indices), self._to_host(values)))

    def record_context_logits(
        self,
        chunks: Sequence[tuple[int, ContextChunk]],
        hidden: Tensor,
        to_logits: Callable[[Tensor], Tensor],
    ) -> None:
        """Keep logits and log probabilities of ``chunks``; hidden [num_tokens, hidden_size] of the
        whole step."""
        pending = self._open()
        for first, chunk in chunks:
            for offset in range(0, len(chunk.tokens), _ROWS_AT_ONCE):
                end = min(offset + _ROWS_AT_ONCE, len(chunk.tokens))
                logits = to_logits(hidden[first + offset : first + end])
                where = (self._request_ids[chunk.slot], chunk.start + offset)
                if self._wants_context[chunk.slot]:
                    pending.contexts.append((*where, self._to_host(logits)))
                if self._wants_prompt[chunk.slot]:
                    num_top = int(self._num_top[chunk.slot])
                    values = self._of_prompt(logits, chunk.tokens[offset + 1 : end], num_top)
                    pending.prompts.append((*where, values))

    def _of_prompt(
        self, logits: Tensor, following: Sequence[int], num_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The fields of `ContextLogProbs` for rows of logits [n, vocab]; ``following``: the n - 1
        tokens that follow all but the last."""
        sums = logits.logsumexp(dim=-1, keepdim=True)
        tokens = to_device(torch.tensor(following, dtype=torch.int64), self._device)
        log_probs = _of_tokens(logits[: len(tokens)], tokens) - sums[: len(tokens), 0]
        best = logits.topk(max(num_top, 1))
        ids, values = best.indices[:, :num_top], best.values[:, :num_top]
        parts = (log_probs, logits[-1] - sums[-1], ids, values - sums)
        first, last, top_ids, top_log_probs = map(self._to_host, parts)
        return first, last, top_ids, top_log_probs

    def record_candidates(
        self, slots: list[int], numbers: list[int], tokens: Tensor, log_probs: Tensor
    ) -> None:
        """Keep the most likely tokens [N, K] of ``slots``, so many of each as ``numbers`` says."""
        kept = (slots, numbers, self._to_host(tokens), self._to_host(log_probs))
        self._open().candidates.append(kept)

    def take(self) -> PendingOutputs | None:
        """The outputs of the step submitted last; None if no request asked for any."""
        pending, self._pending = self._pending, None
        return pending

    def _open(self) -> PendingOutputs:
        if self._pending is None:
            self._pending = PendingOutputs()
        return self._pending

    def _ids(self, slots: Sequence[int], rows: Sequence[int]) -> list[int]:
        return [self._request_ids[slots[row]] for row in rows]

    def index(self, rows: Sequence[int], num_rows: int) -> Tensor | slice:
        """Row numbers as an index on the device; all of ``num_rows`` need none."""
        if len(rows) == num_rows:
            return slice(None)
        return to_device(torch.tensor(rows, dtype=torch.int64), self._device)

    def _to_host(self, values: Tensor) -> Tensor:
        if self._device == "cpu":
            return values.clone()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return host


def _of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logits [R] of tokens [R] int64 in rows [R, vocab]; below 0, which a row whose logits are not
    finite draws, is any token."""
    return logits.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1)


def _ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens of each row [R, vocab] are at least as likely as tokens [R]: int64 [R]."""
    return (logits >= _of_tokens(logits, tokens)[:, None]).sum(dim=-1)
