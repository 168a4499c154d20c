"""What ``inflight whatif`` answers: a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight_recorder.cost_model import CostModel
    from inflight_recorder.workload import Summary

TOLERANCE = 0.1
"""How much faster or slower each iteration is taken to be for the range of the first tokens."""

MEASURED = "measured"
_COLUMNS = (
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("TTFT p50", "ttft_p50", "{:,.1f} ms"),
    ("p99", "ttft_p99", "{:,.1f} ms"),
    ("ITL p50", "itl_p50", "{:,.1f} ms"),
    ("p99", "itl_p99", "{:,.1f} ms"),
    ("seconds", "seconds", "{:,.2f}"),
    ("batch", "max_batch", "{:,}"),
    ("pauses", "num_pauses", "{:,}"),
    ("recomputed", "num_recomputed_tokens", "{:,}"),
    ("refused", "num_refused", "{:,}"),
    ("unanswered", "num_unanswered", "{:,}"),
)
_BATCH_COLUMN = [field for _, field, _ in _COLUMNS].index("max_batch")
_RANGE_COLUMN = 3  # behind the median whose range it is


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row. ``ttft_range``: the median when iterations are faster and slower by `TOLERANCE`."""

    name: str
    summary: Summary
    ttft_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that was found out. ``recorded_batch`` is the largest one of the recording.

    Of the recorded requests ``num_found`` are in no prediction, and the end of ``num_unended`` is
    not known. ``num_left_out`` of a trace have no tokens to run.
    """

    predictions: Sequence[Prediction]
    cost: CostModel
    num_jobs: int
    num_samples: int
    recorded_batch: int
    num_found: int
    num_unended: int
    num_left_out: int = 0

    def to_json(self) -> str:
        """For programs; times in milliseconds."""
        rows: list[dict[str, Any]] = [
            {"setting": row.name, **asdict(row.summary), "ttft_p50_range": row.ttft_range}
            for row in self.predictions
        ]
        cost = asdict(self.cost) | {"mean_noise": self.cost.mean_noise}
        del cost["noise"]  # thousands of numbers
        content = {
            "cost_model": cost,
            "recorded_batch": self.recorded_batch,
            "num_in_flight_at_start": self.num_found,
            "num_unended": self.num_unended,
            "num_left_out": self.num_left_out,
        }
        return json.dumps({**content, "rows": rows}, indent=1)

    def to_text(self) -> str:
        """For people: columns of text, the notes underneath."""
        titles = ["setting", *(title for title, _, _ in _COLUMNS)]
        titles.insert(_RANGE_COLUMN, f"±{100 * TOLERANCE:.0f} %")
        lines = [titles, *map(self._texts, self.predictions)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                text.rjust(width) if column else text.ljust(width)
                for column, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*shown, "", *self._notes()])

    def _texts(self, row: Prediction) -> list[str]:
        texts = [shape.format(getattr(row.summary, field)) for _, field, shape in _COLUMNS]
        if self._is_beyond(row):
            texts[_BATCH_COLUMN] += "*"
        span = "" if row.ttft_range is None else "{:,.0f} to {:,.0f}".format(*row.ttft_range)
        return [row.name, *texts[: _RANGE_COLUMN - 1], span, *texts[_RANGE_COLUMN - 1 :]]

    def _is_beyond(self, row: Prediction) -> bool:
        return row.summary.max_batch > self.recorded_batch

    def _notes(self) -> list[str]:
        from inflight_recorder.timeline import count

        notes = [
            f"{self.num_jobs:,} requests; an iteration is predicted within "
            f"{100 * self.cost.relative_error:.0f} % on average, learnt from "
            f"{self.num_samples:,} of the recording.",
        ]
        if self.num_found:
            notes.append(
                f"{count(self.num_found, 'request')} more, in flight when the recording began: "
                "measured from there, and not predicted."
            )
        if self.num_unended:
            notes.append(
                f"{count(self.num_unended, 'request')} had not ended when the recording did: "
                "predicted to use all their tokens."
            )
        if self.num_left_out:
            notes.append(
                f"{count(self.num_left_out, 'request')} more of the trace, without a prompt or "
                "without an answer: left out."
            )
        if any(row.ttft_range is not None for row in self.predictions):
            notes.append(
                f"±{100 * TOLERANCE:.0f} %: the median time to the first token if every iteration "
                f"took {100 * TOLERANCE:.0f} % less, or more."
            )
        if any(row.summary.num_unanswered for row in self.predictions):
            notes.append(
                "unanswered: ended without a token. A request recorded so (expired, stopped, "
                "failed) ends so again as long after its arrival, unless it has a token by then."
            )
        if any(self._is_beyond(row) for row in self.predictions):
            notes.append(
                f"* batches larger than any recorded ({self.recorded_batch}): what their "
                "iterations take is extrapolated."
            )
        return notes
