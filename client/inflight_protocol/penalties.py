"""Presence and frequency penalties as OpenAI and vLLM mean them, in the numbers of the wire.

Theirs count the tokens of the answer and are subtracted before the temperature divides; those of
the wire (TensorRT-LLM's) count the prompt as well and are subtracted after it.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMES = ("presence_penalty", "frequency_penalty")

_WHOLE_PROMPT = 2**31 - 1
_GREEDY = 1e-5  # no draw: vLLM's bound. A penalty divided by less is more than the wire takes


def to_wire(values: Mapping[str, float]) -> dict[str, float]:
    """The tensors that stand for the penalties among ``values``, and for what else they change.

    ``values`` by tensor name; of the others ``temperature`` is looked at (1 if it is missing).
    Nothing without penalties.
    """
    penalties = {name: values[name] for name in NAMES if values.get(name)}
    if not penalties:
        return {}
    temperature = values.get("temperature", 1.0)
    if 0.0 <= temperature < _GREEDY:
        return {**penalties, "temperature": 0.0, "prompt_ignore_length": _WHOLE_PROMPT}
    scaled = {name: penalty / temperature for name, penalty in penalties.items()}
    return {**scaled, "prompt_ignore_length": _WHOLE_PROMPT}
