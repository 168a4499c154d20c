"""The sampling settings of `inflight_scheduler.sampling` as inputs of the model."""

from __future__ import annotations

from inflight_protocol.specs import TensorSpec, scalar
from inflight_scheduler.sampling import SETTINGS

SAMPLING_INPUTS: dict[str, TensorSpec] = {
    setting.tensor: scalar(setting.tensor, setting.dtype, setting.meaning)
    for setting in SETTINGS.values()
}
"""By name, in the order of the table."""

SAMPLING_OPTIONS: dict[str, str] = {
    setting.option: setting.tensor for setting in SETTINGS.values() if setting.option
}
"""Name in OpenAI's API, vLLM's JSON and our clients -> input."""
