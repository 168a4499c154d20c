"""What the encoder has said: kept by the engine until a context reads it, then in cross blocks."""

from __future__ import annotations

from collections.abc import Sequence

from inflight_scheduler.batch import AnswerAssignment, EncoderRun, ScheduledBatch
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.request import LlmRequest


class EncoderAnswers:
    """Owner of the cross blocks; ``blocks`` has those of the answers that are read."""

    __slots__ = ("_dropped", "_kept", "_running", "blocks")

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self._kept: dict[int, int] = {}  # tokens of answers that no context has read, by request
        self._dropped: list[int] = []  # requests that ended before, not told to the engine yet
        self._running: dict[int, Sequence[LlmRequest]] = {}  # whose encoders run, by iteration

    @property
    def num_kept_tokens(self) -> int:
        """Of answers that no context has read."""
        return sum(self._kept.values())

    def split(
        self, requests: Sequence[LlmRequest]
    ) -> tuple[Sequence[LlmRequest], Sequence[LlmRequest]]:
        """Those whose encoders run, and those whose contexts do."""
        encoding = [request for request in requests if request.is_encoder_init_state]
        if not encoding:
            return encoding, requests
        return encoding, [request for request in requests if not request.is_encoder_init_state]

    def drop(self) -> tuple[int, ...]:
        """Requests whose answers nobody will read, since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def assign(self, contexts: Sequence[LlmRequest]) -> tuple[AnswerAssignment, ...]:
        """Blocks for the answers of those ``contexts`` that start; there must be room."""
        assignments = []
        for request in contexts:
            if self._kept.pop(request.request_id, None) is None:
                continue
            slot, length = request.seq_slot, request.encoder_length
            assert slot is not None
            block_ids = self.blocks.allocate(request.request_id, length)
            assert block_ids is not None, (
                f"request {request.request_id} was scheduled without {length} tokens of cross "
                f"blocks: {self.blocks.num_free_blocks} blocks are free"
            )
            slots = tuple(range(slot, slot + request.num_rows))
            assignments.append(
                AnswerAssignment(slots, request.request_id, length, tuple(block_ids))
            )
        return tuple(assignments)

    def start(self, iteration: int, requests: Sequence[LlmRequest]) -> tuple[EncoderRun, ...]:
        """The encoders of ``requests`` run in that iteration."""
        if requests:
            self._running[iteration] = requests
        self._kept |= {request.request_id: request.encoder_length for request in requests}
        return tuple(
            EncoderRun(each.request_id, each.encoder_tokens or (0,) * each.encoder_length)
            for each in requests
        )

    def finish(self, iteration: int) -> None:
        """They have run, or what comes next runs behind them."""
        for request in self._running.pop(iteration, ()):
            if request.is_encoder_init_state:  # else it has ended meanwhile
                request.finish_encoder()

    def discard(self, batch: ScheduledBatch) -> Sequence[LlmRequest]:
        """The step has failed; those whose encoders ran in it, unless that was assumed. Whether the
        engine still keeps what it was to take or to drop is unknown: it is told again."""
        self._dropped += batch.dropped_answers
        self._dropped += [each.request_id for each in batch.answers]
        return self._running.pop(batch.iteration, ())

    def restore(self, request: LlmRequest, *, is_read: bool) -> bool:
        """Begin in the middle, with the answer for ``request`` kept or, ``is_read``, in its blocks;
        False if there is no room."""
        if not is_read:
            self._kept[request.request_id] = request.encoder_length
            return True
        return self.blocks.allocate(request.request_id, request.encoder_length) is not None

    def release(self, request: LlmRequest) -> None:
        """Give back what ``request`` holds."""
        self.blocks.free(request.request_id)
        if self._kept.pop(request.request_id, None) is not None:
            self._dropped.append(request.request_id)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless nothing is held and all blocks are accounted for."""
        assert not self._kept, f"answers are kept for {list(self._kept)}"
        assert not self._running, f"encoders run in iterations {list(self._running)}"
        assert self.blocks.num_used_blocks == 0, "cross blocks are held"
        self.blocks.check_integrity()
