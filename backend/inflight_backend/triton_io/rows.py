"""Several prompts in one Triton request: each row of its tensors is a request of its own.

Rows are told apart by ``batch_index`` and end together, as the sequences of one prompt do
(`sequences`). A row that is refused refuses them all, before any has started.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import Array

_PROMPTS = ("input_ids", "text_input")


def split_rows(inputs: Mapping[str, Array]) -> list[Mapping[str, Array]]:
    """The inputs of each row, with a batch dimension of 1; ``inputs`` itself for a single row.

    Prompts of different lengths are padded, and ``input_lengths`` says where each ends. Raises
    `InvalidRequest` for a tensor with another number of rows than the prompt.
    """
    prompt = next((inputs[name] for name in _PROMPTS if name in inputs), None)
    if prompt is None or prompt.ndim < 2 or len(prompt) < 2:
        return [inputs]
    num_rows = len(prompt)
    for name, tensor in inputs.items():
        if tensor.ndim == 0 or len(tensor) != num_rows:
            shape = list(tensor.shape)
            raise InvalidRequest(
                f"'{name}' has shape {shape}, but the prompt has {num_rows} rows: the first "
                "dimension of every tensor must be the same"
            )
    return [
        {name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in range(num_rows)
    ]
