"""The tokens allowed next in the answers of guided requests, step by step.

The state of an answer follows from its tokens alone: the tokens sampled since the last mask are
read first, so a pause or a shared prefix changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from inflight_backend.engine.interface import TokenMasks
from inflight_backend.guided.guide import GUIDE_FIELD
from inflight_backend.guided.matchers import EbnfMatcher
from inflight_backend.log import get_logger
from inflight_scheduler import LlmRequest

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from inflight_backend.guided.matchers import CompiledGuide, Matcher

_logger = get_logger(__name__)

MAX_STEP_SECONDS = 1.0
"""How long a step waits for the masks of EBNF grammars: xgrammar bounds no step of its own, and
behind many tokens an ambiguous grammar ("root ::= root root | ...") may take seconds for one."""

_NOTHING_FORCED = -1
_NOTHING = f"'{GUIDE_FIELD}' allows no token here, not even the end"
_NOTHING_BUT_ENDS = (
    f"'{GUIDE_FIELD}' allows nothing here but 'end_id' or 'stop_token_ids' as text, and no end yet"
)
_NO_DETAILS = "<non-verbose/>"  # llguidance's mark that there are more
_MIN_PARALLEL = 4  # fewer masks are made sooner than threads are woken
_NUM_THREADS = 4
_MAX_SECONDS_AGAIN = 0.5  # of a step, for all answers that start again; many do so at once
_TOKENS_AT_ONCE = 32  # of those that are read again; a token may take some ms


class GuidedAnswer:
    """How far the answer of a request has come in its guide; ``error`` says why it cannot go on."""

    __slots__ = ("error", "guide", "matcher", "may_start_again", "num_read")

    def __init__(self, guide: CompiledGuide) -> None:
        self.guide = guide
        self.matcher: Matcher = guide.new_matcher()
        self.may_start_again = True
        self.num_read = 0
        self.error = ""


GuidedRow = tuple[int, LlmRequest, GuidedAnswer]
"""The row of a plan, the request that it belongs to, and the answer of that."""


class MaskMaker:
    """Makes the masks of guided requests, in parallel if they are many."""

    def __init__(self, vocab_size: int) -> None:
        self.tokenizer_end_id = -1
        """The end as the matchers know it; requests may have others."""
        self._vocab_size = vocab_size
        self._executor: LLExecutor | None = None
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="EbnfMask")
        self._late: list[Future[Any]] = []  # calls of xgrammar that no step waits for any more
        self._seconds_left = 0.0  # of this step, for those that start again

    def masks(self, rows: Sequence[GuidedRow], latest: Mapping[int, int]) -> TokenMasks:
        """The masks of ``rows`` for the next token; ``latest`` has the tokens that were sampled and
        are not yet in the requests, by request id."""
        self._seconds_left = _MAX_SECONDS_AGAIN
        bits = np.zeros((len(rows), -(-self._vocab_size // 32)), dtype=np.int32)
        open_rows: list[tuple[int, GuidedAnswer, LlmRequest]] = []
        for index, (_, request, answer) in enumerate(rows):
            if not self._read(answer, request, latest):
                bits[index] = -1  # it has ended: its token is dropped
            elif not answer.error:
                open_rows.append((index, answer, request))
        self._fill([(index, answer.matcher) for index, answer, _ in open_rows], bits)
        for index, answer, request in open_rows:
            if answer.matcher.is_error() and self._start_again(answer, request, latest):
                self._fill([(index, answer.matcher)], bits)
            self._set_ends(bits[index], answer, request)
        masks = np.empty((len(rows), 2 + bits.shape[1]), dtype=np.int32)
        masks[:, 0], masks[:, 2:] = [row for row, *_ in rows], bits
        masks[:, 1] = _forced_tokens(bits)
        return masks

    def _read(self, answer: GuidedAnswer, request: LlmRequest, latest: Mapping[int, int]) -> bool:
        """Read what is new; False if the answer ends with it."""
        tokens = _new_tokens(request, latest, answer.num_read)
        if tokens and (tokens[-1] in request.end_ids or tokens[-1] < 0):
            return False
        if tokens:
            answer.num_read += len(tokens)
            if not answer.matcher.consume_tokens(tokens):
                error = _limit_met(answer.matcher)
                if not self._start_again(answer, request, latest):
                    answer.error = error
        return True

    def _start_again(
        self, answer: GuidedAnswer, request: LlmRequest, latest: Mapping[int, int]
    ) -> bool:
        """Read the whole answer with a matcher of its own, once; False if that cannot be done, or
        if there is no time left in this step."""
        began = time.monotonic()
        deadline = began + self._seconds_left
        can_try = answer.may_start_again and self._seconds_left > 0
        answer.may_start_again = False
        matcher = answer.guide.recompile() if can_try else None
        if matcher is not None and _follow(matcher, _new_tokens(request, latest, 0), deadline):
            answer.matcher = matcher
        else:
            matcher = None
        self._seconds_left -= time.monotonic() - began
        return matcher is not None

    def _fill(self, matchers: list[tuple[int, Matcher]], bits: npt.NDArray[np.int32]) -> None:
        """Let each matcher write its row of ``bits``, those of xgrammar on threads."""
        calls: dict[Future[npt.NDArray[np.int32]], tuple[int, EbnfMatcher]] = {}
        others: list[tuple[LLMatcher, int]] = []
        for index, matcher in matchers:
            if isinstance(matcher, EbnfMatcher):
                calls[self._pool.submit(matcher.next_mask)] = (index, matcher)
            else:
                others.append((matcher, index))
        self._fill_from_llguidance(others, bits)
        if calls:
            self._late = [call for call in self._late if not call.done()]
            is_free = len(self._late) < _NUM_THREADS
            done, late = wait(calls, timeout=MAX_STEP_SECONDS if is_free else 0)
            for call in done:
                index, matcher = calls[call]
                if call.exception() is None:
                    bits[index] = call.result()
                else:  # our bug, or the library's
                    _logger.error("a mask could not be made", exc_info=call.exception())
                    matcher.fail("the server failed")
            for call in late:
                calls[call][1].fail(f"a token took more than {MAX_STEP_SECONDS:g} s")
                if not call.cancel():
                    self._late.append(call)

    def _fill_from_llguidance(
        self, matchers: list[tuple[LLMatcher, int]], bits: npt.NDArray[np.int32]
    ) -> None:
        """Few one after the other, many in parallel."""
        num_bytes = bits.shape[1] * bits.itemsize
        if len(matchers) < _MIN_PARALLEL:
            for matcher, index in matchers:
                matcher.unsafe_compute_mask_ptr(bits[index].ctypes.data, num_bytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, num_bytes, len(bits))

    def _set_ends(
        self, bits: npt.NDArray[np.int32], answer: GuidedAnswer, request: LlmRequest
    ) -> None:
        """Allow every end of this request exactly where the grammar allows one.

        Where nothing else is left only the first is allowed: a single token is forced.
        """
        if answer.matcher.is_error():
            answer.error = _limit_met(answer.matcher)
            bits[:] = 0
            return
        _set_bit(bits, max(self.tokenizer_end_id, 0), False)
        places, ends = _end_words(request.end_ids)
        words = bits.view(np.uint32)
        as_text = words[places] & ends
        words[places] &= ~ends
        is_left = bits.any()
        if answer.matcher.is_accepting():
            if is_left:
                words[places] |= ends
            else:
                _set_bit(bits, request.end_id, True)
        elif not is_left:
            answer.error = _NOTHING_BUT_ENDS if as_text.any() else _NOTHING


def _new_tokens(request: LlmRequest, latest: Mapping[int, int], num_read: int) -> list[int]:
    """The tokens of the answer behind the first ``num_read``."""
    tokens = request.tokens[request.orig_prompt_len + num_read : request.num_drawn_tokens]
    if request.num_pending_tokens:
        tokens.append(latest[request.request_id])
    return tokens


def _follow(matcher: Matcher, tokens: list[int], deadline: float) -> bool:
    """Read ``tokens``, the whole answer; False if one meets a limit, or if time is up."""
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        piece = tokens[start : start + _TOKENS_AT_ONCE]
        if time.monotonic() > deadline or not matcher.consume_tokens(piece):
            return False
    return True


def _limit_met(matcher: Matcher) -> str:
    error = matcher.get_error().removesuffix(_NO_DETAILS).strip()
    return f"'{GUIDE_FIELD}' cannot be followed any further: {error[:300]}"


@lru_cache(maxsize=256)  # the requests of a model end alike
def _end_words(
    end_ids: frozenset[int],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """The words of a row of masks that have bits of ``end_ids``, each once, and these bits."""
    ids = np.array(sorted(end_ids))
    places, owners = np.unique(ids // 32, return_inverse=True)
    bits = np.zeros(len(places), dtype=np.uint32)
    np.bitwise_or.at(bits, owners, np.uint32(1) << (ids % 32).astype(np.uint32))
    return places, bits


def _set_bit(bits: npt.NDArray[np.int32], token: int, value: bool) -> None:
    word, bit = divmod(token, 32)
    words = bits.view(np.uint32)
    if value:
        words[word] |= np.uint32(1 << bit)
    else:
        words[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)


def _forced_tokens(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """For each row of ``bits`` the one token with a bit; -1 if there are more, or none."""
    forced = np.full(len(bits), _NOTHING_FORCED, dtype=np.int32)
    for row in (np.count_nonzero(bits, axis=1) == 1).nonzero()[0]:
        word = int(bits[row].nonzero()[0][0])
        value = int(bits[row, word]) & 0xFFFFFFFF
        if value & (value - 1) == 0:
            forced[row] = word * 32 + value.bit_length() - 1
    return forced
