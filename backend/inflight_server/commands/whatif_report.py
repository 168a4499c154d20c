"""What ``inflight whatif`` answers: a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight_recorder.cost_model import CostModel
    from inflight_recorder.workload import Summary, Workload

TOLERANCE = 0.1
"""How much faster or slower each iteration is taken to be for the range of the first tokens."""

_COLUMNS = (
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("TTFT p50", "ttft_p50", "{:,.1f} ms"),
    ("p99", "ttft_p99", "{:,.1f} ms"),
    ("ITL p50", "itl_p50", "{:,.1f} ms"),
    ("p99", "itl_p99", "{:,.1f} ms"),
    ("seconds", "seconds", "{:,.2f}"),
    ("hits", "hit_rate", "{:.0%}"),
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
    """One row. ``ttft_range``: the median when iterations are faster and slower by `TOLERANCE`; of
    several servers behind a ``router`` it is left out."""

    name: str
    summary: Summary
    ttft_range: tuple[float, float] | None = None
    num_replicas: int = 1
    router: str | None = None


class Answer:
    """The predictions for ``requests``, under settings and with prices from a recording."""

    def __init__(
        self,
        predictions: Sequence[Prediction],
        cost: CostModel,
        recorded: Workload,
        requests: Workload,
    ) -> None:
        """Where ``requests`` are the recorded ones, what was measured of them is the first row."""
        self._cost = cost
        self._requests = requests
        self._num_samples = len(recorded.samples)
        measured = recorded.latencies.summary(reuse=recorded.reuse)
        self._recorded_batch = measured.max_batch
        first = [Prediction("measured", measured)] if requests is recorded else []
        self._rows = [*first, *predictions]

    def to_json(self) -> str:
        """For programs; times in milliseconds."""
        rows: list[dict[str, Any]] = [
            {
                "setting": row.name,
                "num_replicas": row.num_replicas,
                "router": row.router,
                **asdict(row.summary),
                "ttft_p50_range": row.ttft_range,
            }
            for row in self._rows
        ]
        cost = self._cost._asdict() | {"mean_noise": self._cost.mean_noise}
        del cost["noise"]  # thousands of numbers
        content = {
            "cost_model": cost,
            "recorded_batch": self._recorded_batch,
            "num_in_flight_at_start": self._requests.num_found,
            "num_unended": self._requests.num_unended,
            "num_left_out": self._requests.num_left_out,
        }
        return json.dumps({**content, "rows": rows}, indent=1)

    def to_text(self) -> str:
        """For people: columns of text, the notes underneath."""
        titles = ["setting", *(title for title, _, _ in _COLUMNS)]
        titles.insert(_RANGE_COLUMN, f"±{100 * TOLERANCE:.0f} %")
        lines = [titles, *map(self._texts, self._rows)]
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
        return row.summary.max_batch > self._recorded_batch

    def _notes(self) -> list[str]:
        from inflight_recorder.timeline import count

        requests, percent = self._requests, f"{100 * TOLERANCE:.0f} %"
        notes: list[tuple[object, str]] = [
            (
                True,
                f"{len(requests.jobs):,} requests; an iteration is predicted within "
                f"{100 * self._cost.relative_error:.0f} % on average, learnt from "
                f"{self._num_samples:,} of the recording.",
            ),
            (
                requests.num_found,
                f"{count(requests.num_found, 'request')} more, in flight when the recording began: "
                "measured from there, and not predicted.",
            ),
            (
                requests.num_unended,
                f"{count(requests.num_unended, 'request')} had not ended when the recording did: "
                "predicted to use all their tokens.",
            ),
            (
                requests.num_left_out,
                f"{count(requests.num_left_out, 'request')} more of the trace, without a prompt or "
                "without an answer: left out.",
            ),
            (
                any(row.ttft_range is not None for row in self._rows),
                f"±{percent}: the median time to the first token if every iteration "
                f"took {percent} less, or more.",
            ),
            (
                any(row.summary.num_unanswered for row in self._rows),
                "unanswered: ended without a token. A request recorded so (expired, stopped, "
                "failed) ends so again as long after its arrival, unless it has a token by then.",
            ),
            (
                any(row.router is not None for row in self._rows),
                "replicas: servers with these settings behind a router, which share the requests; "
                "batch is the largest of one of them.",
            ),
            (
                any(map(self._is_beyond, self._rows)),
                f"* batches larger than any recorded ({self._recorded_batch}): what their "
                "iterations take is extrapolated.",
            ),
        ]
        return [text for is_shown, text in notes if is_shown]
