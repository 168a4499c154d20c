"""Quantised checkpoints against plain ones with the numbers that they stand for."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint
from support.engine_driver import EngineDriver, Job
from support.families import FAMILY_VARIANTS, write_family, write_wrapped
from support.held_memory import held_bytes
from support.quantized import (
    GPT_OSS,
    SCHEMES,
    W8A8,
    Made,
    Make,
    Scheme,
    compressed,
    gptq,
    packed,
    set_quantization,
    write_quantized,
)

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.config import resolve, resolve_on_device
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.models.config import ModelConfig, RoutingConfig
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.layers import Linear, Parameter, parameter_tensors
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.quantization.cpu_products import (
    BagLinear,
    FixedPointLinear,
    Int4Linear,
    IntegerLinear,
)
from inflight_backend.models.quantization.forms import PackedWeight
from inflight_backend.models.quantization.linears import dequantize, make_packed_linear
from inflight_backend.models.weights import Checkpoint
from inflight_scheduler import OutputParams

CONFIG = EngineConfig(
    device="cpu", dtype="float32", max_batch_size=2, max_tokens_in_paged_kv_cache=64
)
PROMPT = [(7 * index + 3) % 97 for index in range(24)]
_SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fused linears with biases, blocks of 128 that are not full."""
    folder = tmp_path_factory.mktemp("plain")
    return write_checkpoint(folder, "llama-mha", attention_bias=True, **_SIZES)


def logits(folder: Path, config: EngineConfig = CONFIG) -> torch.Tensor:
    """Those of each token of a prompt, and of one generated."""
    return logits_of(Engine.load(folder, config))


def logits_of(engine: Engine) -> torch.Tensor:
    """The same of an engine."""
    driver = EngineDriver(engine)
    wants = OutputParams(context_logits=True, generation_logits=True)
    job = Job(PROMPT, outputs=wants)
    found = []
    for chunks in ({job: 17}, {job: 0}, {}):
        driver.step(chunks, [] if chunks else [job])
        outputs = driver.engine.take_outputs()
        assert outputs is not None
        found += [torch.tensor(each.logits) for each in outputs.context_logits]
        rows = [row for each in outputs.generation_logits.values() for row in each]
        found += [torch.tensor(row)[None] for row in rows]
    assert sum(map(len, found)) == len(PROMPT) + 2
    return torch.cat(found)


def difference(folder: Path, expected: Path, config: EngineConfig = CONFIG) -> float:
    """The largest, in units of the deviation of what is expected."""
    wanted = logits(expected, config)
    return float((logits(folder, config) - wanted).abs().max() / wanted.std())


def loaded(
    folder: Path, dtype: torch.dtype, quantization: str = "none", backend: str = "torch"
) -> dict[str, Parameter]:
    """The parameters as an engine takes them over."""
    with Checkpoint(folder) as opened:
        specs = decoder_parameters(opened.fit(read_model(folder)))
        return opened.load(specs, dtype, "cpu", quantization=quantization, backend=backend)


def loaded_bytes(folder: Path, config: EngineConfig) -> int:
    """What they take."""
    found = resolve(config, read_model(folder))
    backend = found.attention_backend
    parameters = loaded(folder, found.torch_dtype, config.quantization, backend).values()
    return sum(each.nbytes for part in parameters for each in parameter_tensors(part))


@pytest.mark.fast(6)
@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_numbers(tmp_path: Path, plain: Path, name: str) -> None:
    """In float32, so that nothing but the order of sums differs; and memory is what is planned, but
    for what linears keep beside their weights: a few bytes for each row."""
    folder, expected = write_quantized(plain, tmp_path, SCHEMES[name])
    assert difference(folder, expected) < 1e-4
    for dtype, backend in product(("float32", "bfloat16"), ("auto", "torch")):
        config = replace(CONFIG, dtype=dtype, attention_backend=backend)
        made = make_plan(folder, config)
        wide = make_plan(expected, config).weight_bytes
        held = held_bytes(Engine.load(folder, config)._decoder)
        assert made.weight_bytes <= held < 1.08 * made.weight_bytes
        # Plain torch has no product of FP8.
        is_wide = backend == "torch" and name in _FLOAT
        assert (made.weight_bytes == wide) if is_wide else (made.weight_bytes < wide)
        assert made.num_parameters == make_plan(expected, config).num_parameters


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ct-w4a16", Int4Linear),
        ("ct-w4a16-asymmetric", Int4Linear),
        ("ct-w4a16-order", Int4Linear),
        ("awq", Int4Linear),
        ("gptq-order", Int4Linear),
        ("ct-w8a16", FixedPointLinear),
        ("ct-w8a16-asymmetric", FixedPointLinear),
        ("ct-w4a16-channel", Int4Linear | BagLinear),
        ("ct-w8a16-groups", BagLinear),
        ("gptq-8-order", BagLinear),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(tmp_path: Path, plain: Path, name: str, kind: Any, dtype: torch.dtype) -> None:
    """They differ from that of the wide weight by the rounding of sums, in bfloat16 of their own
    and of the weight."""
    folder, _ = write_quantized(plain, tmp_path, SCHEMES[name])
    for part in ("qkv", "gate_up", "down"):
        weight = loaded(folder, dtype)[f"layers.1.{part}.weight"]
        assert isinstance(weight, PackedWeight)
        wide = dequantize(weight)
        bias = torch.randn(len(wide), generator=torch.Generator().manual_seed(2)).to(dtype)
        linear = make_packed_linear(weight, bias, Linear)
        is_bag = kind is Int4Linear and dtype.itemsize == 4
        if kind is FixedPointLinear and not FixedPointLinear.takes(weight):
            is_bag = True  # a CPU without exact products of integers (VNNI)
        assert isinstance(linear, BagLinear if is_bag else kind)
        for count in (0, 1, 5, 40):
            x = torch.randn(count, wide.shape[1], generator=torch.Generator().manual_seed(3))
            x = x.to(dtype)
            expected = x.double() @ wide.double().t() + bias.double()
            rounding = 4e-2 if dtype == torch.bfloat16 else 1e-5
            bound = rounding * float(wide.float().std()) * wide.shape[1] ** 0.5
            answer = linear(x)
            assert answer.shape == expected.shape
            assert answer.dtype == dtype
            assert bool(((answer - expected).abs() < bound).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_integers_times_integers(tmp_path: Path, plain: Path, dtype: str) -> None:
    """What a linear reads is rounded to 8 bits, as the scheme wants: logits differ by a few
    hundredths of their deviation (`docs/models.md`)."""
    folder, expected = write_quantized(plain, tmp_path, W8A8)
    config = replace(CONFIG, dtype=dtype)
    found, wanted = logits(folder, config), logits(expected, config)
    assert float((found - wanted).square().mean().sqrt() / wanted.std()) < 0.08
    weight = loaded(folder, getattr(torch, dtype))["layers.0.down.weight"]
    assert isinstance(weight, PackedWeight)
    if not IntegerLinear.takes(weight):
        pytest.skip("needs a CPU with exact products of integers (VNNI)")
    linear = make_packed_linear(weight, None, Linear)
    assert isinstance(linear, IntegerLinear)
    assert linear(torch.empty(0, weight.values.shape[1], dtype=weight.dtype)).shape == (0, 128)
    x = torch.randn(3, weight.values.shape[1], generator=torch.Generator().manual_seed(3))
    x = x.to(weight.dtype)
    peaks = x.double().abs().amax(1, keepdim=True)
    numbers = (x.double() * 127 / peaks).round()
    wanted = numbers @ weight.values.double().t() * (peaks / 127) * weight.scales.double().t()
    torch.testing.assert_close(linear(x).double(), wanted, rtol=2**-7, atol=1e-5)


_FLOAT = [name for name in SCHEMES if "fp8" in name or name == "modelopt"]
_IN_GROUPS = [
    *(name for name in SCHEMES if re.match("awq|gptq|ct-mx|(ct|modelopt)-nvfp4", name)),
    *("ct-w8a16-groups", "ct-w4a16", "ct-w4a16-asymmetric", "ct-w4a16-order"),
]
"""Columns are in whole groups; others take any size."""
_ALL_SCHEMES = {**SCHEMES, "ct-w8a8": W8A8}
_SOME_PAIRS = [
    (family, [name])
    for family, name in zip(list(FAMILY_VARIANTS)[:8], cycle(_ALL_SCHEMES), strict=False)
]


_STACKED = {"gpt_oss": True, "llama4": True, "llama4-kinds": True, "mistral4": False}
_STACKED |= {"gemma4-moe": False}
"""Families whose files have stacks of experts: whether these are [inputs, outputs]."""


def _with_single_experts(stacked: Path, family: str) -> Path:
    """A copy with a linear for each expert, as llmcompressor writes them; without stacks the
    folder itself."""
    if family not in _STACKED:
        return stacked
    folder = stacked.with_name(f"{stacked.name}-apart")
    shutil.copytree(stacked, folder)
    weights = {}
    for each, tensor in load_file(stacked / "model.safetensors").items():
        found = re.fullmatch(r"(.*\bexperts\.)(gate_up|down)_proj(_bias)?", each)
        if found is None:
            weights[each] = tensor
            continue
        place, part = found[1], found[2]
        kind = "bias" if found[3] else "weight"
        if kind == "weight" and not _STACKED[family]:
            tensor = tensor.transpose(1, 2)
        for index, of_expert in enumerate(tensor):
            parts = {"down": of_expert}
            if part == "gate_up":
                halves = of_expert.chunk(2, dim=-1)
                if family == "gpt_oss":
                    halves = (of_expert[..., ::2], of_expert[..., 1::2])
                parts = dict(zip(("gate", "up"), halves, strict=True))
            for linear, values in parts.items():
                name_there = f"{place}{index}.{linear}_proj.{kind}"
                weights[name_there] = values.t().contiguous().clone()
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.fast(8)
@pytest.mark.parametrize(
    ("family", "names"),
    [*_SOME_PAIRS, *((family, list(_ALL_SCHEMES)) for family in FAMILY_VARIANTS)],
    ids=lambda each: each if isinstance(each, str) else each[0] if len(each) == 1 else "all",
)
def test_any_family_goes_with_any_scheme(tmp_path: Path, family: str, names: list[str]) -> None:
    """Fused linears, rows in orders of their own, linears of each expert, latents whose matrices
    are taken apart, recurrences."""
    failed = []
    for has_groups in (False, True):
        chosen = [name for name in names if (name in _IN_GROUPS) == has_groups]
        if not chosen:
            continue
        plain = tmp_path / f"plain-{has_groups}"
        write_family(plain, family, has_whole_groups=has_groups)
        plain = _with_single_experts(plain, family)
        with Checkpoint(plain) as opened:
            model = opened.fit(read_model(plain))
        linears = _linears(model)
        if has_groups:
            linears = {name: columns for name, columns in linears.items() if columns % 64 == 0}
        pattern = re.compile("|".join(map(re.escape, linears)))
        is_transposed = model.names.is_transposed
        for name in chosen:
            scheme, folder = _ALL_SCHEMES[name], tmp_path / name
            folder, expected = write_quantized(
                plain, folder, scheme, pattern, is_transposed=is_transposed
            )
            found, wanted = logits(folder), logits(expected)
            errors = (found - wanted) / wanted.std()
            if scheme is W8A8:  # rounding may choose other experts for a token
                error = float(errors.square().mean(1).sqrt().median())
                is_close = error < 0.4
            else:
                error = float(errors.abs().max())
                is_close = error < (1e-2 if model.deltas else 3e-4)
            planned = make_plan(folder, CONFIG).weight_bytes
            if not is_close or loaded_bytes(folder, CONFIG) != planned:
                failed.append((name, error, loaded_bytes(folder, CONFIG), planned))
            shutil.rmtree(folder.parent)
    assert not failed


def _linears(model: ModelConfig) -> dict[str, int]:
    """Columns of each linear by the name of its weight, those of experts too; not of stacks."""
    return {
        source.name: source.shape[1]
        for spec in decoder_parameters(model)
        if spec.is_linear or ".experts." in spec.name
        for source in spec.sources
        if source.name.endswith(".weight") and len(source.shape) == 2
    }


@pytest.mark.fast(2)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    "name",
    ["ct-w8a16", "ct-w4a16-asymmetric", "ct-fp8-channel-dynamic", "bnb-nf4", "ct-w4a16-order"],
)
@pytest.mark.parametrize("vocab_size", [112, 97], ids=["whole panels", "odd"])
def test_tables_stay_quantised(tmp_path: Path, name: str, is_tied: bool, vocab_size: int) -> None:
    """An embedding, whose rows are looked up, and a head; also of one that is both."""
    changes: dict[str, Any] = {"tie_word_embeddings": is_tied, "vocab_size": vocab_size, **_SIZES}
    plain = write_checkpoint(tmp_path / "plain", **changes)
    pattern = re.compile(r".*(_proj|embed_tokens|lm_head)\.weight")
    folder, expected = write_quantized(plain, tmp_path, SCHEMES[name], pattern)
    for backend in ("auto", "torch"):
        config = replace(CONFIG, attention_backend=backend)
        assert difference(folder, expected, config) < 1e-4
        made = make_plan(folder, config)
        if vocab_size % 16 == 0:  # else torch multiplies by a head
            held = held_bytes(Engine.load(folder, config)._decoder)
            assert made.weight_bytes <= held < 1.08 * made.weight_bytes
        if backend == "auto" or name not in _FLOAT:
            assert made.weight_bytes < 0.35 * make_plan(expected, config).weight_bytes
    parameters = loaded(folder, torch.float32, backend="compiled")
    tables = ["embedding"] if is_tied else ["embedding", "head.weight"]
    assert all(isinstance(parameters[table], PackedWeight) for table in tables)


@pytest.mark.fast(3)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [112, 97], ids=["whole panels", "odd"])
def test_weights_of_16_bits_stay_so_in_float32(
    tmp_path: Path, dtype: torch.dtype, is_tied: bool, vocab_size: int
) -> None:
    """Their numbers are the same. Of a quantised model these are embedding and head mostly, which
    would take more than all else."""
    changes: dict[str, Any] = {"tie_word_embeddings": is_tied, "vocab_size": vocab_size, **_SIZES}
    plain = write_checkpoint(tmp_path / "plain", **changes)
    weights = load_file(plain / "model.safetensors")
    for folder, kind in (("wide", torch.float32), ("half", dtype)):
        shutil.copytree(plain, tmp_path / folder)
        converted = {name: each.to(dtype).to(kind) for name, each in weights.items()}
        save_file(converted, tmp_path / folder / "model.safetensors")
    wide, half = tmp_path / "wide", tmp_path / "half"
    config = replace(CONFIG, attention_backend="compiled")
    assert torch.equal(logits(half, config), logits(wide, config))
    planned, of_wide = (make_plan(each, config).weight_bytes for each in (half, wide))
    num_kept = sum(each.numel() for each in weights.values() if each.dim() == 2)
    assert of_wide - planned == 2 * num_kept
    held = held_bytes(Engine.load(half, config)._decoder)
    assert planned <= held < 1.04 * planned
    for name in ("bfloat16", "float32"):
        others = replace(config, dtype=name, attention_backend="torch")
        same = (make_plan(each, others).weight_bytes for each in (half, wide))
        assert len(set(same)) == 1
        assert torch.equal(logits(half, others), logits(wide, others))


@pytest.mark.parametrize(
    ("table", "target"), [("embed_tokens", "Embedding"), ("lm_head", "re:lm_head")]
)
def test_a_table_with_a_scheme_of_its_own(
    tmp_path: Path, plain: Path, table: str, target: str
) -> None:
    """The class of an embedding; a head that config.json still says is the embedding."""
    config = compressed("pack-quantized", 4, "group", group_size=32)
    own = compressed("pack-quantized", 8)["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**own, "targets": [target]}
    usual, other = packed(4, 32), packed(8, None)
    scheme = Scheme(lambda name, weight: (other if table in name else usual)(name, weight), config)
    pattern = re.compile(rf".*(_proj|{table})\.weight")
    folder, expected = write_quantized(plain, tmp_path, scheme, pattern)
    content = json.loads((folder / "config.json").read_text())
    content["tie_word_embeddings"] = table == "lm_head"
    (folder / "config.json").write_text(json.dumps(content))
    assert difference(folder, expected) < 1e-4


@pytest.mark.parametrize("name", ["ct-w8a16", "ct-fp8-tensor-static"])
def test_a_chunk_of_a_prompt_that_draws_nothing(tmp_path: Path, name: str) -> None:
    """No token reaches the last layer's experts then."""
    plain = tmp_path / "plain"
    write_family(plain, "phimoe")
    pattern = re.compile(r".*experts\.\d+\.w\d\.weight|.*_proj\.weight")
    folder, expected = write_quantized(plain, tmp_path, SCHEMES[name], pattern)
    answers = [
        EngineDriver(Engine.load(each, CONFIG)).generate([Job(PROMPT)], 4, chunk_size=7)
        for each in (folder, expected)
    ]
    assert answers[0] == answers[1]


def test_experts_stay_quantised(tmp_path: Path) -> None:
    """Each with an order of its columns; one is not quantised, and of another a part."""
    plain = tmp_path / "plain"
    write_family(plain, "qwen3_moe")
    config = {**SCHEMES["gptq-order"].config, "group_size": 8}
    pattern = re.compile(r".*experts\.((?!3|1\.up)\d.*)_proj\.weight")
    scheme = Scheme(gptq(8, has_order=True), config)
    folder, expected = write_quantized(plain, tmp_path, scheme, pattern)
    assert difference(folder, expected) < 1e-4
    planned = make_plan(folder, CONFIG).weight_bytes
    assert loaded_bytes(folder, CONFIG) == planned
    assert planned < 0.7 * make_plan(expected, CONFIG).weight_bytes


def test_a_router_may_be_quantised(tmp_path: Path) -> None:
    """It has few rows: one word holds the zeros of all of them."""
    plain = tmp_path / "plain"
    write_family(plain, "qwen3_moe")
    scheme = Scheme(
        packed(4, 8, is_symmetric=False),
        compressed("pack-quantized", 4, "group", group_size=8, symmetric=False),
    )
    folder, expected = write_quantized(plain, tmp_path, scheme, re.compile(r".*mlp\.gate\.weight"))
    assert difference(folder, expected) < 1e-4


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """As published: blocks, gate and up in turns, biases; transformers widens them, too."""
    import transformers

    plain = tmp_path / "plain"
    write_family(plain, "gpt_oss")
    pattern = re.compile(r".*experts\.(gate_up|down)_proj")
    folder, expected = write_quantized(plain, tmp_path, GPT_OSS, pattern)
    assert difference(folder, expected) < 1e-4
    planned = make_plan(folder, CONFIG)
    assert loaded_bytes(folder, CONFIG) == planned.weight_bytes
    assert planned.weight_bytes < 0.5 * make_plan(expected, CONFIG).weight_bytes
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        attn_implementation="eager",
    ).float()
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    found = logits(folder)[: len(PROMPT)]
    assert float((found - wanted).abs().max() / wanted.std()) < 1e-4


def _renamed(make: Make, **names: str) -> Make:
    """The same with other ends of names."""

    def renamed(module: str, weight: torch.Tensor) -> Made:
        tensors, wide = make(module, weight)
        return {names.get(end, end): tensor for end, tensor in tensors.items()}, wide

    return renamed


@pytest.mark.fast(2)
@pytest.mark.parametrize("family", ["llama4", "qwen3_vl_moe", "granitemoe"])
@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("fp8-blocks", {"weight_scale_inv": "scale_inv"}),
        ("fbgemm_fp8", {"weight_scale": "scale"}),
        ("ct-fp8-tensor-static", {}),
        ("modelopt-nvfp4", {}),
    ],
)
def test_stacked_experts(tmp_path: Path, family: str, name: str, scales: dict[str, str]) -> None:
    """As transformers and ModelOpt write those of Llama 4 and Qwen3-VL; Granite's are linears."""
    plain = tmp_path / "plain"
    if family == "qwen3_vl_moe":
        write_wrapped(plain, family)
    else:
        write_family(plain, family)
    is_linear, is_turned = family == "granitemoe", family == "llama4"
    pattern = re.compile(r".*(experts\.(gate_up|down)_proj|(in|out)put_linear\.weight)")
    scheme = SCHEMES[name]
    if not is_linear:
        scheme = replace(scheme, make=_renamed(scheme.make, **scales))
    folder, expected = write_quantized(
        plain, tmp_path, scheme, pattern, is_transposed=not is_turned
    )
    assert difference(folder, expected) < 1e-4
    planned = make_plan(folder, CONFIG).weight_bytes
    assert loaded_bytes(folder, CONFIG) == planned
    assert planned < 0.8 * make_plan(expected, CONFIG).weight_bytes


def test_one_scale_of_all_experts(tmp_path: Path) -> None:
    """ModelOpt's FP8 of Llama 4."""

    def make(_: str, weight: torch.Tensor) -> Made:
        values = (weight / 0.02).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": torch.tensor(0.02)}, values.float() * 0.02

    plain = tmp_path / "plain"
    write_family(plain, "llama4")
    pattern = re.compile(r".*experts\.(gate_up|down)_proj")
    scheme = Scheme(make, SCHEMES["modelopt"].config)
    folder, expected = write_quantized(plain, tmp_path, scheme, pattern)
    weights = load_file(folder / "model.safetensors")
    one = {each: weights[each][0] for each in weights if each.endswith("_weight_scale")}
    assert one
    save_file({**weights, **one}, folder / "model.safetensors")
    assert difference(folder, expected) < 1e-4


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["bnb-nf4", "ct-nvfp4"])
@pytest.mark.parametrize("family", ["llama4", "gpt_oss"])
def test_experts_that_were_taken_apart(tmp_path: Path, family: str, name: str) -> None:
    """A linear for each, though the family has stacks: llmcompressor writes them so."""
    stacked = tmp_path / "stacked"
    write_family(stacked, family)
    plain = _with_single_experts(stacked, family)
    assert difference(plain, stacked) < 1e-5
    pattern = re.compile(r".*experts\.\d+\.\w+\.weight")
    folder, expected = write_quantized(plain, tmp_path, SCHEMES[name], pattern)
    assert difference(folder, expected) < 1e-4
    assert loaded_bytes(folder, CONFIG) == make_plan(folder, CONFIG).weight_bytes


def test_parts_of_a_fused_linear_may_differ(tmp_path: Path, plain: Path) -> None:
    """A part that is not quantised between two that are."""
    pattern = re.compile(r".*(q|v|gate)_proj\.weight")
    scheme = SCHEMES["ct-fp8-channel-dynamic"]
    folder, expected = write_quantized(plain, tmp_path, scheme, pattern)
    assert difference(folder, expected) < 1e-4
    assert loaded_bytes(folder, CONFIG) == make_plan(folder, CONFIG).weight_bytes


def rounded(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """What a weight becomes, in groups of 64 columns, which divide those here as 128 does not."""
    if quantization == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round() * scale
    groups = weight.view(len(weight), -1, 128 if weight.shape[1] % 128 == 0 else 64)
    low = groups.amin(2, keepdim=True).clamp(max=0)
    scale = (groups.amax(2, keepdim=True).clamp(min=0) - low) / 15
    zero = (-low / scale).round()
    return (((groups / scale + zero).round().clamp(0, 15) - zero) * scale).view(weight.shape)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.01), ("int4", 0.13)])
def test_rounding_at_load(tmp_path: Path, plain: Path, quantization: str, error: float) -> None:
    """An unquantised checkpoint, against one of the rounded numbers; memory is what is planned."""
    weights = load_file(plain / "model.safetensors")
    tables = {"lm_head.weight": "int8", "model.embed_tokens.weight": "int8"}
    expected = {
        name: rounded(each, tables.get(name, quantization))
        if "_proj.weight" in name or name in tables
        else each
        for name, each in weights.items()
    }
    assert tables.keys() < expected.keys()
    name = "model.layers.0.mlp.down_proj.weight"
    off = expected[name] - weights[name]
    assert 0 < float(off.norm() / weights[name].norm()) < error
    shutil.copy(plain / "config.json", tmp_path)
    save_file(expected, tmp_path / "model.safetensors")
    wanted = logits(tmp_path)
    config = replace(CONFIG, quantization=quantization)
    assert float((logits(plain, config) - wanted).abs().max() / wanted.std()) < 1e-4
    for dtype in ("float32", "bfloat16"):
        chosen = replace(config, dtype=dtype)
        made = make_plan(plain, chosen)
        assert loaded_bytes(plain, chosen) == made.weight_bytes
        assert (
            made.weight_bytes < make_plan(plain, replace(chosen, quantization="none")).weight_bytes
        )
        assert made.quantization == quantization
    name = Engine.load(plain, config).dtype_name
    assert name == f"float32 ({quantization}) with float32 KV cache"


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "family",
    ["gpt2", "mixtral", "granitemoe", "gpt_oss", "dbrx", "llama4", "qwen3_next", "deepseek_v3"],
)
def test_rounding_at_load_goes_with_any_layout(tmp_path: Path, family: str) -> None:
    """Of linears and of experts; the oracle are the rounded numbers, widened.

    A head of a recurrence may read almost nothing of its state for some token (here 3e-4, usually
    1e-2), and a norm divides by that: a last bit of a weight then makes 2e-4 of the logits of that
    token alone, and of all others 3e-5 at most.
    """
    write_family(tmp_path, family)
    config = replace(CONFIG, quantization="int4")
    parameters = loaded(tmp_path, torch.float32, "int4")
    packed = {name: each for name, each in parameters.items() if isinstance(each, PackedWeight)}
    assert any("down.weight" in name for name in packed)
    model = read_model(tmp_path)
    with Checkpoint(tmp_path) as opened:
        model = opened.fit(model)
    wide: dict[str, Parameter] = {
        name: dequantize(each) if isinstance(each, PackedWeight) else each
        for name, each in parameters.items()
    }
    with torch.inference_mode():
        engine = Engine(resolve_on_device(CONFIG, model, has_triton=False), model, wide)
    wanted = logits_of(engine)
    bound = 1e-3 if model.deltas else 1e-4
    assert float((logits(tmp_path, config) - wanted).abs().max() / wanted.std()) < bound
    assert loaded_bytes(tmp_path, config) == make_plan(tmp_path, config).weight_bytes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported: compressed-"),
        ({"bits": 4}, "quant_method is missing; supported: compressed-tensors, fp8"),
        (
            {**compressed("pack-quantized"), "ignore": ["re:*.gate"]},
            "ignore has the pattern '*.gate', which is no regular expression: nothing to repeat",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {"bits": 8}}},
            "dynamic has the pattern '(', which is no regular expression: missing )",
        ),
        (compressed("pack-quantized", 4, "group"), "weights: group_size is missing"),
        (
            compressed("pack-quantized", 4, actorder="columns"),
            "weights: actorder 'columns' is not supported; supported: group, dynamic, weight, st",
        ),
        ({"quant_method": "fp8", "activation_scheme": "x"}, "activation_scheme 'x' is not suppo"),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_lb": 1},
            "activation_scale_lb is not supported; supported: quant_method, ",
        ),
        (
            {"quant_method": "fp8", "fmt": "e5m2"},
            "fmt 'e5m2' is not supported; supported: e4m3, float8_e4m3fn",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is missing"),
        (compressed("marlin-24"), "format 'marlin-24' is not supported; supported: float-quant"),
        (compressed("float-quantized", bits=4), "weights: num_bits 4 is not supported; suppo"),
        ({"quant_method": "awq", "bits": 3}, "bits 3 is not supported; supported: 4"),
        ({"quant_method": "awq", "w_bit": 8}, "w_bit 8 is not supported; supported: 4"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "version 'gemv' is not supported; supported: gemm",
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be -1 or above"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"rotation": 1}}},
            "dynamic: +:.*down.*: rotation is not supported; supported: bits, group_size, desc_act",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 3}}},
            "bits 3 is not supported; supported: 4, 8",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:marlin"},
            "packing_format 'auto_round:marlin' is not supported; supported, joined by ':': auto_",
        ),
        ({"quant_method": "auto-round", "bits": 2}, "bits 2 is not supported; supported: 4, 8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type 'int4' is no"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit or load_in_8bit must be true"),
        (
            {"quant_algo": "NVFP4_SVD"},
            "quant_algo 'NVFP4_SVD' is not supported; supported: FP8, FP",
        ),
        ({"quant_method": "mxfp4", "group_size": 32}, "group_size is not supported; supported: q"),
        (
            compressed("mxfp4-pack-quantized", 4, "group", group_size=16),
            "group_size 16 is not supported; supported: 32",
        ),
        (compressed("pack-quantized", bits=2), "weights: num_bits 2 is not supported; suppor"),
        (compressed("float-quantized", type="int"), "type 'int' does not go with format float-"),
        (compressed("float-quantized", hadamard=2), "weights: hadamard is not supported; suppo"),
        (
            compressed("float-quantized", strategy="tensor_group"),
            "weights: strategy 'tensor_group' is not supported; supported: tensor, channel, group",
        ),
        (
            {**compressed("float-quantized"), "sparsity_config": {"format": "sparse-24"}},
            "sparsity_config is not supported",
        ),
        (
            {**compressed("float-quantized"), "quantization_status": "initialized"},
            "quantization_status 'initialized' is not supported; supported: compressed",
        ),
    ],
)
def test_configurations_that_are_refused(
    tmp_path: Path, plain: Path, config: dict[str, Any], message: str
) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["fbgemm_fp8"])
    set_quantization(folder, config)
    with pytest.raises(CheckpointError) as caught:
        make_plan(folder, CONFIG)
    assert str(caught.value).startswith("config.json: quantization_config")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "gptq-v2",
            {
                "quant_method": "auto-round",
                "packing_format": "auto_round",
                "autoround_version": "0.16",
            },
        ),
        ("gptq-asymmetric", {"quant_method": "intel/auto-round", "backend": "auto_round:gptq"}),
        ("gptq", {"quant_method": "auto-round", "extra_config": {".*gate.*": {"bits": 16}}}),
        ("awq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}),
        ("fp8-blocks", {**SCHEMES["fp8-blocks"].config, "fmt": "float8_e4m3fn"}),
        ("ct-nvfp4", {"quant_method": "auto-round", "bits": 4, "data_type": "nv_fp",
                      "group_size": 16, "packing_format": "auto_round:llm_compressor"}),
        ("awq", {"method": "awq", "format": "gemm", "checkpoint_format": "gemm", "sym": False,
                 "desc_act": False, "lm_head": False, "pack_dtype": "int32", "meta": {}}),
    ],
)  # fmt: skip
def test_other_tools_of_the_same_layouts(
    tmp_path: Path, plain: Path, name: str, changes: dict[str, Any]
) -> None:
    """AutoRound, FP8 of MiniMax, and AWQ as GPTQModel writes it."""
    folder, expected = write_quantized(plain, tmp_path, SCHEMES[name])
    read = ("bits", "group_size", "sym") if changes.get("quant_method") else SCHEMES[name].config
    kept = {key: SCHEMES[name].config[key] for key in read if key in SCHEMES[name].config}
    set_quantization(folder, {**kept, **changes})
    assert difference(folder, expected) < 1e-4


@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_linears_with_bits_and_groups_of_their_own(
    tmp_path: Path, plain: Path, method: str
) -> None:
    """``dynamic`` of GPTQModel, ``extra_config`` of AutoRound."""
    usual, other = gptq(32), gptq(64, bits=8)
    pattern = re.compile(r".*(attn|up|down).*_proj\.weight")
    scheme = Scheme(
        lambda name, weight: (other if "down" in name else usual)(name, weight),
        {
            "quant_method": method,
            "bits": 4,
            "group_size": 32,
            "sym": True,
            **(
                {"dynamic": {"-:.*gate": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64}}}
                if method == "gptq"
                else {
                    "extra_config": {
                        r".*\.gate_proj.*": {"bits": 16, "data_type": "float"},
                        "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64},
                        r".*1\.mlp\.down_proj.*": {"bits": 8, "group_size": 64},
                    }
                }
            ),
        },
    )
    folder, expected = write_quantized(plain, tmp_path, scheme, pattern)
    assert difference(folder, expected) < 1e-4


def test_old_files_that_say_it(tmp_path: Path, plain: Path) -> None:
    """A key of another name, a file of its own, none of the method."""
    for name, file in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        folder, expected = write_quantized(plain, tmp_path / name, SCHEMES[name])
        shutil.copy(plain / "config.json", folder)
        content = {key: each for key, each in SCHEMES[name].config.items() if key != "quant_method"}
        (folder / file).write_text(json.dumps(content))
        assert difference(folder, expected) < 1e-4
    for name in ("ct-w4a16", "bnb-nf4", "modelopt-nvfp4"):
        folder, expected = write_quantized(plain, tmp_path / name, SCHEMES[name])
        content = json.loads((plain / "config.json").read_text())
        said = {key: each for key, each in SCHEMES[name].config.items() if key != "quant_method"}
        (folder / "config.json").write_text(json.dumps({**content, "compression_config": said}))
        assert difference(folder, expected) < 1e-4


def test_weights_that_are_not_quantised_beside_attention_that_is(
    tmp_path: Path, plain: Path
) -> None:
    """A KV cache in FP8 alone."""
    config = compressed("dense")
    config["config_groups"]["group_0"] |= {"weights": None, "targets": ["LlamaAttention"]}
    none: dict[str, Any] = {}
    for groups in (config["config_groups"], none):
        folder = shutil.copytree(plain, tmp_path / str(len(groups)))
        scheme = {"num_bits": 8, "type": "float"}
        said = {**config, "config_groups": groups, "kv_cache_scheme": scheme}
        set_quantization(folder, said)
        weights = load_file(folder / "model.safetensors")
        scales = {f"model.layers.0.self_attn.{kind}_scale": torch.ones(1) for kind in "qkv"}
        save_file({**weights, **scales}, folder / "model.safetensors")
        assert difference(folder, plain) == 0


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path, plain: Path) -> None:
    folder, expected = write_quantized(plain, tmp_path, SCHEMES["modelopt"])
    shutil.copy(plain / "config.json", folder)
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        make_plan(folder, CONFIG)
    content = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    assert difference(folder, expected) < 1e-4
    content["quantization"]["quant_algo"] = "NVFP4_SVD"
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    message = r"^hf_quant_config\.json: quantization: quant_algo 'NVFP4_SVD'"
    with pytest.raises(CheckpointError, match=message):
        make_plan(folder, CONFIG)


def test_modelopt_may_say_it_of_each_linear(tmp_path: Path, plain: Path) -> None:
    """FP4 and FP8 in one checkpoint."""
    fp4, fp8 = SCHEMES["modelopt-nvfp4"].make, SCHEMES["modelopt"].make

    def choose(module: str) -> str:
        return "NVFP4" if "mlp" in module else "FP8"

    names = [
        f"model.layers.{index}.{part}_proj"
        for index in range(2)
        for part in (
            "mlp.gate",
            "mlp.up",
            "mlp.down",
            "self_attn.q",
            "self_attn.k",
            "self_attn.v",
            "self_attn.o",
        )
    ]
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {name: {"quant_algo": choose(name)} for name in names},
    }
    scheme = Scheme(
        lambda name, weight: (fp4 if choose(name) == "NVFP4" else fp8)(name, weight), config
    )
    folder, expected = write_quantized(plain, tmp_path, scheme)
    assert difference(folder, expected) < 1e-4
    config["quantized_layers"]["model.layers.0.mlp.up_proj"]["quant_algo"] = "NVFP4_SVD"
    set_quantization(folder, config)
    message = "layers.0.mlp.up_proj: quant_algo 'NVFP4_SVD' is not supported; supported: FP8, "
    with pytest.raises(CheckpointError, match=re.escape(message)):
        make_plan(folder, CONFIG)


def test_biases_that_gptq_writes_for_none(tmp_path: Path) -> None:
    """Old files have a bias of zeros for each linear; one of other numbers has a meaning."""
    plain = write_checkpoint(tmp_path / "plain", "llama-mha", **_SIZES)
    folder, expected = write_quantized(plain, tmp_path, SCHEMES["gptq"])
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.bias"
    save_file({**weights, name: torch.zeros(192)}, folder / "model.safetensors")
    assert difference(folder, expected) < 1e-4
    save_file({**weights, name: torch.ones(192)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(f"{name} is not 0")):
        Engine.load(folder, CONFIG)


def test_what_is_said_of_a_quantised_model(tmp_path: Path, plain: Path) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["awq"])
    assert make_plan(folder, CONFIG).quantization == "awq"
    assert Engine.load(folder, CONFIG).dtype_name == "float32 (awq) with float32 KV cache"


def test_the_rule_of_a_linear_is_that_which_names_it(tmp_path: Path, plain: Path) -> None:
    """Two groups: blocks for what a pattern names, rows for all others."""
    config = compressed("float-quantized")
    blocks = compressed("float-quantized", strategy="block", block_structure=[128, 128])
    group = {**blocks["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]}
    config["config_groups"]["group_1"] = group
    of_blocks, of_rows = SCHEMES["ct-fp8-blocks"].make, SCHEMES["ct-fp8-channel-dynamic"].make
    mixed = Scheme(
        lambda module, weight: (of_blocks if "self_attn" in module else of_rows)(module, weight),
        config,
    )
    folder, expected = write_quantized(plain, tmp_path, mixed)
    assert difference(folder, expected) < 1e-4
    del config["config_groups"]["group_0"]
    config["config_groups"]["group_2"] = {**group, "targets": ["model.layers.0.mlp.up_proj"]}
    set_quantization(folder, config)
    with pytest.raises(CheckpointError, match="none of its schemes is for it"):
        make_plan(folder, CONFIG)


def test_of_several_rules_for_a_linear_one_counts(tmp_path: Path, plain: Path) -> None:
    """As compressed-tensors has it: a name before patterns, and these by the alphabet, in whatever
    order the groups are."""
    small, large, bytes_ = (packed(4, 32), packed(4, 64), packed(8, 32))
    group = compressed("pack-quantized", 4, "group", group_size=64)["config_groups"]["group_0"]
    sizes = {"re:.*mlp.*": (64, 4), "re:.*down_proj": (32, 4), "Linear": (32, 4),
             "model.layers.1.mlp.down_proj": (32, 8)}  # fmt: skip
    config = compressed("pack-quantized")
    config["config_groups"] = {
        f"group_{index}": {
            **group,
            "targets": [target],
            "weights": {**group["weights"], "group_size": size, "num_bits": bits},
        }
        for index, (target, (size, bits)) in enumerate(sizes.items())
    }

    def make(module: str, weight: torch.Tensor) -> Made:
        if module == "model.layers.1.mlp.down_proj":
            return bytes_(module, weight)
        is_large = "mlp" in module and "down" not in module
        return (large if is_large else small)(module, weight)

    assert difference(*write_quantized(plain, tmp_path, Scheme(make, config))) < 1e-4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            EngineConfig(device="cuda"),
            "on a GPU needs triton, which is not installed; install it, or use device=cpu",
        ),
        (EngineConfig(device="cpu", quantization="fp8"), "already; use quantization=none"),
        (EngineConfig(device="cpu", deterministic_mode=True), "needs attention_backend triton"),
    ],
)
def test_settings_that_a_quantised_checkpoint_does_not_go_with(
    tmp_path: Path, plain: Path, config: EngineConfig, message: str
) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["fbgemm_fp8"])
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve_on_device(config, read_model(folder), has_triton=False)


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("weight_scale", None, "1 missing tensor: model.layers.0.mlp.up_proj.weight_scale"),
        ("weight_scale", torch.ones(7, 1), "weight_scale has shape [7, 1], config.json asks for ["),
        ("weight_scale", torch.ones(192, 1).int(), "up_proj.weight_scale is I32, supported are F"),
        ("qzeros", torch.ones(1), "1 unused tensor: model.layers.0.mlp.up_proj.qzeros"),
    ],
)
def test_tensors_that_a_scheme_does_not_have(
    tmp_path: Path, plain: Path, end: str, tensor: torch.Tensor | None, message: str
) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["fbgemm_fp8"])
    weights = load_file(folder / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{end}"
    weights.pop(name, None)
    if tensor is not None:
        weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        make_plan(folder, CONFIG)


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("name", "end", "number", "message"),
    [
        (
            "ct-fp8-channel-dynamic",
            "weight_scale",
            "nan",
            "has nan; scales must be finite and 0 or",
        ),
        ("fp8-blocks", "weight_scale_inv", -1, "has -1.0; scales must be finite and 0 or above"),
        ("ct-mxfp4", "weight_scale", 255, "has nan; scales must be finite and 0 or above"),
        ("ct-nvfp4", "weight_global_scale", 0, "has 0.0; scales must be finite and above 0"),
        ("modelopt-nvfp4", "weight_scale", "nan", "has nan; scales must be finite and 0 or above"),
        ("awq", "scales", "inf", "has inf; scales must be finite"),
        ("ct-w4a16", "weight_scale", "-inf", "has -inf; scales must be finite"),
        ("bnb-nf4", "weight.absmax", "nan", "has nan; scales must be finite"),
        ("bnb-8", "SCB", -2, "has -2.0; scales must be finite and 0 or above"),
    ],
)
def test_scales_that_are_no_numbers(
    tmp_path: Path, plain: Path, name: str, end: str, number: Any, message: str
) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES[name])
    weights = load_file(folder / "model.safetensors")
    scales = weights[f"model.layers.1.mlp.up_proj.{end}"]
    wide = scales.flatten() if scales.dtype == torch.uint8 else scales.flatten().float()
    wide[-1] = float(number)
    scales.copy_(wide.view_as(scales).to(scales.dtype))
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        Engine.load(folder, CONFIG)
    assert "model.layers.1.mlp.up_proj" in str(caught.value)
    assert end in str(caught.value)


@pytest.mark.fast(1)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_bfloat16_rounds_but_for_the_choice_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """FP8 blocks of a mixture. With random weights a router's second and third expert may be so
    close that rounding decides, and other experts say something else: logits of that token then
    differ by 0.5 to 4 deviations, as those of plain weights do. So experts are those that float32
    chooses, and all that is left is rounding.
    """
    plain = tmp_path / "plain"
    write_family(plain, "qwen3_moe")
    pattern = re.compile(r".*(experts\.\d+\.\w+|_proj)\.weight")
    folder, expected = write_quantized(plain, tmp_path, SCHEMES["fp8-blocks"], pattern)
    chosen: list[torch.Tensor] = []

    def logits_with(engine: Engine, given: list[torch.Tensor] | None) -> torch.Tensor:
        """With those experts, each time that some are chosen; None: keep them as ``chosen``."""

        def choose(
            routing: RoutingConfig,
            top_k: int,
            logits: torch.Tensor,
            correction: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            experts, weights = ops.choose_experts(routing, top_k, logits, correction)
            if given is None:
                chosen.append(experts)
                return experts, weights
            experts = given.pop(0)
            shares = logits.softmax(-1).gather(-1, experts.long())
            return experts, (shares / shares.sum(-1, keepdim=True)).to(weights.dtype)

        for layer in engine._decoder._layers:
            ops = layer.mlp._ops
            monkeypatch.setattr(layer.mlp, "_ops", replace(ops, choose_experts=choose))
        monkeypatch.setattr(engine._decoder, "_run_joined", None)
        return logits_of(engine)

    config = replace(CONFIG, attention_backend=backend)
    wanted = logits_with(Engine.load(expected, config), None)
    assert chosen
    config = replace(config, dtype="bfloat16")
    found = logits_with(Engine.load(folder, config), chosen)
    assert not chosen
    assert float((found - wanted).abs().max() / wanted.std()) < 0.25
