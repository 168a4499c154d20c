"""Steps of generations whose layers are one program: the numbers of the ops one by one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import VOCAB_SIZE
from support.engine_driver import EngineDriver, Job
from support.families import write_family
from support.quantized import SCHEMES, W8A8, write_quantized
from torch import Tensor

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.models.blocks.lora import Adapter, AdapterPart
from inflight_backend.models.compiled.layers import JoinedLayers
from inflight_kernels.cpu.quantized_linear import takes_integers

CONFIG = EngineConfig(
    device="cpu",
    attention_backend="compiled",
    max_batch_size=20,
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=1024,
)
Folder = Callable[..., Path]


def hidden_states(engine: Engine, *, is_joined: bool, adapter: int = -1) -> list[Tensor]:
    """Of steps with more and more generations, until the memory of the program has grown; the last
    of them uses ``adapter``."""
    decoder, found = engine._decoder, list[Tensor]()
    forward: Callable[..., Tensor] = decoder.forward
    joined = decoder._run_joined

    def record(*arguments: Any) -> Tensor:
        found.append(forward(*arguments))
        return found[-1].clone()

    decoder.forward = record  # type: ignore[method-assign,assignment]
    decoder._run_joined = joined if is_joined else None
    driver = EngineDriver(engine)
    jobs = [Job([(7 * number + 3) % VOCAB_SIZE] * (1 + number)) for number in range(12)]
    jobs[-1].adapter = adapter
    for count in (1, 3, 12):
        driver.generate(jobs[:count], 6)
    decoder.forward = forward  # type: ignore[method-assign]
    decoder._run_joined = joined
    return found


@pytest.mark.parametrize(
    ("variant", "options", "settings"),
    [
        ("llama-mha", {}, {}),
        ("mistral-some-windows", {"head_dim": 16}, {}),  # two groups of blocks
        ("qwen3", {"head_dim": 16}, {"dtype": "bfloat16"}),
        ("qwen2-tied", {}, {"enable_lora": True}),
        ("llama-mha", {"hidden_size": 64, "intermediate_size": 64}, {"quantization": "int8"}),
    ],
)
def test_equal_those_of_the_ops(
    checkpoint: Folder, variant: str, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert_equal_those_of_the_ops(checkpoint(variant, **options), replace(CONFIG, **settings))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {}),  # norms with an offset, behind branches too, GELU, windows
        ("gemma2", {"dtype": "bfloat16"}),
        ("granite", {}),  # branches are scaled
        ("gpt_neox", {"dtype": "bfloat16"}),  # LayerNorm, parallel branches with a norm each
        ("cohere", {}),  # with one norm
        ("qwen3_moe", {"dtype": "bfloat16"}),
        ("granitemoeshared", {}),
        ("olmo2", {}),  # norms behind branches alone, and over all heads
        pytest.param("gemma", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("nemotron", {}, marks=pytest.mark.slow),
        pytest.param("opt", {}, marks=pytest.mark.slow),
        pytest.param("phi", {"enable_lora": True}, marks=pytest.mark.slow),
        pytest.param("starcoder2", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("bloom", {}, marks=pytest.mark.slow),
        pytest.param("glm4", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", {}, marks=pytest.mark.slow),
    ],
)
def test_equal_those_of_the_ops_of_other_families(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    write_family(tmp_path, family)
    assert_equal_those_of_the_ops(tmp_path, replace(CONFIG, **settings))


@pytest.mark.parametrize(
    ("name", "linears"),
    [
        ("ct-w4a16-asymmetric", "_proj"),  # sums of what they read
        ("gptq-order", "_proj"),  # columns in another order
        ("w8a8", "_proj"),  # what they read in 8 bits
        ("gptq-order", "[^v]_proj"),  # one of three that are one is not quantised
    ],
)
def test_equal_those_of_the_ops_with_quantised_weights(
    checkpoint: Folder, tmp_path: Path, name: str, linears: str
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    plain = checkpoint("llama-mha", attention_bias=True, **sizes)
    pattern = re.compile(rf".*{linears}\.weight")
    scheme = W8A8 if name == "w8a8" else SCHEMES[name]
    if name == "w8a8" and not takes_integers(torch.zeros(32, 32).char(), torch.ones(32, 1)):
        pytest.skip("needs a CPU that adds up four products of integers at once (VNNI)")
    folder, _ = write_quantized(plain, tmp_path, scheme, pattern)
    assert_equal_those_of_the_ops(folder, CONFIG)


def assert_equal_those_of_the_ops(folder: Path, config: EngineConfig) -> None:
    """That the layers are joined, and compute the same."""
    engine = Engine.load(folder, config)
    assert isinstance(engine._decoder._run_joined, JoinedLayers)
    found = hidden_states(engine, is_joined=True)
    for each, expected in zip(found, hidden_states(engine, is_joined=False), strict=True):
        assert torch.equal(each, expected)


@pytest.mark.parametrize("rows", [144, 8])
def test_rows_with_an_adapter_get_it(checkpoint: Folder, rows: int) -> None:
    """Beside others without; their steps run by the ops if the kernel does not take a part, here of
    8 rows."""
    engine = Engine.load(checkpoint("llama-mha"), replace(CONFIG, enable_lora=True))
    a, b = torch.ones(1, 48), torch.ones(rows, 1)
    part = AdapterPart("layers.0.qkv", 0, a, b)
    engine.load_adapter(0, engine.prepare_adapter(Adapter((part,), b"")))
    plain, found = (hidden_states(engine, is_joined=True, adapter=each) for each in (-1, 0))
    for each, expected in zip(
        found, hidden_states(engine, is_joined=False, adapter=0), strict=True
    ):
        assert torch.equal(each, expected)
    assert torch.equal(plain[0], found[0])
    assert not torch.equal(plain[-1], found[-1])


def test_layers_of_other_parts_are_not_joined(checkpoint: Folder) -> None:
    """Here the rows of a linear that no kernel takes."""
    engine = Engine.load(checkpoint("llama3-biased-gqa8"), CONFIG)
    assert engine._decoder._run_joined is None
