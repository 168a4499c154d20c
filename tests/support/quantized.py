"""Quantised checkpoints made of plain ones by the public formulas, beside what they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

FP8 = torch.float8_e4m3fn
Made = tuple[dict[str, Tensor], Tensor]
"""Tensors by the ends of their names, and the weight that they stand for."""
_LINEAR = re.compile(r".*layers\.\d+\.(self_attn|mlp)\..*proj\.weight")
Make = Callable[[str, Tensor], Made]


@dataclass(frozen=True)
class Scheme:
    """``make`` quantises a linear by name, ``config`` says how in config.json."""

    make: Make
    config: dict[str, Any]


def write_quantized(
    plain: Path,
    folder: Path,
    scheme: Scheme,
    pattern: re.Pattern[str] = _LINEAR,
    *,
    is_transposed: bool = False,
) -> tuple[Path, Path]:
    """Two copies of a checkpoint in one file, with the weights of ``pattern`` quantised and as
    plain numbers of the same values. ``is_transposed``: the plain ones are [inputs, outputs], or
    stacked ones are not."""
    quantised, expected = folder / "quantised", folder / "expected"
    of_quantised: dict[str, Tensor] = {}
    of_expected: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if pattern.fullmatch(name):
            module = name.removesuffix(".weight")
            dot = "." if name != module else "_"
            if tensor.dim() == 3:
                tensors, wide = _of_all_experts(scheme.make, module, tensor, not is_transposed)
            else:
                tensors, wide = scheme.make(module, tensor.t() if is_transposed else tensor)
                wide = wide.t() if is_transposed else wide
            of_quantised |= {f"{module}{dot}{end}": each for end, each in tensors.items()}
            if dot == "_" and "weight" in tensors:
                of_quantised[name] = of_quantised.pop(f"{name}_weight")
            of_expected[name] = wide.float()
        else:
            of_quantised[name] = of_expected[name] = tensor
    for target, weights in ((quantised, of_quantised), (expected, of_expected)):
        target.mkdir(parents=True)
        shutil.copy(plain / "config.json", target)
        contiguous = {name: each.contiguous() for name, each in weights.items()}
        save_file(contiguous, target / "model.safetensors")
    set_quantization(quantised, scheme.config)
    return quantised, expected


def _of_all_experts(make: Make, module: str, weights: Tensor, is_turned: bool) -> Made:
    """The same of stacked weights [E, inputs, outputs] if ``is_turned``, else [E, outputs, inputs].
    Blocks of gpt-oss and their scales are never turned."""
    made = [
        make(f"{module}.{index}", each.t() if is_turned else each)
        for index, each in enumerate(weights)
    ]
    tensors = {end: torch.stack([each[0][end] for each in made]) for end in made[0][0]}
    wide = torch.stack([each for _, each in made])
    if not is_turned:
        return tensors, wide
    if "blocks" not in tensors:
        tensors = {
            end: each.transpose(1, 2) if each.dim() == 3 else each for end, each in tensors.items()
        }
    return tensors, wide.transpose(1, 2)


def set_quantization(folder: Path, config: dict[str, Any]) -> None:
    """Replace ``quantization_config``."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), "quantization_config": config}
    path.write_text(json.dumps(content))


def compressed(
    format: str, bits: int = 8, strategy: str = "channel", **weights: Any
) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors with one group for all linears."""
    kind = "float" if format.startswith(("float", "mxfp", "nvfp")) else "int"
    numbers = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "dynamic": False, "observer": "minmax", **weights},
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def with_inputs(config: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    """The same with quantised activations."""
    group = config["config_groups"]["group_0"]
    return {
        **config,
        "config_groups": {"group_0": {**group, "input_activations": {"num_bits": 8, **inputs}}},
    }


def mixed(schemes: dict[str, Scheme]) -> Scheme:
    """Several of compressed-tensors in one checkpoint, by their targets "re:..."."""

    def make(module: str, weight: Tensor) -> Made:
        (scheme,) = (each for target, each in schemes.items() if re.match(target[3:], module))
        return scheme.make(module, weight)

    groups = {
        f"group_{index}": {
            **scheme.config["config_groups"]["group_0"],
            "targets": [target],
            "format": scheme.config["format"],
        }
        for index, (target, scheme) in enumerate(schemes.items())
    }
    config = next(iter(schemes.values())).config
    return Scheme(make, {**config, "format": "mixed-precision", "config_groups": groups})


def fp8_tensor(_: str, weight: Tensor) -> Made:
    """A scale for all, and one of the inputs."""
    scale = (weight.abs().max() / 448).bfloat16().reshape(1)
    values = (weight / scale.float()).to(FP8)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}
    return tensors, values.float() * scale.float()


def _scalars(made: Made) -> Made:
    """Scales without a dimension, and one of a cache."""
    tensors, wide = made
    scalars = {name: each.float().reshape(()) for name, each in tensors.items() if len(each) == 1}
    return {**tensors, **scalars, "k_scale": torch.ones(())}, wide


def fp8_rows(_: str, weight: Tensor) -> Made:
    """A scale for each row."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).float()
    values = (weight / scales).to(FP8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def fp8_blocks(name: str) -> Make:
    """A scale for each block of 128 x 128, in a tensor of that ``name``."""

    def make(_: str, weight: Tensor) -> Made:
        rows, columns = weight.shape
        shape = (-(-rows // 128), -(-columns // 128))
        scales = torch.empty(shape)
        values = torch.empty(weight.shape, dtype=FP8)
        wide = torch.empty_like(weight)
        for i in range(shape[0]):
            for j in range(shape[1]):
                place = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                scales[i, j] = weight[place].abs().max() / 448
                values[place] = (weight[place] / scales[i, j]).to(FP8)
                wide[place] = values[place].float() * scales[i, j]
        return {"weight": values, name: scales}, wide

    return make


def _grouped(
    weight: Tensor, bits: int, size: int, is_symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers from 0 [rows, columns], scales and zeros [rows, groups], and what they stand for;
    groups of ``size`` columns."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, size)
    if is_symmetric:
        scales = groups.abs().amax(2) / 2 ** (bits - 1)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / (2**bits - 1)
        zeros = (-low / scales).round()
    scales = scales.half().float()
    numbers = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    wide = (numbers - zeros[..., None]) * scales[..., None]
    return numbers.int().view(rows, columns), scales, zeros.int(), wide.view(rows, columns)


def _words(numbers: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [n, m] to words along the last dimension."""
    count = 32 // bits
    padded = functional.pad(numbers, (0, -numbers.shape[1] % count)).long()
    parts = padded.view(len(padded), -1, count)
    places = torch.tensor(order or range(count)) * bits
    words = (parts << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def int8_rows(_: str, weight: Tensor) -> Made:
    """A scale for each row."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales.float()


def with_factors(make: Make) -> Make:
    """What the linear reads is multiplied by a number for each column first: ModelOpt's AWQ and
    SmoothQuant. Linears of one input have the same ones, but not experts."""

    def make_scaled(module: str, weight: Tensor) -> Made:
        generator = torch.Generator().manual_seed(_seed_of_input(module, weight.shape[1]))
        factors = 0.5 + torch.rand(weight.shape[1], generator=generator).bfloat16()
        tensors, wide = make(module, weight)
        return {**tensors, "pre_quant_scale": factors}, wide * factors.float()

    return make_scaled


def packed(bits: int, size: int | None, is_symmetric: bool = True, has_order: bool = False) -> Make:
    """pack-quantized of compressed-tensors."""

    def make(module: str, weight: Tensor) -> Made:
        order, groups = _shuffled(module, weight.shape[1], size if has_order else None)
        numbers, scales, zeros, wide = _grouped(
            weight[:, order], bits, size or weight.shape[1], is_symmetric
        )
        back = order.argsort()
        tensors = {
            "weight_packed": _words(numbers[:, back], bits),
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": scales.half(),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = _words(zeros.t(), bits).t()
        if has_order:
            tensors["weight_g_idx"] = groups
        return tensors, wide[:, back]

    return make


def _shuffled(module: str, columns: int, size: int | None) -> tuple[Tensor, Tensor]:
    """The columns by their groups of ``size`` (None: as they are), and the group of each; linears
    of one input share it, but not experts."""
    order = torch.arange(columns)
    if size is not None:
        generator = torch.Generator().manual_seed(_seed_of_input(module, columns))
        order = torch.randperm(columns, generator=generator)
    return order, (order.argsort() // (size or columns)).int()


def _seed_of_input(module: str, columns: int) -> int:
    """One for each expert, and one for all other linears."""
    expert = re.search(r"experts\.(\d+)", module)
    return columns + (0 if expert is None else int(expert[1]))


def awq(size: int) -> Make:
    """gemm order, asymmetric."""

    def make(_: str, weight: Tensor) -> Made:
        numbers, scales, zeros, wide = _grouped(weight, 4, size, is_symmetric=False)
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        tensors = {
            "qweight": _words(numbers.t(), 4, order),
            "qzeros": _words(zeros.t(), 4, order),
            "scales": scales.t().half(),
        }
        return tensors, wide

    return make


def gptq(
    size: int, *, bits: int = 4, is_symmetric: bool = True, has_order: bool = False,
    zeros_below: int = 1,
) -> Make:  # fmt: skip
    """``zeros_below``: by how much the file's zeros are too small."""

    def make(module: str, weight: Tensor) -> Made:
        order, groups = _shuffled(module, weight.shape[1], size if has_order else None)
        numbers, scales, zeros, wide = _grouped(weight[:, order], bits, size, is_symmetric)
        if not is_symmetric:  # v1 cannot say 0
            zeros = zeros.clamp(min=1)
            wide = numbers.view(len(numbers), -1, size) - zeros[..., None]
            wide = (wide * scales[..., None]).flatten(1)
        back = order.argsort()
        tensors = {
            "qweight": _words(numbers[:, back], bits).t(),
            "qzeros": _words((zeros - zeros_below).t(), bits),
            "scales": scales.t().half(),
            "g_idx": groups if has_order else torch.arange(weight.shape[1]).int() // size,
        }
        return tensors, wide[:, back]

    return make


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Of FP4, the numbers without a sign."""


def _fp4(weight: Tensor, size: int, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [rows, columns / 2] and what they stand for, with scales [rows, groups]."""
    scaled = weight.view(len(weight), -1, size) / scales[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    wide = (E2M1[codes] * scaled.sign() * scales[..., None]).view(weight.shape)
    codes = (codes + 8 * (scaled < 0)).view(weight.shape)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), wide


def mxfp4(values: str, scales: str) -> Make:
    """Scales that are powers of two, for 32 columns each, under those names."""

    def make(_: str, weight: Tensor) -> Made:
        rows, columns = weight.shape
        exponents = weight.reshape(rows, -1, 32).abs().amax(2).log2().floor() - 2
        packed, wide = _fp4(weight.contiguous(), 32, exponents.exp2())
        if values == "blocks":
            packed = packed.view(rows, columns // 32, 16)
        return {values: packed, scales: (exponents + 127).to(torch.uint8)}, wide

    return make


def nvfp4(values: str, scale: str, *, divides: bool, size: int = 16) -> Make:
    """Scales in FP8 for ``size`` columns each, and one of the weight, under those names."""

    def make(_: str, weight: Tensor) -> Made:
        groups = weight.reshape(len(weight), -1, size).abs().amax(2) / 6
        whole = groups.max() / 448
        scales = (groups / whole).to(FP8)
        packed, wide = _fp4(weight.contiguous(), size, scales.float() * whole)
        found = (1 / whole).reshape(1) if divides else whole
        tensors = {values: packed, "weight_scale": scales, scale: found}
        return tensors | {"input_scale" if divides else "input_global_scale": torch.ones(1)}, wide

    return make


NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


def nf4(*, has_double: bool) -> Make:
    """Blocks of 64 numbers, across rows; ``has_double``: their scales are quantised."""

    def make(_: str, weight: Tensor) -> Made:
        flat = weight.flatten().float()
        blocks = functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
        scales = blocks.abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
        tensors = {"weight.quant_map": NF4.clone(), "weight.absmax": scales}
        if has_double:
            table, offset = torch.linspace(-1, 1, 256), float(scales.mean())
            outer = (scales - offset).abs().view(-1, 1).amax(0)  # less than 256 of them
            codes = ((scales - offset)[:, None] / outer - table).abs().argmin(1)
            scales = table[codes] * outer + offset
            state |= {"nested_blocksize": 256 * len(codes), "nested_offset": offset}
            tensors |= {
                "weight.absmax": codes.to(torch.uint8),
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": table,
            }
        codes = (blocks[..., None] / scales[:, None, None] - NF4).abs().argmin(-1)
        wide = (NF4[codes] * scales[:, None]).flatten()[: len(flat)].view(weight.shape)
        codes = codes.flatten()[: len(flat)]
        said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors | {
            "weight": (16 * codes[::2] + codes[1::2]).to(torch.uint8)[:, None],
            "weight.quant_state.bitsandbytes__nf4": said,
        }, wide

    return make


def bnb8(_: str, weight: Tensor) -> Made:
    """A scale for each row: its largest number."""
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0).to(torch.uint8)}
    return tensors, values.float() * largest[:, None] / 127


def mxfp8(_: str, weight: Tensor) -> Made:
    """The same in FP8. (Of numbers above 448 torch 2.11 makes NaN, and later ones 448.)"""
    groups = weight.view(len(weight), -1, 32)
    exponents = groups.abs().amax(2).log2().floor() - 8
    values = (groups / exponents.exp2()[..., None]).clamp(-448, 448).to(FP8)
    wide = (values.float() * exponents.exp2()[..., None]).view(weight.shape)
    scales = (exponents + 127).to(torch.uint8)
    return {"weight": values.view(weight.shape), "weight_scale": scales}, wide


_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "damp_percent": 0.01,
    "checkpoint_format": "gptq",
}
_FLOAT_ROWS = compressed("float-quantized")
SCHEMES = {
    "ct-fp8-tensor-static": Scheme(
        fp8_tensor,
        with_inputs(
            compressed("float-quantized", strategy="tensor"),
            type="float",
            strategy="tensor",
            dynamic=False,
        ),
    ),
    "modelopt": Scheme(
        lambda name, weight: _scalars(fp8_tensor(name, weight)),
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.47"},
        },
    ),
    "ct-fp8-channel-dynamic": Scheme(
        fp8_rows, with_inputs(_FLOAT_ROWS, type="float", strategy="token", dynamic=True)
    ),
    "fbgemm_fp8": Scheme(
        fp8_rows,
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "fp8-blocks": Scheme(
        fp8_blocks("weight_scale_inv"),
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": None,
        },
    ),
    "ct-fp8-blocks": Scheme(
        fp8_blocks("weight_scale"),
        compressed("float-quantized", strategy="block", block_structure=[128, 128]),
    ),
}
"""By names of their own; those in FP8."""
_MX: dict[str, Any] = {"group_size": 32, "scale_dtype": "torch.uint8"}
SCHEMES |= {
    "ct-mxfp8": Scheme(mxfp8, compressed("mxfp8-quantized", strategy="group", **_MX)),
    "ct-nvfp4": Scheme(
        nvfp4("weight_packed", "weight_global_scale", divides=True),
        with_inputs(
            compressed(
                "nvfp4-pack-quantized",
                4,
                "tensor_group",
                group_size=16,
                scale_dtype="torch.float8_e4m3fn",
                zp_dtype="torch.float8_e4m3fn",
            ),
            type="float",
            strategy="tensor_group",
            dynamic="local",
            group_size=16,
        ),
    ),
    "modelopt-nvfp4": Scheme(
        nvfp4("weight", "weight_scale_2", divides=False),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "config_groups": {
                "group_0": {
                    "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
                    "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head", "model.layers.0.mlp.gate*"],
            "producer": {"name": "modelopt", "version": "0.47"},
        },
    ),
    "modelopt-nvfp4-groups-of-32": Scheme(
        nvfp4("weight", "weight_scale_2", divides=False, size=32),
        {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8", "ignore": ["lm_head"]},
    ),
    "ct-mxfp4": Scheme(
        mxfp4("weight_packed", "weight_scale"),
        compressed("mxfp4-pack-quantized", 4, "group", **_MX),
    ),
}
_BITSANDBYTES: dict[str, Any] = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}
SCHEMES |= {
    "bnb-nf4": Scheme(nf4(has_double=False), _BITSANDBYTES),
    "bnb-nf4-double": Scheme(nf4(has_double=True), _BITSANDBYTES),
    "bnb-8": Scheme(bnb8, {**_BITSANDBYTES, "load_in_4bit": False, "load_in_8bit": True}),
}
GPT_OSS = Scheme(
    mxfp4("blocks", "scales"),
    {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
)
"""Of its experts alone."""
_INT8_INPUTS = {"type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
W8A8 = Scheme(int8_rows, with_inputs(compressed("int-quantized"), **_INT8_INPUTS))
"""What linears read is rounded, too."""
SCHEMES |= {
    "ct-w8a16": Scheme(int8_rows, compressed("int-quantized")),
    "modelopt-w8a16-factors": Scheme(
        with_factors(int8_rows),
        {"quant_method": "modelopt", "quant_algo": "W8A16", "ignore": ["lm_head"]},
    ),
    "ct-w8a16-packed": Scheme(packed(8, None), compressed("pack-quantized")),
    "ct-w8a16-asymmetric": Scheme(
        packed(8, None, is_symmetric=False), compressed("pack-quantized", symmetric=False)
    ),
    "ct-w8a16-groups": Scheme(
        packed(8, 64, is_symmetric=False),
        compressed("pack-quantized", strategy="group", group_size=64, symmetric=False),
    ),
    "ct-w4a16": Scheme(
        packed(4, 32), compressed("pack-quantized", 4, "group", group_size=32, actorder="static")
    ),
    "ct-w4a16-asymmetric": Scheme(
        packed(4, 64, is_symmetric=False),
        compressed("pack-quantized", 4, "group", group_size=64, symmetric=False),
    ),
    "ct-w4a16-channel": Scheme(packed(4, None), compressed("pack-quantized", 4)),
    "ct-w4a16-order": Scheme(
        packed(4, 32, has_order=True),
        compressed("pack-quantized", 4, "group", group_size=32, actorder="group"),
    ),
    "awq": Scheme(awq(32), _AWQ),
    "gptq": Scheme(gptq(32), _GPTQ),
    "gptq-zeros-of-v2": Scheme(gptq(32, zeros_below=0), _GPTQ),
    "gptq-v2": Scheme(
        gptq(64, is_symmetric=False, zeros_below=0),
        {**_GPTQ, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-asymmetric": Scheme(gptq(32, is_symmetric=False), {**_GPTQ, "sym": False}),
    "gptq-order": Scheme(gptq(32, has_order=True), {**_GPTQ, "desc_act": True}),
    "gptq-8": Scheme(gptq(32, bits=8), {**_GPTQ, "bits": 8}),
    "gptq-8-order": Scheme(
        gptq(32, bits=8, is_symmetric=False, has_order=True),
        {**_GPTQ, "bits": 8, "sym": False, "desc_act": True},
    ),
}
