"""From hidden states to tokens: the logits, what requests want done to them, and the draw.

Beyond temperature, top-k, top-p and min-p a slot has *features*, one bit each; the features of a
step are those of all rows that sample in it. A step without any costs one look at a flag here and
nothing on the device. A step with some always samples eagerly (its decoder may still be a captured
graph), so the tables need no fixed shape or content when graphs are captured.

All state follows from the text: the setup of a slot brings the text so far (so a pause, a cached
prefix or a chunk changes nothing) and every sampled token is added on the device. Nothing here
waits for the device.

A row of a beam search samples nothing. The engine sends the most likely next tokens with their log
probabilities: log softmax of the logits divided by the temperature, after everything else that the
request wants done to them. The host decides which of them are followed (`BeamSearch`), and
`BeamMove` brings that back with the next plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight_backend.engine.config import EngineConfig
from inflight_backend.engine.interface import EditSource, LogitsEdits, MaskSource, TokenMasks
from inflight_backend.engine.memory_plan import COLUMNS, adjustment_shapes
from inflight_backend.engine.outputs import OutputRecorder
from inflight_backend.engine.slot_table import SamplingInputs, SlotTable
from inflight_backend.engine.step_buffer import StepWords, to_device
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.ops import Ops
from inflight_backend.models.parallel.collectives import NO_COLLECTIVES, Collectives
from inflight_kernels.reference import COUNT_UNIT
from inflight_scheduler import SamplingParams, SlotSetup

PENALTIES, BIAS, NGRAMS, WORDS, DECAY, MIN_P, ENDS = 1, 2, 4, 8, 16, 32, 64
_NEEDS_HISTORY = NGRAMS | WORDS

_Columns = tuple[Tensor, Tensor]
_PackedWords = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Words padded to one width [W, K] and their lengths [W]."""
_NO_LENGTHS = np.zeros(0, dtype=np.int32)


class LogitsAdjustments:
    """Owner of counts, biases, texts, words and ends of the slots; the padding slot has a row."""

    def __init__(
        self, num_slots: int, vocab_size: int, max_seq_len: int, device: str, ops: Ops
    ) -> None:
        self._device = device
        self._ops = ops
        self._vocab_size = vocab_size
        self._features = np.zeros(num_slots, dtype=np.int32)
        self._is_used = False
        self._shapes = adjustment_shapes(num_slots, vocab_size, max_seq_len)
        self._tables: dict[str, Tensor] = {}
        self._slot_to_words: dict[int, _PackedWords] = {}
        self._words = self._send_words()
        if device != "cpu":  # the KV pool takes the rest: later there may be no room
            for name in self._shapes:
                self._table(name)

    def set_up(self, setups: Sequence[SlotSetup]) -> None:
        """Take over the setups of a plan."""
        columns_of: dict[int, _Columns] = {}  # biases by identity: sequences of a prompt share one
        has_other_words = False
        for setup in setups:
            slot, before = setup.slot, int(self._features[setup.slot])
            features = self._features[slot] = features_of(setup.sampling)
            if features & PENALTIES:
                self._count(setup)
            if (features | before) & BIAS:
                self._set_bias(setup, columns_of)
            if features & _NEEDS_HISTORY:
                text = np.array(setup.tokens, dtype=np.int32)
                self._table("history")[slot, : len(text)] = self._send(text)
            if (features | before) & WORDS:
                self._set_words(setup)
                has_other_words = True
            if (features | before) & ENDS:
                self._set_ends(setup)
        if has_other_words:  # once for a plan: it sends the words of all slots
            self._words = self._send_words()
        if setups:
            self._is_used = bool(self._features.any())

    def features(self, slots: Sequence[int]) -> int:
        """The features of the rows that draw now."""
        if not self._is_used:
            return 0
        return int(np.bitwise_or.reduce(self._features[list(slots)], initial=0))

    def apply(
        self, logits: Tensor, sampling: SamplingInputs, features: int, max_length: int
    ) -> None:
        """Change logits [N, vocab] in place; texts have at most ``max_length`` tokens."""
        slots, rows = sampling.slots, sampling.rows
        if features & (PENALTIES | BIAS):
            first = COLUMNS["repetition_penalty"]
            self._ops.adjust_logits(
                logits,
                slots,
                sampling.floats("temperature").contiguous(),
                self._tables["bias"] if features & BIAS else None,
                self._tables["counts"] if features & PENALTIES else None,
                rows.view(torch.float32)[:, first : first + 3].contiguous(),
            )
        if features & NGRAMS:
            sizes = sampling.integers("no_repeat_ngram_size").contiguous()
            self._ops.ban_repeated_ngrams(
                logits, slots, sampling.positions, sizes, self._tables["history"], max_length
            )
        if features & WORDS:
            row_of_slot = torch.full(
                (len(self._tables["history"]),), -1, dtype=torch.int32, device=logits.device
            )
            numbers = torch.arange(len(slots), dtype=torch.int32, device=logits.device)
            row_of_slot[slots] = numbers
            words, lengths, owners = self._words
            history = self._tables["history"]
            self._ops.ban_words(
                logits, row_of_slot, sampling.positions, words, lengths, owners, history
            )
        if features & ENDS:
            forbid_ends(logits, self._tables["ends"][slots].long(), sampling)

    def record(
        self, sampling: SamplingInputs, tokens: Tensor, features: int, parameters: Tensor
    ) -> None:
        """Add the drawn tokens [N] to what is remembered; ``parameters``: the table of slots."""
        slots, tokens = sampling.slots, tokens.clamp(min=0)
        if features & PENALTIES:
            counts = self._tables["counts"]
            counts[slots, tokens] = counts[slots, tokens] + COUNT_UNIT
        if features & _NEEDS_HISTORY:
            history = self._tables["history"]
            # The last place of a text is never looked at: the request ends with it.
            places = sampling.positions.clamp(max=history.shape[1] - 1)
            history[slots, places] = tokens.int()
        if features & DECAY:
            decayed = sampling.floats("top_p") * sampling.floats("top_p_decay")
            decayed = torch.maximum(decayed, sampling.floats("top_p_min"))
            is_reset = tokens == sampling.integers("top_p_reset_id")
            top_p = torch.where(is_reset, sampling.floats("initial_top_p"), decayed)
            parameters.view(torch.float32)[slots, COLUMNS["top_p"]] = top_p

    def move(self, slots: Tensor, parents: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """The texts of ``slots`` [N] become those of ``parents`` [N], then ``tokens`` [N], which
        take ``positions`` [N]. All parents are read first."""
        if not self._is_used:
            return
        if "counts" in self._tables:
            counts = self._tables["counts"]
            counts[slots] = counts[parents]
            counts[slots, tokens] = counts[slots, tokens] + COUNT_UNIT
        if "history" in self._tables:
            history = self._tables["history"]
            history[slots] = history[parents]
            history[slots, positions] = tokens.int()

    def _count(self, setup: SlotSetup) -> None:
        """Count the text so far: what is ignored for presence and frequency is only seen."""
        ignored = min(setup.sampling.prompt_ignore_length, setup.prompt_len)
        seen = np.unique(np.array(setup.tokens[:ignored], dtype=np.int64))
        ids, numbers = np.unique(
            np.array(setup.tokens[ignored:], dtype=np.int64), return_counts=True
        )
        row = self._table("counts")[setup.slot].zero_()
        row.index_fill_(0, self._send(seen), 1)  # torch would wait to copy the 1 of row[...] = 1
        row[self._send(ids)] += self._send((numbers * COUNT_UNIT).astype(np.int32))

    def _set_bias(self, setup: SlotSetup, columns_of: dict[int, _Columns]) -> None:
        """Zero but for the request's bias; words of one token are forbidden for good."""
        row = self._table("bias")[setup.slot].zero_()
        if bias := setup.sampling.bias:
            if id(bias) not in columns_of:
                columns_of[id(bias)] = self._send_bias(bias)
            ids, values = columns_of[id(bias)]
            row[ids] = values
        single = [word[0] for word in setup.sampling.bad_words if len(word) == 1]
        if single:
            row.index_fill_(0, self._send(np.array(single, dtype=np.int64)), -torch.inf)

    def _set_words(self, setup: SlotSetup) -> None:
        self._slot_to_words.pop(setup.slot, None)
        words = [word for word in setup.sampling.bad_words if len(word) > 1]
        if words:
            self._slot_to_words[setup.slot] = _pack(words)

    def _set_ends(self, setup: SlotSetup) -> None:
        """Those that wait, and the first one again up to the width of the table; all -1 for none.

        Ends that wait for nothing must not stay: the next owner may have a minimum and no ends.
        """
        table, sampling = self._table("ends"), setup.sampling
        ids = sampling.stop_token_ids if sampling.min_length else ()
        row = np.full(table.shape[1], ids[0] if ids else -1, dtype=np.int32)
        row[: len(ids)] = ids
        table[setup.slot] = self._send(row)

    def _send_bias(self, bias: tuple[tuple[int, float], ...]) -> _Columns:
        """The ids and values of ``bias``, which may have one for each token of the vocabulary."""
        numbers = np.fromiter(chain.from_iterable(bias), np.float64, 2 * len(bias)).reshape(-1, 2)
        return (
            self._send(numbers[:, 0].astype(np.int64)),
            self._send(numbers[:, 1].astype(np.float32)),
        )

    def _send_words(self) -> tuple[Tensor, Tensor, Tensor]:
        words, lengths, slots = _join(self._slot_to_words)
        return self._send(words), self._send(lengths), self._send(slots)

    def _table(self, name: str) -> Tensor:
        if name not in self._tables:
            shape, _ = self._shapes[name]
            dtype = torch.float32 if name == "bias" else torch.int32
            fill = -1 if name == "ends" else 0
            self._tables[name] = torch.full(shape, fill, dtype=dtype, device=self._device)
        return self._tables[name]

    def _send(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(values), self._device)


def features_of(sampling: SamplingParams) -> int:
    """The bits of what ``sampling`` asks for."""
    features = PENALTIES if sampling.has_penalties else 0
    lengths = {len(word) for word in sampling.bad_words}
    if sampling.bias or 1 in lengths:
        features |= BIAS
    if lengths - {1}:
        features |= WORDS
    if sampling.no_repeat_ngram_size:
        features |= NGRAMS
    if sampling.has_decay:
        features |= DECAY
    if sampling.min_p > 0:
        features |= MIN_P
    if sampling.stop_token_ids and sampling.min_length:
        features |= ENDS
    return features


def _pack(words: Sequence[tuple[int, ...]]) -> _PackedWords:
    lengths = np.fromiter(map(len, words), np.int32, len(words))
    packed = np.zeros((len(words), int(lengths.max())), np.int32)
    tokens = np.fromiter(chain.from_iterable(words), np.int32, int(lengths.sum()))
    packed[np.arange(packed.shape[1]) < lengths[:, None]] = tokens
    return packed, lengths


def _join(
    slot_to_words: dict[int, _PackedWords],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The words of all slots padded to one width [W, K], their lengths [W] and slots [W]."""
    lengths = [lengths for _, lengths in slot_to_words.values()]
    counts = [len(each) for each in lengths]
    width = max((words.shape[1] for words, _ in slot_to_words.values()), default=1)
    joined = np.zeros((sum(counts), width), np.int32)
    first = 0
    for words, _ in slot_to_words.values():
        joined[first : first + len(words), : words.shape[1]] = words
        first += len(words)
    slots = np.repeat(np.array(list(slot_to_words), dtype=np.int32), counts)
    return joined, np.concatenate([_NO_LENGTHS, *lengths]), slots


@dataclass(slots=True)
class LogitsRules:
    """What the host wants done to the logits of a step beside what its slots say."""

    edits: EditSource | None = None
    masks: MaskSource | None = None

    def __bool__(self) -> bool:
        return self.edits is not None or self.masks is not None

    def parts(self, num_rows: int, size: int) -> Iterator[tuple[slice, LogitsRules]]:
        """``size`` rows at a time, with the rules for them; each source is asked once."""
        masks = None if self.masks is None else self.masks()
        edits = None if self.edits is None else self.edits()
        for start in range(0, num_rows, size):
            rows = slice(start, start + size)
            yield (
                rows,
                LogitsRules(
                    None if edits is None else partial(_edits_of_rows, edits, rows),
                    None if masks is None else partial(_masks_of_rows, masks, rows),
                ),
            )


def _masks_of_rows(masks: TokenMasks, rows: slice) -> TokenMasks:
    """Those of ``masks`` that are for ``rows``, whose first one is row 0 then."""
    chosen: TokenMasks = masks[(rows.start <= masks[:, 0]) & (masks[:, 0] < rows.stop)]
    chosen[:, 0] -= rows.start
    return chosen


def _edits_of_rows(edits: LogitsEdits, rows: slice) -> LogitsEdits:
    """Those of ``edits`` that are for ``rows``, whose first one is row 0 then."""
    return [(row - rows.start, edit) for row, edit in edits if rows.start <= row < rows.stop]


def forbid_ends(logits: Tensor, ids: Tensor, sampling: SamplingInputs) -> None:
    """Put -inf at ``ids`` [N, K] of rows of logits [N, vocab] whose next token comes before their
    minimum, in place; an id that is none of the vocabulary stands for nothing."""
    places = ids.clamp(0, logits.shape[1] - 1)
    is_early = (sampling.positions < sampling.integers("min_end_position"))[:, None]
    kept = logits.gather(1, places)  # an id that comes twice gets the same value twice
    logits.scatter_(1, places, kept.masked_fill(is_early & (places == ids), -torch.inf))


class BeamRows:
    """Knows which slots search, and how many candidates each wants."""

    def __init__(self, num_slots: int, device: str) -> None:
        self._device = device
        self._num_candidates = np.zeros(num_slots, dtype=np.int64)
        self._is_used = False

    def set_up(self, setups: Sequence[SlotSetup]) -> None:
        """Take over the setups of a plan."""
        for setup in setups:
            self._num_candidates[setup.slot] = setup.num_candidates
        if setups:
            self._is_used = bool(self._num_candidates.any())

    def are_in(self, slots: Sequence[int]) -> bool:
        """Whether any of ``slots`` searches."""
        return self._is_used and bool(self._num_candidates[list(slots)].any())

    def keep(
        self, slots: Sequence[int], logits: Tensor, temperature: Tensor, observer: OutputRecorder
    ) -> None:
        """Send the candidates of the rows of ``slots`` that search.

        logits [N, vocab] float32 and temperature [N], of all rows; 0 counts as 1, since there is no
        draw it could make greedy.
        """
        rows = [row for row, slot in enumerate(slots) if self._num_candidates[slot]]
        numbers = [int(self._num_candidates[slots[row]]) for row in rows]
        index = observer.index(rows, len(slots))
        scale = temperature[index]
        chosen = logits[index] / torch.where(scale > 0, scale, 1.0)[:, None]
        log_probs = torch.log_softmax(chosen, dim=-1)
        values, tokens = log_probs.topk(min(max(numbers), logits.shape[1]), dim=-1)
        observer.record_candidates([slots[row] for row in rows], numbers, tokens, values)

    def without(self, sampling_slots: Tensor, slots: Sequence[int], padding_slot: int) -> Tensor:
        """``sampling_slots`` [N] with the padding slot for rows that search: what was drawn there
        is unused."""
        searches = to_device(torch.from_numpy(self._num_candidates[list(slots)] > 0), self._device)
        return torch.where(searches, padding_slot, sampling_slots)


class Sampler:
    """Owner of all that sampling needs to know of the slots beside their table."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        ops: Ops,
        slots: SlotTable,
        recorder: OutputRecorder,
        ranks: Collectives = NO_COLLECTIVES,
    ) -> None:
        """What is drawn here is told to ``ranks`` (`FollowingSampler`)."""
        self._ranks = ranks
        self._num_rows, self._device = config.num_slots, config.device
        self._normalizes_log_probs = config.normalize_log_probs
        self._decoder, self._ops, self._slots, self._recorder = decoder, ops, slots, recorder
        vocab_size = decoder.config.vocab_size
        self._adjustments = LogitsAdjustments(
            config.num_slots, vocab_size, config.seq_len_limit, config.device, ops
        )
        self._beams = BeamRows(config.num_slots, config.device)

    def set_up(self, setups: Sequence[SlotSetup]) -> None:
        """Take over the setups of a plan."""
        self._adjustments.set_up(setups)
        self._beams.set_up(setups)

    def move(self, words: StepWords) -> None:
        """Rows of a beam search continue the text of others; comes after `SlotTable.move`."""
        slots, parents = words.move_slots.long(), words.move_parents.long()
        positions = self._slots.lengths(slots)
        self._adjustments.move(slots, parents, words.move_tokens.long(), positions)

    def is_plain(self, slots: Sequence[int]) -> bool:
        """Whether `draw` is all that ``slots`` need, and no end may have to wait."""
        return not (
            self._adjustments.features(slots)
            or self._recorder.wants_samples(slots)
            or self._beams.are_in(slots)
            or self._slots.may_forbid_end(slots)
        )

    def sample(
        self,
        hidden: Tensor,
        sampling: SamplingInputs,
        slots: Sequence[int],
        rules: LogitsRules,
    ) -> Tensor:
        """The next token [num_samples] int64 of every row of hidden [num_samples, hidden_size],
        which are those of ``slots``; the tokens are where the next step of their slots finds them.

        Logits take room for as many rows as there may be requests: with drafts there can be more
        rows, which then draw part by part.
        """
        size = self._num_rows
        if len(slots) <= size:
            return self._sample_part(hidden, sampling, slots, rules)
        parts = []
        for rows, own_rules in rules.parts(len(slots), size):
            part = sampling.part(rows)
            parts.append(self._sample_part(hidden[rows], part, slots[rows], own_rules))
        return torch.cat(parts)

    def _sample_part(
        self,
        hidden: Tensor,
        sampling: SamplingInputs,
        slots: Sequence[int],
        rules: LogitsRules,
    ) -> Tensor:
        features = self._adjustments.features(slots)
        is_observed = self._recorder.wants_samples(slots)
        has_beams = self._beams.are_in(slots)
        if not (features or is_observed or rules or has_beams):
            return self.draw(hidden, sampling)
        logits = self._decoder.logits(hidden)
        original = logits.clone() if is_observed else logits
        self._edit(logits, rules.edits)
        self._adjustments.apply(logits, sampling, features, self._slots.longest(slots))
        self._restrict(logits, sampling, rules.masks)
        if has_beams:
            temperature = sampling.floats("temperature")
            self._beams.keep(slots, logits, temperature, self._recorder)
            own = self._beams.without(sampling.slots, slots, self._slots.padding_slot)
            sampling = replace(sampling, slots=own)
        log_probs, has_min_p = None, bool(features & MIN_P)
        if is_observed and self._normalizes_log_probs:
            filters = sampling.filters(has_min_p=has_min_p)
            tokens, log_probs = self._ops.sample_with_log_probs(logits, *filters)
        else:
            tokens = self._choose(logits, sampling, has_min_p=has_min_p)
        self._adjustments.record(sampling, tokens, features, self._slots.parameters)
        if is_observed:
            self._recorder.record_samples(slots, original, tokens, log_probs)
        tokens = self._ranks.share(tokens)
        self._slots.store(sampling.slots, tokens)
        return tokens

    def draw(self, hidden: Tensor, sampling: SamplingInputs) -> Tensor:
        """`sample` for slots without features."""
        if len(hidden) == 0:
            return torch.empty(0, dtype=torch.int64, device=hidden.device)
        logits = self._decoder.plain_logits(hidden)
        self._restrict(logits, sampling, None)
        tokens = self._choose(logits, sampling, has_min_p=False)
        tokens = self._ranks.share(tokens)
        self._slots.store(sampling.slots, tokens)
        return tokens

    def _edit(self, logits: Tensor, source: EditSource | None) -> None:
        """Let the host's edits change rows of logits [N, vocab]."""
        if source is None:
            return
        stream = torch.cuda.current_stream().cuda_stream if logits.is_cuda else None
        for row, edit in source():
            edit(logits[row].view(1, 1, -1), stream)

    def _restrict(
        self, logits: Tensor, sampling: SamplingInputs, source: MaskSource | None
    ) -> None:
        """Put -inf at what the rows of logits [N, vocab] may not draw now, in place."""
        masks = None
        if source is not None:
            masks = to_device(torch.from_numpy(source()), self._device)
        if sampling.may_forbid_end:
            forbid_ends(logits, sampling.integers("end_id").long()[:, None], sampling)
        if masks is not None:
            self._ops.mask_logits(logits, masks)  # last: a token they force is drawn

    def _choose(self, logits: Tensor, sampling: SamplingInputs, *, has_min_p: bool) -> Tensor:
        """A token for every row of logits [num_samples, vocab]."""
        if sampling.is_all_greedy:
            return self._ops.greedy(logits)
        return self._ops.sample(logits, *sampling.filters(has_min_p=has_min_p))
