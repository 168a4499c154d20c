"""Families on the device: tokens and logits of tiny checkpoints by transformers.

The checkpoints are those of the tests (`tests/support/families.py`): float32, weights spread so
that every option of a family shows, windows shorter than the prompt.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpu_parts import checks, engine_checks
from gpu_parts.common import Row, Setting
from inflight_backend.engine import Engine

_NAMES = (
    "llama-bias",
    "mistral",
    "mixtral",
    "qwen2_moe-mixed",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "gemma2",
    "gemma3",
    "gemma4-e2b",
    "gemma4-moe",
    "phi3-longrope",
    "phimoe",
    "gpt_oss",
    "gpt2",
    "gptj",
    "gpt_bigcode",
    "opt-350m",
    "falcon-40b",
    "falcon-rw",
    "bloom",
    "mpt",
    "olmo2",
    "granitemoeshared",
    "cohere2",
    "stablelm-12b",
    "glm4_moe",
    "glm4_moe_lite",
    "youtu",
    "deepseek_v2-lite",
    "deepseek_v3",
    "exaone_moe",
    "llama4",
    "minicpm3",
    "dbrx",
)
"""A family or more of each kind of layer, cache and routing."""
_NUM_TOKENS = 12


def rows(setting: Setting) -> Iterator[Row]:
    """Two rows of each: logits of a prompt, and greedy tokens where steps are recorded."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    yield from checks.rows(setting, _checks(setting))


def _checks(setting: Setting) -> Iterator[checks.Check]:
    if not checks.is_there("transformers"):  # it writes the checkpoints
        return
    for name in _NAMES[:2] if setting.is_dry else _NAMES:
        yield checks.Check(f"{name}: logits and tokens", 2e-3, partial(_compare, setting, name))


def _compare(setting: Setting, name: str) -> tuple[Tensor, Tensor]:
    """Logits of 40 tokens, one below the other, and greedy tokens behind them.

    The tokens are compared with the CPU's, which the tests compare with transformers'."""
    from support.families import write_family

    with tempfile.TemporaryDirectory() as folder:
        tokens, expected = write_family(Path(folder), name)
        config = engine_checks.make_config(setting, "float32", 4)
        engine = Engine.load(Path(folder), config)
        found = engine_checks.logits(engine, tokens.tolist())
        prompts = engine_checks.make_prompts([1, 15, 33, 100], expected.shape[1])
        drawn = torch.tensor(engine_checks.generate(engine, prompts, _NUM_TOKENS))
        reference = Engine.load(Path(folder), engine_checks.on_cpu(config))
        right = torch.tensor(engine_checks.generate(reference, prompts, _NUM_TOKENS))
    # A wrong token weighs as much as all logits.
    wrong = (drawn != right).float().sum().reshape(1) * expected.norm()
    return torch.cat((found.flatten(), wrong)), torch.cat((expected.flatten(), torch.zeros(1)))
