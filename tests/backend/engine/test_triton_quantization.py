"""Quantised checkpoints by the kernels of a GPU, which are interpreted where there is none."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from support.checkpoints import write_checkpoint
from support.engine_driver import EngineDriver, Job
from support.fake_cuda import FakeCuda
from support.families import write_family
from support.gguf_writer import Array, keep_float32, write_gguf
from support.held_memory import held_bytes
from support.manager_harness import request, serve, small_engine
from support.pairs import write_pair
from support.quantized import SCHEMES, W8A8, Scheme, gptq, mixed, write_quantized

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.layers import Parameter
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.quantization.forms import JoinedWeight, PackedWeight
from inflight_backend.models.weights import Checkpoint
from inflight_kernels.ops.linear.quantized_linear import prepare
from inflight_scheduler import OutputParams, SamplingParams

CPU = EngineConfig(device="cpu", max_batch_size=4, max_tokens_in_paged_kv_cache=256)
TRITON = replace(CPU, device="auto", attention_backend="triton", dtype="float32")
PROMPT = [(7 * index + 3) % 97 for index in range(24)]
_SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fused linears with biases, blocks of 128 that are not full."""
    folder = tmp_path_factory.mktemp("plain")
    return write_checkpoint(folder, "llama-mha", attention_bias=True, **_SIZES)


def logits(folder: Path, config: EngineConfig) -> torch.Tensor:
    """Those of each token of a prompt."""
    return logits_of(Engine.load(folder, config))


def logits_of(engine: Engine) -> torch.Tensor:
    """The same of an engine."""
    driver = EngineDriver(engine)
    driver.step({Job(PROMPT, outputs=OutputParams(context_logits=True)): 0})
    outputs = driver.engine.take_outputs()
    assert outputs is not None
    return torch.cat([torch.tensor(each.logits) for each in outputs.context_logits])


def difference(folder: Path, expected: Path, dtype: str = "float32") -> tuple[float, float]:
    """(the largest, the mean one) in units of the deviation of what is expected."""
    wanted = logits(expected, CPU)
    error = (logits(folder, replace(TRITON, dtype=dtype)) - wanted) / wanted.std()
    return float(error.abs().max()), float(error.square().mean().sqrt())


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_numbers(tmp_path: Path, plain: Path, name: str) -> None:
    """In float32, so that nothing but the order of sums differs."""
    folder, expected = write_quantized(plain, tmp_path, SCHEMES[name])
    assert difference(folder, expected)[0] < 1e-4


@pytest.mark.parametrize("name", SCHEMES)
def test_memory_is_what_is_planned(tmp_path: Path, plain: Path, name: str) -> None:
    """As the kernels read weights: with columns up to a multiple of 128, without zeros that are
    the middle number."""
    folder, _ = write_quantized(plain, tmp_path, SCHEMES[name])
    with Checkpoint(folder) as opened:
        specs = decoder_parameters(opened.fit(read_model(folder)))
        parameters = opened.load(specs, torch.bfloat16, "cpu", backend="triton").values()
    planned = make_plan(folder, replace(TRITON, dtype="bfloat16"), gpu_memory=2**34)
    assert sum(map(prepared_bytes, parameters)) == planned.weight_bytes


def prepared_bytes(parameter: Parameter) -> int:
    """Of a parameter as a linear keeps it."""
    if isinstance(parameter, JoinedWeight):
        return sum(map(prepared_bytes, parameter.parts))
    if isinstance(parameter, torch.Tensor):
        return parameter.nbytes
    assert isinstance(parameter, PackedWeight)
    order = None if parameter.order is None else parameter.order[None]
    size, table = parameter.group_size, parameter.codebook
    made = prepare(
        parameter.values, parameter.scales, parameter.wide_zeros, group_size=size, order=order,
        codebook=table,
    )  # fmt: skip
    return sum(
        each.nbytes
        for each in (made.values, made.scales, made.zeros, made.order, parameter.factors)
        if each is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("ct-w8a8", 0.08),
        ("ct-fp8-channel-dynamic", 0.25),
        ("fp8-blocks", 0.25),
        ("ct-w4a16", 0.05),
        ("ct-w8a16", 0.05),
    ],
)
def test_logits_in_bfloat16(tmp_path: Path, plain: Path, name: str, bound: float) -> None:
    """With what linears read in 8 bits where the scheme says so: of FP8 four digits are kept."""
    scheme = W8A8 if name == "ct-w8a8" else SCHEMES[name]
    folder, expected = write_quantized(plain, tmp_path, scheme)
    assert 1e-4 < difference(folder, expected, "bfloat16")[1] < bound


@pytest.mark.slow
def test_parts_of_a_fused_linear_may_differ(tmp_path: Path, plain: Path) -> None:
    """A part that is not quantised between two that are."""
    pattern = re.compile(r".*(q|v|gate)_proj\.weight")
    folder, expected = write_quantized(plain, tmp_path, SCHEMES["ct-w4a16-order"], pattern)
    assert difference(folder, expected)[0] < 1e-4


_EXPERTS = re.compile(r".*experts\.\d+\.w\d\.weight")
_GROUPS_OF_8 = Scheme(gptq(8, has_order=True), {**SCHEMES["gptq-order"].config, "group_size": 8})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "bound"),
    [
        (_GROUPS_OF_8, 1e-4),
        (SCHEMES["ct-w4a16-channel"], 1e-4),
        (SCHEMES["ct-w8a16"], 1e-4),
        (SCHEMES["fp8-blocks"], 1e-4),
        (W8A8, 0.3),
    ],
    ids=["order", "4 bits", "8 bits", "fp8", "w8a8"],
)
def test_experts(tmp_path: Path, scheme: Scheme, bound: float) -> None:
    """All of a layer in one launch, whatever orders their columns have."""
    plain = tmp_path / "plain"
    write_family(plain, "mixtral")
    folder, expected = write_quantized(plain, tmp_path, scheme, _EXPERTS)
    assert difference(folder, expected)[0] < bound


@pytest.mark.fast(1)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_while_it_is_loaded(plain: Path, quantization: str) -> None:
    """To the same numbers as for a CPU."""
    found, expected = (
        logits(plain, replace(config, quantization=quantization, dtype="float32"))
        for config in (TRITON, CPU)
    )
    assert (found - expected).abs().max() < 1e-4 * expected.std()


_CHANGES = {"gemma3n": {"altup_num_inputs": 4}}  # of an even number, as bytes of two need it
_LATENTS = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
_CHANGES |= {"deepseek_v3": _LATENTS}


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "fp8-blocks"),
        ("qwen2_moe", "modelopt-w8a16-factors"),
        ("llama-linear", "ct-w8a16-asymmetric"),
        ("opt-350m", "ct-w8a16"),
        ("gemma3n", "ct-w8a16"),
        ("gemma3n", "bnb-nf4"),
        *product(
            ("deepseek_v3", "qwen2_moe", "llama-linear"),
            ("bnb-nf4", "gptq-8-order", "modelopt-w8a16-factors", "ct-w4a16-channel"),
        ),
    ],
)
def test_no_weight_is_widened(tmp_path: Path, family: str, name: str) -> None:
    """Whatever may come quantised stays so: what expands latents, routers and gates, experts with
    factors of their own, an embedding that is the head, positions, what mixes streams."""
    plain = tmp_path / "plain"
    write_family(plain, family, **_CHANGES.get(family, {}))
    with Checkpoint(plain) as opened:
        specs = decoder_parameters(opened.fit(read_model(plain)))
    weights = {
        source.name
        for spec in specs
        for source in spec.sources
        if source.name.endswith(".weight") and len(source.shape) == 2
    }
    pattern = re.compile("|".join(map(re.escape, weights)))
    scheme = SCHEMES[name]
    if name == "gptq-8-order":
        scheme = Scheme(gptq(8, bits=8, has_order=True), {**scheme.config, "group_size": 8})
    folder, expected = write_quantized(plain, tmp_path, scheme, pattern)
    with Checkpoint(folder) as opened:
        specs = decoder_parameters(opened.fit(read_model(folder)))
        parameters = opened.load(specs, torch.float32, "cpu", backend="triton")
    quantised = [spec for spec in specs if any(each.scheme for each in spec.sources)]
    assert {source.name for spec in quantised for source in spec.sources} == weights
    for spec in quantised:
        parameter = parameters[spec.name]
        assert isinstance(parameter, PackedWeight | JoinedWeight)
        assert not isinstance(parameter, JoinedWeight) or all(
            isinstance(each, PackedWeight) for each in parameter.parts
        )
    wanted, engine = logits(expected, CPU), Engine.load(folder, TRITON)
    assert (logits_of(engine) - wanted).abs().max() < 1e-4 * wanted.std()
    planned = make_plan(folder, TRITON, gpu_memory=2**34).weight_bytes
    assert planned <= held_bytes(engine._decoder) < 1.08 * planned


@pytest.mark.slow
def test_latents_of_gguf_stay_in_few_bits(tmp_path: Path) -> None:
    """Keys and values apart, keys turned."""
    plain = tmp_path / "plain"
    write_family(plain, "deepseek_v3", **_LATENTS)

    def keep(name: str, data: Array) -> tuple[Array, GGMLQuantizationType]:
        kind = GGMLQuantizationType.Q8_0
        is_kept = name.endswith(("attn_k_b.weight", "attn_v_b.weight"))
        return (
            (quantize(np.ascontiguousarray(data), kind), kind)
            if is_kept
            else keep_float32(name, data)
        )

    path = write_gguf(plain, tmp_path / "model.gguf", "deepseek2", keep)
    with Checkpoint(path) as opened:
        specs = decoder_parameters(opened.fit(read_model(path)))
        parameters = opened.load(specs, torch.float32, "cpu", backend="triton")
    for name in ("expand_keys", "expand_values"):
        assert isinstance(parameters[f"layers.1.{name}"], PackedWeight)
    assert difference(path, path)[0] < 1e-4


@pytest.mark.fast(1)
def test_experts_of_several_schemes(tmp_path: Path) -> None:
    """Of a layer some are quantised one way and some another, one's gate in a way of its own, and
    one is not: nothing is widened."""
    plain = tmp_path / "plain"
    write_family(plain, "mixtral")
    schemes = {
        r"re:.*(self_attn|experts\.[03])\..*": SCHEMES["ct-w8a16"],
        r"re:.*experts\.1\.w1": SCHEMES["ct-w8a16"],
        r"re:.*experts\.(1\.w[23]|2\..*)": SCHEMES["ct-w4a16-channel"],
        r"re:.*experts\.4\..*": SCHEMES["ct-fp8-channel-dynamic"],
    }
    pattern = re.compile(r".*(experts\.[0-4]\.w\d|_proj)\.weight")
    folder, expected = write_quantized(plain, tmp_path, mixed(schemes), pattern)
    wanted, engine = logits(expected, CPU), Engine.load(folder, TRITON)
    assert (logits_of(engine) - wanted).abs().max() < 1e-4 * wanted.std()
    planned = make_plan(folder, TRITON, gpu_memory=2**34).weight_bytes
    assert planned <= held_bytes(engine._decoder) < 1.08 * planned


@pytest.mark.slow
def test_experts_of_gguf_whose_gates_have_another_type(tmp_path: Path) -> None:
    """With biases of both."""
    plain = tmp_path / "plain"
    write_family(plain, "gpt_oss", hidden_size=64, intermediate_size=64)

    def keep(name: str, data: Array) -> tuple[Array, GGMLQuantizationType]:
        kinds = {"gate": GGMLQuantizationType.Q4_0, "up": GGMLQuantizationType.Q8_0}
        found = re.fullmatch(r".*ffn_(gate|up)_exps\.weight", name)
        if found is None:
            return keep_float32(name, data)
        return quantize(np.ascontiguousarray(data), kinds[found[1]]), kinds[found[1]]

    path = write_gguf(plain, tmp_path / "model.gguf", "gpt-oss", keep)
    assert difference(path, path)[0] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ct-w4a16", "ct-w8a8", "ct-fp8-channel-dynamic", "fp8-blocks"])
def test_a_request_alone_and_among_others(tmp_path: Path, plain: Path, name: str) -> None:
    """In the deterministic mode a request draws the same whatever runs beside it."""
    scheme = W8A8 if name == "ct-w8a8" else SCHEMES[name]
    folder, _ = write_quantized(plain, tmp_path, scheme)
    config = replace(TRITON, dtype="bfloat16", deterministic_mode=True)
    jobs = [
        Job(PROMPT[index : 6 + 3 * index], SamplingParams(temperature=1.5, seed=index))
        for index in range(3)
    ]
    together = EngineDriver(Engine.load(folder, config)).generate(jobs, 4)
    alone = EngineDriver(Engine.load(folder, config)).generate(jobs[-1:], 4)
    assert together[-1] == alone[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ct-w4a16", "awq", "ct-w8a8", "fp8-blocks"])
def test_an_engine_waits_for_nothing(
    tmp_path: Path, plain: Path, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On a device whose steps are recorded: tokens are those of the interpreter without one."""
    scheme = W8A8 if name == "ct-w8a8" else SCHEMES[name]
    folder, _ = write_quantized(plain, tmp_path, scheme)
    # Few and small steps, all of which are interpreted.
    config = replace(TRITON, max_batch_size=2, max_num_tokens=32, cuda_graph_mixed_tokens=0)
    expected = EngineDriver(Engine.load(folder, config)).generate([Job(PROMPT)], 5)
    fake_cuda.install(monkeypatch)
    engine = Engine.load(folder, replace(config, device="cuda"))
    assert engine.num_graphs
    assert EngineDriver(engine).generate([Job(PROMPT)], 5) == expected


@pytest.mark.slow
def test_experts_of_several_schemes_wait_for_nothing(
    tmp_path: Path, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many rows those of a scheme have is known on the device alone."""
    plain = tmp_path / "plain"
    write_family(plain, "mixtral")
    pattern = re.compile(r".*experts\.(?!3)\d\.w\d\.weight")
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["ct-w8a16"], pattern)
    config = replace(TRITON, max_batch_size=2, max_num_tokens=32, cuda_graph_mixed_tokens=0)
    expected = EngineDriver(Engine.load(folder, config)).generate([Job(PROMPT)], 3)
    fake_cuda.install(monkeypatch)
    engine = Engine.load(folder, replace(config, device="cuda"))
    assert engine.num_graphs
    assert EngineDriver(engine).generate([Job(PROMPT)], 3) == expected


@pytest.mark.fast(1)
@pytest.mark.parametrize("has_encoder", [False, True])
def test_attention_without_a_kernel(
    tmp_path: Path, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, has_encoder: bool
) -> None:
    """Of heads of odd sizes, or over an encoder's answer, a GPU attends in plain torch, and
    multiplies by weights as they are: of all linears and tables."""
    plain, scheme = tmp_path / "plain", SCHEMES["ct-w8a16"]
    if has_encoder:
        write_pair(plain, "bart")
    else:
        write_checkpoint(plain, "llama-mha", **{**_SIZES, "head_dim": 24})
    with Checkpoint(plain) as opened:
        specs = decoder_parameters(opened.fit(read_model(plain)))
    sources = [each for spec in specs for each in spec.sources if len(each.shape) == 2]
    names = [each.name for each in sources if each.name.endswith(".weight")]
    pattern = re.compile("|".join(map(re.escape, names)))
    folder, expected = write_quantized(plain, tmp_path, scheme, pattern)
    wanted = _first_logits(expected, device="cpu")
    fake_cuda.install(monkeypatch)
    found = _first_logits(folder, device="cuda", dtype="float32")
    assert (found - wanted).abs().max() < 1e-4 * wanted.std()


def _first_logits(folder: Path, **changes: Any) -> torch.Tensor:
    """Of a text, behind what an encoder says of it if there is one."""
    engine = small_engine(folder, **changes)
    planned = make_plan(folder, engine.config, gpu_memory=2**34).weight_bytes
    assert planned <= held_bytes((engine._decoder, engine._encoder)) < 1.08 * planned
    sent = request(1, PROMPT, 1, streaming=False, return_context_logits=True)
    (answer,) = serve([sent], engine).named_tensors[1]
    return torch.from_numpy(answer["context_logits"][0])
