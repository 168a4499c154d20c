"""GGUF files against the checkpoints that they were made of."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.families import write_family
from support.gguf_writer import Keep, keep_float32, write_gguf

from inflight_backend.adapters.targets import module_targets
from inflight_backend.engine import Engine
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import checkpoint_name
from inflight_backend.models.compiled.layers import JoinedLayers
from inflight_backend.models.families.registry import read_model, read_published_model

from .test_quantization import CONFIG, difference, loaded_bytes, logits

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {}),
    "llama-llama3": ("llama", {}),
    "llama-linear": ("llama", {}),
    "llama-yarn": ("llama", {}),
    "mixtral": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3moe", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 24}),
    "phi3-window": ("phi3", {}),
    "phi3-longrope": ("phi3", {}),
    "gpt_oss": ("gpt-oss", {}),
    "deepseek_v2": ("deepseek2", {}),
    "deepseek_v2-lite": ("deepseek2", {}),
    "deepseek_v3": ("deepseek2", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {}),
    "granite": ("granite", {}),
    "cohere-qk": ("command-r", {}),
    "falcon-7b": ("falcon", {}),
    "falcon-40b": ("falcon", {}),
    "gpt2": ("gpt2", {}),
    "ministral3": ("mistral3", {}),
    "qwen2-window": ("qwen2vl", {"use_sliding_window": False}),
    "qwen3_moe-sparse": ("qwen3vlmoe", {"decoder_sparse_step": 1, "norm_topk_prob": True}),
    "qwen3_5": ("qwen35", {}),
    "qwen3_5_moe": ("qwen35moe", {}),
    "qwen3_next": ("qwen3next", {"mlp_only_layers": None}),
    "mistral4": ("mistral4", {}),
    "gemma4": ("gemma4", {}),
    "gemma4-keqv": ("gemma4", {}),
    "gemma4-e2b": ("gemma4", {}),
    "gemma4-moe": ("gemma4", {}),
    "mistral": ("mistral3", {"sliding_window": None}),
    "llama4": ("llama4", {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}),
    "arcee": ("arcee", {}),
    "apertus": ("apertus", {}),
    "seed_oss": ("seed_oss", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoeshared": ("granitemoe", {}),
    "phi": ("phi2", {"intermediate_size": 256}),
    "phimoe": ("phimoe", {}),
    "glm": ("chatglm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4moe", {}),
    "ernie4_5": ("ernie4_5", {"use_bias": False}),
    "ernie4_5_moe": ("ernie4_5-moe", {"use_bias": False}),
    "hunyuan": ("hunyuan-dense", {}),
    "hunyuan_moe": ("hunyuan-moe", {}),
    "exaone4": ("exaone4", {}),
    "exaone4-full": ("exaone4", {}),
    "exaone_moe-first": ("exaone-moe", {}),
    "dots1-full": ("dots1", {"num_key_value_heads": 4}),
    "afmoe": ("afmoe", {}),
    "minimax_m2": ("minimax-m2", {}),
    "minicpm3": (
        "minicpm3",
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "v_head_dim": 16},
    ),
    "olmo": ("olmo", {}),
    "olmoe": ("olmoe", {"num_key_value_heads": 4, "clip_qkv": None}),
    "cohere2": ("cohere2", {}),
    "nemotron": ("nemotron", {}),
    "stablelm": ("stablelm", {}),
    "stablelm-12b": ("stablelm", {}),
    "gpt_bigcode": ("starcoder", {}),
    "gpt_neox": ("gptneox", {}),
    "gpt_neox-seq": ("gptneox", {}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "dbrx": ("dbrx", {}),
}
"""By variant: the architecture of GGUF, and settings that it cannot say otherwise."""


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_architecture(tmp_path: Path, name: str) -> None:
    """Unquantised: names, layouts, and the keys of config.json."""
    architecture, changes = FAMILIES[name]
    write_family(tmp_path / "plain", name, **changes)
    path = write_gguf(tmp_path / "plain", tmp_path / "model.gguf", architecture)
    assert difference(path, tmp_path / "plain") < 1e-4


def test_layers_that_predict_a_token_more_are_passed_over(tmp_path: Path) -> None:
    """GLM-4.5's last one; `block_count` counts it."""
    write_family(tmp_path, "glm4_moe")
    shorter = tmp_path / "shorter"
    shorter.mkdir()
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 2}
    (shorter / "config.json").write_text(json.dumps(config))
    kept = {
        name: tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if ".layers.2." not in name
    }
    save_file(kept, shorter / "model.safetensors")
    values = {"nextn_predict_layers": 1}
    path = write_gguf(tmp_path, tmp_path / "model.gguf", "glm4moe", values=values)
    assert difference(path, shorter) < 1e-4


def test_adapters_do_not_change_what_is_in_another_order(tmp_path: Path) -> None:
    """Value heads of Qwen3.5's recurrences; its other linears may be changed."""
    write_family(tmp_path / "plain", "qwen3_5")
    path = write_gguf(tmp_path / "plain", tmp_path / "model.gguf", "qwen35")
    known, found = (
        {name for name in module_targets(model) if ".0." in name}
        for model in (read_model(tmp_path / "plain"), read_published_model(path))
    )
    assert found == {name for name in known if "linear_attn" not in name} != known


_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()},
}
"""Where a block has numbers of 16 bits."""


def random_blocks(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Of any content, but for scales such that numbers are as large as weights."""
    kind = gguf.GGMLQuantizationType[dtype]
    count, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // count, size), dtype=np.uint8)
    halves = {each: generator.normal(0, 0.1, blocks.shape[:-1]) for each in _HALVES[dtype]}
    if dtype == "MXFP4":
        blocks[..., 0] = generator.integers(119, 123, blocks.shape[:-1])
    for factor in (1.0, None):
        if factor is None:
            wide = gguf.quants.dequantize(blocks.reshape(*shape[:-1], -1), kind)
            factor = 1.5 * shape[-1] ** -0.5 / wide.std()
        for place, values in halves.items():
            blocks[..., place : place + 2] = (
                (values * factor).astype("<f2")[..., None].view(np.uint8)
            )
    if dtype in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):  # groups that are all one number, scaled by 0
        blocks[..., 0, :2] = 0
    return blocks.reshape(*shape[:-1], -1)


def quantized(dtype: str, *, is_wide: bool) -> Keep:
    """Linears in random blocks, or the numbers that these stand for; embeddings too."""
    kind = gguf.GGMLQuantizationType[dtype]

    def keep(name: str, data: Any) -> tuple[Any, gguf.GGMLQuantizationType]:
        is_plain = data.ndim < 2 or name.endswith(".bias")
        is_plain = is_plain or "ffn_gate_inp" in name or "norm" in name
        if is_plain or data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            return keep_float32(name, data)
        blocks = random_blocks(dtype, data.shape, zlib.crc32(name.encode()))
        return (
            keep_float32(name, gguf.quants.dequantize(blocks, kind)) if is_wide else (blocks, kind)
        )

    return keep


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linears of 256 columns."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    write_family(folder, "llama-bias", num_hidden_layers=2, **sizes)
    return folder


@pytest.fixture(scope="module")
def wide_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of experts and one that all pass."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256}
    sizes |= {"shared_expert_intermediate_size": 512, "num_hidden_layers": 2}
    write_family(folder, "qwen2_moe", **sizes)
    return folder


@pytest.mark.fast(2)
@pytest.mark.parametrize("dtype", _HALVES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2moe"])
def test_every_type_stands_for_its_numbers(
    tmp_path: Path, wide: Path, wide_experts: Path, architecture: str, dtype: str
) -> None:
    """In float32 nothing but the order of sums differs; and memory is what is planned."""
    plain = wide if architecture == "llama" else wide_experts
    path, expected = (
        write_gguf(plain, tmp_path / name, architecture, quantized(dtype, is_wide=is_wide))
        for name, is_wide in (("model.gguf", False), ("expected.gguf", True))
    )
    assert difference(path, expected) < 1e-4
    for kept in ("float32", "bfloat16"):
        config = replace(CONFIG, dtype=kept)
        made = make_plan(path, config)
        assert loaded_bytes(path, config) == made.weight_bytes
        assert made.weight_bytes < make_plan(expected, config).weight_bytes
        assert made.quantization == f"gguf {dtype}"
        assert made.file_bytes == sum(
            gguf_file.n_bytes for gguf_file in gguf.GGUFReader(path).tensors
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_architecture_quantised(tmp_path: Path, name: str) -> None:
    """Linears as far as their columns are blocks."""
    architecture, changes = FAMILIES[name]
    write_family(tmp_path / "plain", name, **changes)
    path, expected = (
        write_gguf(
            tmp_path / "plain", tmp_path / each, architecture, quantized("Q8_0", is_wide=is_wide)
        )
        for each, is_wide in (("model.gguf", False), ("expected.gguf", True))
    )
    assert difference(path, expected) < 1e-4


def mixed(*, is_wide: bool) -> Keep:
    """As files called Q4_K_M have it: more bits for the embedding, and for some layers' values and
    last linears."""

    def keep(name: str, data: Any) -> tuple[Any, gguf.GGMLQuantizationType]:
        has_more = name.startswith(("token_embd", "blk.0.attn_v", "blk.0.ffn_down"))
        return quantized("Q6_K" if has_more else "Q4_K", is_wide=is_wide)(name, data)

    return keep


def test_several_types_in_a_file(tmp_path: Path, wide: Path) -> None:
    """Queries, keys and values are one product of parts; layers are joined all the same."""
    path, expected = (
        write_gguf(wide, tmp_path / name, "llama", mixed(is_wide=is_wide))
        for name, is_wide in (("model.gguf", False), ("expected.gguf", True))
    )
    for backend in ("compiled", "torch"):
        assert difference(path, expected, replace(CONFIG, attention_backend=backend)) < 1e-4
    config = replace(CONFIG, attention_backend="compiled")
    assert isinstance(Engine.load(path, config)._decoder._run_joined, JoinedLayers)
    made = make_plan(path, CONFIG)
    assert loaded_bytes(path, CONFIG) == made.weight_bytes
    assert made.quantization == "gguf Q4_K"


def test_a_scale_that_is_no_number(tmp_path: Path, wide: Path) -> None:
    def keep(name: str, data: Any) -> tuple[Any, gguf.GGMLQuantizationType]:
        blocks, kind = quantized("Q8_0", is_wide=False)(name, data)
        if name == "blk.1.ffn_up.weight":
            blocks[-1, -34:-32] = 0xFF  # a float16 before each 32 bytes
        return blocks, kind

    path = write_gguf(wide, tmp_path / "model.gguf", "llama", keep)
    message = r"^blk\.1\.ffn_up: its blocks \(Q8_0\) have scales that are not finite"
    with pytest.raises(CheckpointError, match=message):
        Engine.load(path, CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["Q3_K", "Q4_K", "Q6_K", "IQ4_NL"])
def test_types_by_the_kernels_of_a_gpu(tmp_path: Path, wide: Path, dtype: str) -> None:
    """Groups of 16 and of 32, a zero that is 4, zeros that are no integers, a codebook."""
    path = write_gguf(wide, tmp_path / "model.gguf", "llama", quantized(dtype, is_wide=False))
    found, expected = (
        logits(path, replace(CONFIG, attention_backend=backend)) for backend in ("triton", "torch")
    )
    assert (found - expected).abs().max() < 1e-4 * expected.std()


def test_a_file_in_parts_and_a_folder_with_one(tmp_path: Path, wide: Path) -> None:
    keep = quantized("Q4_K", is_wide=False)
    whole = write_gguf(wide, tmp_path / "whole.gguf", "llama", keep)
    folder = tmp_path / "parts"
    folder.mkdir()
    write_gguf(wide, folder / "model.gguf", "llama", keep, split_max_tensors=9)
    assert len(list(folder.iterdir())) == 4
    assert difference(folder, whole) == 0.0
    made = make_plan(folder, CONFIG)
    assert made == make_plan(whole, CONFIG)
    assert checkpoint_name(folder / "model-00001-of-00004.gguf") == "model"
    shutil.copy(whole, folder / "mmproj-model.gguf")
    assert make_plan(folder, CONFIG) == made
    (folder / "model-00002-of-00004.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00004\.gguf: no such file, a part"):
        make_plan(folder, CONFIG)
    whole.rename(folder / "whole.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files: give one of model-00001-of-"):
        make_plan(folder, CONFIG)


@pytest.mark.slow
def test_types_that_are_not_quantised(tmp_path: Path, wide: Path) -> None:
    """Norms stay float32; what is plain may be served as if it were safetensors."""
    for kind in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):

        def keep(name: str, data: Any, kind: Any = kind) -> Any:
            if data.ndim < 2:
                return keep_float32(name, data)
            return gguf.quants.quantize(data, kind), kind

        path = write_gguf(wide, tmp_path / f"{kind.name}.gguf", "llama", keep)
        assert make_plan(path, CONFIG).quantization == "none"
        assert difference(path, wide) < 5e-2


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "architecture 'mamba' is not supported; supported: ll",
        ),
        (
            {"attention.head_count": [4, 4, 2]},
            "attention.head_count differs by layer, which is",
        ),
        ({"attention.head_count_kv": 3}, "num_key_value_heads (3) must divide num_attention_heads"),
        ({"rope.scaling.type": "wave"}, "rope_type 'wave' is not supported; supported: default, "),
        (
            {"embedding_length": 128},
            "token_embd.weight has shape [97, 256], config.json asks",
        ),
        ({"block_count": 3}, "model.gguf: 16 missing tensors: blk.2.attn_norm.weight, "),
        ({"block_count": 1}, "model.gguf: 16 unused tensors: blk.1.attn_norm.weight, "),
    ],
)
def test_metadata_that_is_refused(
    tmp_path: Path, wide: Path, values: dict[str, Any], message: str
) -> None:
    path = write_gguf(wide, tmp_path / "model.gguf", "llama", values=values)
    with pytest.raises(CheckpointError) as caught:
        make_plan(path, CONFIG)
    assert message in str(caught.value)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("place", "data", "cut", "message"),
    [
        (0, b"GGML", 0, "is no GGUF file: it does not begin with 'GGUF'"),
        (4, b"\x09", 0, "is GGUF of version 9; supported: 2 and 3, little-endian"),
        (16, b"\xff", 0, "not a whole GGUF file, truncated or damaged"),
        (b"output_norm", b"out\0put", 0, "not a whole .* .a tensor's name is 'out.x00put"),
        (0, b"", 99, "output_norm.weight ends behind the file's end: it is cut off"),
        (0, b"", 9**9, "not a whole GGUF file, truncated or damaged .it ends too early"),
    ],
)
def test_damaged_files(
    tmp_path: Path, wide: Path, place: int | bytes, data: bytes, cut: int, message: str
) -> None:
    path = write_gguf(wide, tmp_path / "model.gguf", "llama")
    content = bytearray(path.read_bytes())
    if isinstance(place, bytes):
        place = content.index(place)
    content[place : place + len(data)] = data
    path.write_bytes(content[: max(len(content) - cut, 300)])
    with pytest.raises(CheckpointError, match=f"^model.gguf: {message}"):
        make_plan(path, CONFIG)


def test_a_type_that_is_not_supported(tmp_path: Path, wide: Path) -> None:
    def keep(name: str, data: Any) -> Any:
        if "ffn_up.weight" not in name:
            return keep_float32(name, data)
        kind = gguf.GGMLQuantizationType.TQ1_0
        return gguf.quants.quantize(data, kind), kind

    path = write_gguf(wide, tmp_path / "model.gguf", "llama", keep)
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight has the type TQ1_0, which is not"):
        make_plan(path, CONFIG)
