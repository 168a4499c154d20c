"""Triton custom metrics, set from the statistics JSON; the table is `inflight_client.protocol`.

With Triton's ``--log-verbose=1`` each JSON from which the gauges were set is a line of its log.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from inflight_backend.triton.parent import leave_if_orphaned
from inflight_client.protocol import (
    INPUT_LENGTHS,
    METRICS,
    OUTPUT_LENGTHS,
    V1_METRICS,
    MetricFamilySpec,
)

_ITERATION = "Iteration Counter"


class TritonMetrics:
    """What is on Triton's metrics port. Each change is a round trip to the server (about 40 us)."""

    def __init__(self, pb_utils: Any, model: str, version: str, *, is_v1: bool = False) -> None:
        self._logger = pb_utils.Logger
        self._labels = {"model": model, "version": version}
        self._gauges: list[tuple[str, Any]] = []
        self._families = []  # a metric lives as long as its family does
        self._histograms: dict[str, Any] = {}
        self._last_values: dict[str, float] = {}
        self._last_iteration: object = None
        for spec in V1_METRICS if is_v1 else METRICS:
            kind = getattr(pb_utils.MetricFamily, spec.kind.upper())
            family = pb_utils.MetricFamily(name=spec.name, description=spec.meaning, kind=kind)
            self._families.append(family)
            self._add(spec, family)

    def _add(self, spec: MetricFamilySpec, family: Any) -> None:
        for value, key in spec.values.items():
            labels = {**self._labels, spec.label: value}
            if spec.kind == "histogram":
                buckets = [float(bound) for bound in spec.buckets]
                self._histograms[spec.name] = family.Metric(labels=labels, buckets=buckets)
            elif spec.kind == "gauge":
                self._gauges.append((key, family.Metric(labels=labels)))
            else:  # a counter of what does not happen here: it is there, and 0
                self._families.append(family.Metric(labels=labels))

    def update(self, stats_json: str, lengths: Iterable[tuple[int, int]] = ()) -> None:
        """Set every gauge whose value changed since the last call; count ``lengths``, the tokens of
        prompt and answer of requests that have ended since."""
        stats = json.loads(stats_json)
        for key, gauge in self._gauges:
            value = _to_number(stats.get(key, 0))
            if self._last_values.get(key) != value:
                leave_if_orphaned()
                gauge.set(value)
                self._last_values[key] = value
        for num_input, num_output in lengths:
            leave_if_orphaned()
            self._histograms[INPUT_LENGTHS.name].observe(num_input)
            self._histograms[OUTPUT_LENGTHS.name].observe(num_output)
        if stats.get(_ITERATION) != self._last_iteration:
            self._last_iteration = stats.get(_ITERATION)
            self._logger.log_verbose(stats_json)


def _to_number(value: object) -> float:
    """A gauge holds a number; the time stamp becomes seconds since the epoch."""
    if isinstance(value, str):
        return datetime.strptime(value, "%m-%d-%Y %H:%M:%S").timestamp()
    assert isinstance(value, int | float)
    return float(value)
