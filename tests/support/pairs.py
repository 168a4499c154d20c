"""Tiny random checkpoints of the families with an encoder and a decoder, by transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from support.families import VOCAB_SIZE

_T5: dict[str, Any] = {
    "d_model": 48,
    "d_kv": 20,
    "d_ff": 80,
    "num_heads": 4,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11,
    "decoder_start_token_id": 0,
}
_BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
}

PAIR_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5),
    "t5-gated": ("t5", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "flan-t5": ("t5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", _T5),
    "umt5": ("umt5", _T5),
    "bart": ("bart", _BART),
    "bart-scaled": ("bart", _BART | {"scale_embedding": True, "activation_function": "relu"}),
    "mbart": ("mbart", _BART),
    "m2m_100": ("m2m_100", _BART),
}
"""Name -> ``model_type`` and its configuration."""


@dataclass
class Pair:
    """A checkpoint and the model that wrote it."""

    folder: Path
    oracle: Any

    @torch.inference_mode()
    def logits(self, source: list[int], text: list[int]) -> torch.Tensor:
        """[len(text), vocab] of ``text`` behind what the encoder says of ``source``."""
        ids, decoder_ids = torch.tensor([source]), torch.tensor([text])
        found: torch.Tensor = self.oracle(input_ids=ids, decoder_input_ids=decoder_ids).logits[0]
        return found

    @torch.inference_mode()
    def greedy(self, source: list[int], num_new: int, start: list[int]) -> list[int]:
        """The likeliest ``num_new`` tokens behind ``start``, as transformers generates them."""
        found = self.oracle.generate(
            torch.tensor([source]),
            attention_mask=torch.ones(1, len(source), dtype=torch.long),
            decoder_input_ids=torch.tensor([start]),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            forced_eos_token_id=None,
        )
        tokens: list[int] = found[0, len(start) :].tolist()
        return tokens


def write_pair(folder: Path, name: str) -> Pair:
    """Write the checkpoint of a variant; its head is of its own where the variant unties it."""
    import transformers

    model_type, changes = PAIR_VARIANTS[name]
    config = transformers.AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **changes)
    torch.manual_seed(0)
    make = transformers.AutoModelForSeq2SeqLM.from_config
    model = make(config, attn_implementation="eager").float().eval()
    if changes.get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB_SIZE, config.d_model))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        buffers = [each for each in model.named_buffers() if each[0].endswith("logits_bias")]
        for each, tensor in [*model.named_parameters(), *buffers]:
            noise = torch.randn(tensor.shape, generator=generator)
            if "relative" in each:
                tensor.copy_(noise)
            elif tensor.dim() == 1 or each.endswith("logits_bias"):
                tensor.add_(0.2 * noise)
            elif "shared" in each or "embed" in each or "lm_head" in each:
                tensor.copy_(0.5 * noise)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return Pair(folder, model)


def write_tokenizer(folder: Path) -> Any:
    """T5's, of letters and of words' beginnings."""
    import transformers

    pieces = ["\u2581", *ascii_lowercase, *(f"\u2581{each}" for each in ascii_lowercase)]
    pieces += [f"{one}{other}" for one in "aeiou" for other in "lmnrst"]
    scores = [(piece, -float(len(pieces) - place)) for place, piece in enumerate(pieces)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = transformers.T5Tokenizer(vocab=[*special, *scores], extra_ids=0)
    tokenizer.save_pretrained(folder)
    return tokenizer
