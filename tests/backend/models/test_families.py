"""Every family against transformers: logits at each position, in chunks and token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_driver import EngineDriver, Job
from support.families import FAMILY_VARIANTS, WRAPPERS, write_family, write_wrapped

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.models.attention import AttentionInputs, HostLengths
from inflight_backend.models.backends import make_cache, make_ops
from inflight_backend.models.blocks.rope import make_tables
from inflight_backend.models.config import (
    AttentionConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.families.registry import FAMILIES, read_model
from inflight_backend.models.kv_cache import RecurrentStates
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.weights import Checkpoint

_BLOCK = 16
Change = Callable[[ModelConfig], ModelConfig]


@torch.inference_mode()
def logits_in_parts(
    folder: Path,
    tokens: torch.Tensor,
    backend: str,
    change: Change | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [T, vocab]: 13 tokens, then 20, then one at a time. ``change`` the model before it is
    made of its parameters."""
    model = read_model(folder)
    with Checkpoint(folder) as checkpoint:
        model = checkpoint.fit(model)
        checkpoint.check(model)
        parameters = checkpoint.load(decoder_parameters(model), dtype, "cpu")
    model = model if change is None else change(model)
    decoder = Decoder(model, parameters, make_ops(backend, "none"))
    _, attention = make_cache(
        model,
        make_tables(model, model.max_position_embeddings, "cpu"),
        8,
        backend=backend,
        tokens_per_block=_BLOCK,
        kv_dtype=dtype,
        device="cpu",
        is_deterministic=False,
        states=RecurrentStates(model.deltas, 1, dtype, "cpu"),
    )
    found, start = [], 0
    for count in (13, 20, *[1] * (len(tokens) - 33)):
        end = start + count
        is_generation = count == 1
        inputs = AttentionInputs(
            num_generations=int(is_generation),
            block_tables=torch.arange(1, 5, dtype=torch.int32)[None],
            context_lengths=torch.tensor([end], dtype=torch.int32),
            query_starts=torch.tensor([1] if is_generation else [0, count], dtype=torch.int32),
            positions=torch.arange(start, end),
            slot_mapping=torch.arange(start, end) + _BLOCK,
            slots=torch.tensor([0]),
            host=HostLengths(np.array([count]), np.array([end])),
        )
        step = attention.begin(inputs)
        hidden = decoder.forward(tokens[start:end], inputs.positions, step, None)
        found.append(decoder.logits(hidden))
        start = end
    return torch.cat(found)


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, *, is_recurrent: bool = False
) -> None:
    """Of a wrong option logits differ by 1e-2 and more, of another order of sums by 1e-5. Those of
    recurrences differ by up to 1e-3 where embeddings differ in their last bit."""
    bound = (1e-3 if is_recurrent else 2e-4) * max(1.0, float(expected.std()))
    assert float((found - expected).abs().max()) < bound


def test_every_family_is_compared() -> None:
    """By its ``model_type``: of one function there may be several architectures."""
    compared = {model_type for model_type, _ in FAMILY_VARIANTS.values()} | WRAPPERS.keys()
    same = {
        "kimi_k2": "deepseek_v3",
        "internlm3": "llama",
        "llava_next": "llava",
        "qwen3_5_moe": "qwen3_5",
        "RefinedWeb": "falcon",
        "RefinedWebModel": "falcon",
    }
    for family in FAMILIES.values():
        assert {same.get(each, each) for each in family.model_types} <= compared


@pytest.mark.fast(8)
@pytest.mark.parametrize("name", FAMILY_VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    tokens, expected = write_family(tmp_path, name)
    is_recurrent = name.startswith(("qwen3_next", "qwen3_5"))
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected, is_recurrent=is_recurrent)


def attention(**changes: Any) -> Change:
    """These options of all layers' attention; a function gets the layer's."""

    def change(_: int, config: AttentionConfig) -> dict[str, Any]:
        return {key: each(config) if callable(each) else each for key, each in changes.items()}

    return lambda model: model.with_attention(change)


def routing(**changes: Any) -> Change:
    """These options of the routing to experts."""

    def change(_: int, layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.mlp, MoeConfig):
            return layer
        return replace(layer, mlp=replace(layer.mlp, routing=replace(layer.mlp.routing, **changes)))

    return lambda model: model.with_layers(change)


def whole(**changes: Any) -> Change:
    """These options of the model."""
    return lambda model: replace(model, **changes)


def other_rope(config: AttentionConfig, **changes: Any) -> RopeConfig | None:
    return None if config.rope is None else replace(config.rope, **changes)


UNDONE: list[tuple[str, Change]] = [
    ("gemma2", attention(softcap=None)),
    ("gemma2", attention(window=lambda each: each.window and each.window + 1)),
    ("gemma2", attention(scale=lambda each: each.head_dim**-0.5)),
    ("gemma2", whole(final_softcap=None)),
    ("gemma2", whole(embedding_scale=1.0)),
    ("gemma2", whole(norm=NormConfig(eps=1e-2, offset=1.0))),
    ("gemma4", attention(has_value_norm=False)),
    ("gemma4", attention(rope=lambda each: other_rope(each, num_turning=8))),
    ("granite", whole(residual_scale=1.0)),
    ("granite", whole(logit_scale=1.0)),
    ("llama4", attention(chunk=None)),
    ("llama4", attention(temperature=None)),
    ("llama4", attention(qk_norm=None)),
    ("llama4", routing(scales_input=False)),
    ("ministral3", attention(temperature=None)),
    ("mpt", attention(clip=None)),
    ("olmo", attention(clip=None)),
    ("bloom", attention(slopes=())),
    ("hunyuan", attention(is_norm_after_rope=False)),
    ("smollm3", attention(rope=RopeConfig(16, 2e6))),
    ("llama-yarn", attention(rope=lambda each: other_rope(each, attention_factor=1.0))),
    ("llama-llama3", attention(rope=lambda each: other_rope(each, kind="default"))),
    ("phi3-longrope", attention(rope=lambda each: other_rope(each, divisors=()))),
    ("gpt_oss", attention(rope=lambda each: other_rope(each, is_truncated=True))),
    ("mixtral", routing(is_normalized=False)),
    ("deepseek_v3", routing(num_groups=1)),
    ("deepseek_v3", routing(group_score="max")),
    ("deepseek_v3", routing(scale=1.0)),
    ("deepseek_v2", routing(num_groups=1)),
    ("xglm", whole(position_offset=0)),
]


@pytest.mark.fast(4)
@pytest.mark.parametrize(("name", "change"), UNDONE)
def test_an_option_that_is_undone_shows(tmp_path: Path, name: str, change: Change) -> None:
    """Else the comparison with transformers would not see whether it is honoured."""
    tokens, expected = write_family(tmp_path, name)
    found = logits_in_parts(tmp_path, tokens, "torch", change)
    assert float((found - expected).abs().max()) > 5e-3


def test_the_decoder_saved_without_its_head(tmp_path: Path) -> None:
    """As GPT-2 lies on the Hub: no prefix, and masks that are computed here."""
    tokens, expected = write_family(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    weights = {name.removeprefix("transformer."): each for name, each in load_file(file).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 256, 256).tril()
    file.unlink()
    save_file(weights, file)
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "name", ["nemotron", "gemma4-moe", "gpt_oss", "bloom", "deepseek_v3", "qwen3_next", "apertus"]
)
def test_bfloat16_is_near_float32(tmp_path: Path, name: str) -> None:
    """Parameters that stay in float32 among those that do not: norms, routers, sinks, slopes."""
    tokens, expected = write_family(tmp_path, name)
    found = logits_in_parts(tmp_path, tokens, "torch", dtype=torch.bfloat16)
    found, expected = (each.float().log_softmax(-1) for each in (found, expected))
    assert float((found - expected).abs().mean()) < 0.2


@pytest.mark.fast(2)
@pytest.mark.parametrize("model_type", WRAPPERS)
def test_the_decoder_of_a_multimodal_model(tmp_path: Path, model_type: str) -> None:
    """As transformers 5 writes it, and with the prefix that files of other years have."""
    tokens, expected = write_wrapped(tmp_path, model_type)
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    prefixes = ("language_model.model.", "model.language_model.")
    old, new = prefixes if any(prefixes[0] in name for name in weights) else prefixes[::-1]
    file.unlink()
    save_file({name.replace(old, new): tensor for name, tensor in weights.items()}, file)
    assert_close(logits_in_parts(tmp_path, tokens, "torch"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "bloom",
        "gpt_oss",
        "llama4",
        "mixtral",
        "hunyuan",
        "cohere2",
        "glm4_moe",
        "gemma4-e2b",
        "qwen3_5",
    ],
)
def test_logits_of_the_kernels(tmp_path: Path, name: str) -> None:
    """Sinks, ALiBi, chunks, experts, norms after turning and heads of two sizes, interpreted."""
    tokens, expected = write_family(tmp_path, name)
    assert_close(logits_in_parts(tmp_path, tokens, "triton"), expected)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "mixtral",
        "deepseek_v3",
        "gpt2",
        "gpt_oss",
        "falcon-rw",
        "opt-350m",
        "gemma4-e2b",
        "qwen3_next",
    ],
)
def test_tokens_of_a_mixed_batch_through_a_pause(tmp_path: Path, name: str) -> None:
    """Each token is the likeliest by transformers' logits of all before it."""
    from transformers import AutoModelForCausalLM

    write_family(tmp_path, name)
    driver = EngineDriver(
        Engine.load(tmp_path, EngineConfig(device="cpu", max_batch_size=4, tokens_per_block=8))
    )
    jobs = [Job([5, 6, 7]), Job(list(range(20, 60))), Job([90])]
    driver.generate(jobs, 6, chunk_size=7)
    driver.release(jobs[1])
    driver.generate(jobs, 10, chunk_size=9)
    attention = "sdpa" if name.startswith("falcon") else "eager"
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).float()
    for job in jobs:
        with torch.inference_mode():
            logits = oracle.eval()(torch.tensor([job.tokens])).logits[0, len(job.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(job.generated)[:, None])[:, 0]
        assert bool((logits.amax(1) - chosen < 1e-3).all())
