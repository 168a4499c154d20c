"""What of a PromQL expression goes wrong in silence: names, labels, and sides that never meet."""

from __future__ import annotations

import re

from inflight_protocol import METRICS, VLLM_METRICS

FAMILY_TO_LABELS = {
    family.name: {family.label: set(family.values)} for family in (*METRICS, *VLLM_METRICS)
}

_SELECTOR = re.compile(
    r"\b(nv_\w+|vllm:\w+|inflight_\w+_(?:total|reuse)|inflight_lora)(?:\{([^}]*)\})?"
)
_OF_HISTOGRAM = re.compile(r"_(?:sum|count|bucket)$")
_IGNORED = re.compile(r"\bignoring \(([^)]*)\)")


def selectors_of(expression: str) -> list[tuple[str, dict[str, str]]]:
    """Family and labels of each selector, but for the name of the model."""
    found = []
    for name, matchers in _SELECTOR.findall(expression):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
        for name_of_model in ("model", "model_name"):
            labels.pop(name_of_model, None)
        family = _OF_HISTOGRAM.sub("", name)
        found.append((family if family in FAMILY_TO_LABELS else name, labels))
    return found


def check(expression: str, families_of_triton: set[str]) -> None:
    """Fail unless every selector names one metric that exists, or is summed over its label, and the
    sides of an operator have the same labels: others match nothing, without an error."""
    selectors = selectors_of(expression)
    for family, labels in selectors:
        if family in families_of_triton:
            assert labels == {}
            continue
        assert family in FAMILY_TO_LABELS, f"unknown family {family}"
        ((label, values),) = FAMILY_TO_LABELS[family].items()
        is_summed = not label or f"sum by ({label}) " in expression
        assert labels.get(label) in values or is_summed, (family, labels)
        assert set(labels) <= {label}
    if len(selectors) > 1 and "sum(" not in expression:
        own_labels = {label for _, labels in selectors for label in labels}
        ignored = {label for each in _IGNORED.findall(expression) for label in each.split(", ")}
        assert ignored == own_labels, f"the sides of {expression} never meet"
