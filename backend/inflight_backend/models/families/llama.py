"""Llama 1 to 3.x: the plain decoder, with biases where the configuration asks for them."""

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.families.registry import DecoderOptions, register_family


@register_family("LlamaForCausalLM", "llama")
def read_options(reader: JsonReader) -> DecoderOptions:
    """``attention_bias`` puts a bias on all four projections, ``mlp_bias`` on the other three."""
    has_bias = reader.boolean("attention_bias", default=False)
    return DecoderOptions(
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=reader.boolean("mlp_bias", default=False),
        is_num_kv_heads_required=False,  # Llama 1 has no such key: every head is its own
    )
