"""A model folder without weights: what engines read that make their own random ones."""

from __future__ import annotations

import json
from pathlib import Path

from peer_parts.work import Budget


def write_model_folder(folder: Path, budget: Budget) -> None:
    """``config.json`` of the shape, and a tokenizer of a few words for those that insist on one."""
    from tokenizers import Tokenizer, models

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **budget.shape,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for name, content in (("config.json", config), ("tokenizer_config.json", names)):
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
