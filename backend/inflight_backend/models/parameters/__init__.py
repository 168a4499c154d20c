"""Which parameters a decoder has, and from which tensors of the checkpoint each is assembled.

Fusion is data: a parameter lists its sources, which are concatenated; a source may be rearranged on
its way (`Source.convert`). `check_weights` compares the list with the headers of a checkpoint;
loader and ``inflight plan`` both call it.
"""

from inflight_backend.models.parameters.attentions import fused_rows, head_rows
from inflight_backend.models.parameters.decoder import (
    ENCODER,
    decoder_parameters,
    duplicate_names,
    kv_scale_names,
)
from inflight_backend.models.parameters.fitting import (
    PREFIXES,
    assumed,
    check_weights,
    empty_biases,
    fitted,
)
from inflight_backend.models.parameters.rearranging import Picking, picking
from inflight_backend.models.parameters.sources import (
    Cut,
    ParameterSpec,
    Ranges,
    Source,
    num_in,
    packed_bytes,
)

__all__ = [
    "ENCODER",
    "PREFIXES",
    "Cut",
    "ParameterSpec",
    "Picking",
    "Ranges",
    "Source",
    "assumed",
    "check_weights",
    "decoder_parameters",
    "duplicate_names",
    "empty_biases",
    "fitted",
    "fused_rows",
    "head_rows",
    "kv_scale_names",
    "num_in",
    "packed_bytes",
    "picking",
]
