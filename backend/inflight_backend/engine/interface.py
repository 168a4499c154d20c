"""The engine interface of the batch manager, and the types that cross it beside plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from inflight_scheduler import ScheduledBatch

if TYPE_CHECKING:  # torch: seconds to import
    from inflight_backend.models.blocks.lora import Adapter

Logits = npt.NDArray[np.float32]

TokenMasks = npt.NDArray[np.int32]
"""What rows may draw, [num_masks, 2 + ceil(vocab / 32)]: see `inflight_kernels.reference`."""

MaskSource = Callable[[], TokenMasks]
"""Asked once, when the decoder of a step has been started and its draw has not."""

LogitsEdit = Callable[[Any, int | None], None]
"""(logits [1, 1, vocab] of a row on the device, stream, None on a CPU) -> None: changes them in
place."""

LogitsEdits = Sequence[tuple[int, LogitsEdit]]
"""With the row of each, counted among those that draw."""

EditSource = Callable[[], LogitsEdits]
"""Asked like a `MaskSource`, before anything is done to the logits of the step."""


@dataclass(frozen=True, slots=True)
class ContextLogits:
    """Logits [n, vocab] of the tokens at ``start`` and after of a request's text."""

    request_id: int
    start: int
    logits: Logits


@dataclass(frozen=True, slots=True)
class ContextLogProbs:
    """Log probabilities of a request's text: of the tokens at ``start`` + 1 and after [n - 1], as
    each follows those before it, and of all tokens that may follow the last of these [vocab].

    ``top_ids`` and ``top_log_probs`` [n, k]: the likeliest tokens in each place.
    """

    request_id: int
    start: int
    log_probs: Logits
    last: Logits
    top_ids: Logits
    top_log_probs: Logits


TopLogProbs = tuple[list[int], list[float]]


@dataclass(slots=True)
class StepOutputs:
    """By request id: log probability and logits [vocab] of each token drawn, both before anything
    was done to the logits, its rank by them (how many tokens are at least as likely), and ids and
    log probabilities of the likeliest tokens in its place, from the likeliest; and the logits and
    log probabilities of prompts. ``candidates`` by slot: the likeliest tokens of rows that search,
    with their log probabilities.

    A request draws one token, or with drafts several, of which only the first may count.
    """

    log_probs: dict[int, list[float]] = field(default_factory=dict)
    ranks: dict[int, list[int]] = field(default_factory=dict)
    top_log_probs: dict[int, list[TopLogProbs]] = field(default_factory=dict)
    generation_logits: dict[int, list[Logits]] = field(default_factory=dict)
    context_logits: list[ContextLogits] = field(default_factory=list)
    context_log_probs: list[ContextLogProbs] = field(default_factory=list)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


def as_array(tensor: Any) -> Logits:
    """A host tensor [...] float32 as numpy."""
    array: Logits = tensor.numpy()
    return array


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes: resident memory of this process, GPU memory held by it, and pinned host memory."""

    cpu: int = 0
    gpu: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class AdapterPages:
    """Memory for adapters on the device: ``num_pages``, each of ``page_rank`` of every linear; an
    adapter may have rank ``max_rank``. ``has_experts``: there is room for those of experts, too."""

    num_pages: int
    page_rank: int
    max_rank: int
    has_experts: bool = False

    def pages_of(self, rank: int) -> int:
        """Pages of an adapter."""
        return -(-rank // self.page_rank)


class PendingStep(Protocol):
    """A step that may still run."""

    def read(self) -> list[int]:
        """Wait for it; one token per last context chunk, then one per generation slot. -1 for a row
        without finite logits. It may be called again."""

    def read_outputs(self) -> StepOutputs | None:
        """What a step whose tokens were read has brought beside them; None if no request asked."""


class StepEngine(Protocol):
    """What the batch manager needs of an engine; `inflight_backend.engine.Engine` is one."""

    @property
    def device_name(self) -> str:
        """Where it runs, for people."""

    @property
    def dtype_name(self) -> str:
        """Type of weights and KV, for people."""

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens of one block."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each group of layers, which have block tables of their own, the tokens that it looks
        back on; None for all. See `BlockManager`."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def max_seq_len(self) -> int:
        """Prompt plus new tokens of a request, at most."""

    @property
    def max_num_tokens(self) -> int:
        """Tokens of one plan, at most."""

    @property
    def max_beam_width(self) -> int:
        """Beams of a request, at most."""

    @property
    def is_asynchronous(self) -> bool:
        """True when `submit` returns before the step has run."""

    @property
    def supports_block_reuse(self) -> bool:
        """False for one that keeps states beside its blocks, and no snapshots of them: what a block
        holds is not all there is of its tokens."""

    @property
    def num_snapshots(self) -> int | None:
        """Snapshots of the states that it keeps beside its blocks; None if it keeps none. See
        `StateSnapshots`."""

    @property
    def num_cross_blocks(self) -> int:
        """Blocks for the answers of an encoder; 0 without one."""

    @property
    def max_encoder_len(self) -> int:
        """Tokens that the encoder reads of a request, at most; 0 without one."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """What a text behind an encoder begins with, if its request does not say."""

    @property
    def supports_drafts(self) -> bool:
        """True when drafts may be verified."""

    @property
    def adapter_pages(self) -> AdapterPages | None:
        """Its memory for adapters; None if it runs without any."""

    def prepare_adapter(self, adapter: Adapter) -> Any:
        """What `load_adapter` takes; any thread may call it, and it may take long."""

    def load_adapter(self, place: int, adapter: Any) -> None:
        """The steps submitted from now on find ``adapter`` (of `prepare_adapter`) in that place,
        and no longer what was there; None: nothing. Those in place must fit `adapter_pages`."""

    def prepare_thread(self) -> None:
        """Called once, first of all in the thread that runs the steps."""

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step; at most two may be unread, and they are read in order."""

    def mask_next(self, source: MaskSource) -> None:
        """The next plan draws under the masks of ``source``, whose rows count the tokens of the
        plan in order. It is asked while the decoder runs, so it may wait for the step before."""

    def edit_next(self, source: EditSource) -> None:
        """Have the edits of ``source`` done to the logits of the next plan, before anything else.
        It is asked as that of `mask_next` is."""

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use; cheap enough for every iteration, so those of the process may be of some
        tenths of a second ago."""


@runtime_checkable
class RankedEngine(Protocol):
    """What a `StepEngine` of several ranks has beside."""

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called, on any thread, as soon as a rank has died or fallen silent; every
        later call of the engine raises `EngineLost`."""

    def close(self) -> None:
        """End the other ranks; comes last."""
