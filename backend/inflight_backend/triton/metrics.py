"""Triton custom metrics, set from the statistics JSON; the table is `inflight_protocol`.

With Triton's ``--log-verbose=1`` each JSON that changed a gauge is a line of its log.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from inflight_backend.process_guard import leave_if_orphaned
from inflight_protocol import (
    CACHE_CONFIG,
    INPUT_LENGTHS,
    METRICS,
    OUTPUT_LENGTHS,
    V1_METRICS,
    VLLM_METRICS,
    MetricFamilySpec,
)

_TIMESTAMP = "Timestamp"
_REPEAT_SECONDS = 10.0
"""How often gauges are set whether or not they changed: the page is shared with the process of a
model that was loaded again, which leaves its own last numbers there when it ends."""


class TritonMetrics:
    """What is on Triton's metrics port. Each change is a round trip to the server (about 40 us)."""

    def __init__(
        self,
        pb_utils: Any,
        model: str,
        version: str,
        *,
        is_v1: bool = False,
        served_name: str = "",
        is_draft: bool = False,
        cache_config: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """``served_name``: what clients of OpenAI's API call the model; ``cache_config``: the
        labels of `CACHE_CONFIG`. ``is_draft``: it guesses for another model, whose numbers alone
        are for gateways: under vLLM's names the two may have the same labels."""
        self._logger = pb_utils.Logger
        self._names = {"model": model, "model_name": served_name or model}
        self._version = version
        self._gauges: dict[str, list[Any]] = {}  # by key of the statistics
        self._families = []  # a metric lives as long as its family does
        self._histograms: dict[str, Any] = {}
        self._counters: dict[tuple[str, str], Any] = {}  # by name of the family and value
        self._last_values: dict[str, float] = {}
        self._repeat_at = -math.inf
        self._last_logged: dict[str, Any] = {}
        self._left_out = {spec.name for spec in VLLM_METRICS} if is_draft else set()
        for spec in (*(V1_METRICS if is_v1 else METRICS), *(() if is_draft else VLLM_METRICS)):
            kind = getattr(pb_utils.MetricFamily, spec.kind.upper())
            family = pb_utils.MetricFamily(name=spec.name, description=spec.meaning, kind=kind)
            self._families.append(family)
            self._add(spec, family)
        if is_draft:
            return
        family = pb_utils.MetricFamily(
            name=CACHE_CONFIG,
            description="Size of the KV cache, in the labels",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        sizes = {name: str(size) for name, size in cache_config.items()}
        metric = family.Metric(labels={"model_name": self._names["model_name"], **sizes})
        metric.set(1)
        self._cache_config = family, metric

    def _add(self, spec: MetricFamilySpec, family: Any) -> None:
        for value, key in spec.values.items():
            labels = {spec.model_label: self._names[spec.model_label], "version": self._version}
            labels |= {spec.label: value} if spec.label else {}
            if spec.kind == "histogram":
                buckets = [float(bound) for bound in spec.buckets]
                self._histograms[spec.name] = family.Metric(labels=labels, buckets=buckets)
            elif spec.kind == "gauge":
                self._gauges.setdefault(key, []).append(family.Metric(labels=labels))
            else:  # there from the start, and 0
                self._counters[spec.name, value] = family.Metric(labels=labels)

    def close(self) -> None:
        """No numbers come any more. Triton shows for ever what a model that is unloaded leaves, so
        that an alert on their age would never end; to take them off the page, while another one of
        this name is being loaded, hangs 24.10."""
        for gauge in self._gauges[_TIMESTAMP]:
            leave_if_orphaned()
            gauge.set(math.nan)

    def update(
        self,
        stats_json: str | None,
        lengths: Iterable[tuple[int, int]] = (),
        counts: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Set every gauge whose value changed since the last call, now and then all of them, unless
        ``stats_json`` is None; count ``lengths``, the tokens of prompt and answer of requests that
        have ended since; add ``counts``, by name of the family and value."""
        if stats_json is not None:
            self._set_gauges(stats_json)
        for num_input, num_output in lengths:
            leave_if_orphaned()
            self._histograms[INPUT_LENGTHS.name].observe(num_input)
            self._histograms[OUTPUT_LENGTHS.name].observe(num_output)
        for name, numbers in counts.items():
            if name in self._left_out:
                continue
            for kind, number in numbers.items():
                leave_if_orphaned()
                self._counters[name, kind].increment(number)

    def _set_gauges(self, stats_json: str) -> None:
        if (now := time.monotonic()) >= self._repeat_at:
            self._repeat_at = now + _REPEAT_SECONDS
            self._last_values.clear()
        stats = json.loads(stats_json)
        for key, gauges in self._gauges.items():
            value = _to_number(stats.get(key, 0))
            if self._last_values.get(key) != value:
                for gauge in gauges:
                    leave_if_orphaned()
                    gauge.set(value)
                self._last_values[key] = value
        stats.pop(_TIMESTAMP, None)  # which alone is no news
        if stats != self._last_logged:
            self._last_logged = stats
            self._logger.log_verbose(stats_json)


def _to_number(value: object) -> float:
    """A gauge holds a number; the time stamp becomes seconds since the epoch. Of the two times that
    one of an autumn night may be, it is the later one that is not to come."""
    if isinstance(value, str):
        moment = datetime.strptime(value, "%m-%d-%Y %H:%M:%S")
        second = moment.replace(fold=1).timestamp()
        return second if second <= time.time() else moment.timestamp()
    assert isinstance(value, int | float)
    return float(value)
