"""Writes tests/data/quantized: tiny checkpoints that the original tools quantised on a CPU.

Each folder has what the tool saved, and ``expected.safetensors``: tokens, and the logits in float32
of a plain model with the numbers that the weights stand for, as the tool itself or transformers
widens them. The models are random, of fixed seeds. The tools' requirements clash, so each has an
environment of its own, and its name is given:

    python -m venv /tmp/NAME && /tmp/NAME/bin/pip install PACKAGES
    /tmp/NAME/bin/python tools/write_quantized_checkpoints.py NAME [ROW ...]

`PACKAGES` below says which.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

PACKAGES = {
    "llmcompressor": "llmcompressor==0.14.0.1 torch==2.13.0",
    "bitsandbytes": "bitsandbytes==0.50.2 transformers accelerate torch==2.13.0",
    "modelopt": "nvidia-modelopt[hf]==0.47.0 torch==2.13.0",
    "auto_round": "auto-round==0.16.1 torch==2.13.0",
    "gptqmodel": "torch==2.13.0 transformers accelerate, then gptqmodel==7.6.0",
    "autoawq": "transformers torch==2.13.0, and without its requirements autoawq==0.2.9",
}
TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "quantized"
_TOKENS = [(7 * index + 3) % 97 for index in range(24)]
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
_FAMILIES = {
    "llama": (transformers.LlamaConfig, {"head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {}),
    "mixtral": (
        transformers.MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    ),
}
Model = Any  # transformers' classes have no types here


def make_model(family: str, **changes: Any) -> Model:
    """A random one whose norms and biases are not those of a fresh model: numbers of bfloat16, in
    float32."""
    kind, own = _FAMILIES[family]
    config = kind(**{**_SIZES, **own, **changes}, dtype=torch.float32)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in model.named_parameters():
            noise = torch.randn(each.shape, generator=generator)
            if each.dim() == 1:
                each.add_(0.2 * noise)
            elif "embed" in name:
                each.copy_(0.5 * noise)
            else:
                each.copy_(1.5 * each.shape[-1] ** -0.5 * noise)
            each.copy_(each.bfloat16())
    return model.eval()


def write(row: str, saved: Path, family: str, wide: dict[str, Tensor], **changes: Any) -> None:
    """Keep what a tool has ``saved``; ``wide``: the weights of the linears, which a plain model of
    that family gets for the expected logits."""
    plain = make_model(family, **changes)
    others = {
        name.replace("block_sparse_moe", "mlp"): each
        for path in saved.glob("*.safetensors")
        for name, each in load_file(path).items()
        if each.is_floating_point() and each.dtype != torch.float8_e4m3fn
    }
    target = plain.state_dict()
    for name in target:
        found = wide.get(name, others.get(name))
        if found is None and name != "lm_head.weight":
            raise SystemExit(f"{row}: nothing for {name}")
        if found is not None:
            target[name] = found.float().reshape(target[name].shape)
    plain.load_state_dict(target)
    plain.tie_weights()
    with torch.no_grad():
        logits = plain(torch.tensor([_TOKENS])).logits[0]
    folder = TARGET / row
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in saved.iterdir():
        if path.suffix == ".safetensors" or path.name in ("config.json", "hf_quant_config.json"):
            shutil.copy(path, folder)
    save_file(
        {"tokens": torch.tensor(_TOKENS), "logits": logits.contiguous()},
        folder / "expected.safetensors",
        {"made_by": _made_by(), "family": family},
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{row}: {size // 1024} KiB, deviation of the logits {logits.std():.2f}", flush=True)


_made_by_packages: list[str] = ["torch", "transformers"]


def _made_by() -> str:
    return json.dumps({name: version(name) for name in _made_by_packages})


def _linears_of(model: Model) -> dict[str, Tensor]:
    return {name: each.detach().float() for name, each in model.named_parameters()}


Writers = dict[str, Callable[[Path], None]]


# llmcompressor


def _of_llmcompressor() -> Writers:
    _made_by_packages.extend(("llmcompressor", "compressed-tensors"))
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    def simple(scheme: str, **more: Any) -> Any:
        return lambda: [
            QuantizationModifier(
                targets="Linear", scheme=scheme, ignore=["lm_head", "re:.*mlp.gate$"], **more
            )
        ]

    def weights(bits: int, **more: Any) -> dict[str, Any]:
        numbers = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
        return {"targets": ["Linear"], "weights": {**numbers, "symmetric": True, **more}}

    def grouped(modifier: Any, **groups: Any) -> Any:
        return lambda: [modifier(config_groups=groups, ignore=["lm_head", "re:.*mlp.gate$"])]

    def smoothed() -> list[Any]:
        try:
            from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
        except ImportError:
            from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
        return [
            SmoothQuantModifier(smoothing_strength=0.8),
            GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
        ]

    fp8_kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True,
              "dynamic": False}  # fmt: skip
    attention = {**weights(8, strategy="channel", group_size=None), "targets": ["re:.*self_attn.*"]}
    mlp = {**weights(4), "targets": ["re:.*mlp.*"]}
    rows: dict[str, tuple[str, Any]] = {
        "ct_fp8_dynamic": ("qwen2", simple("FP8_DYNAMIC")),
        "ct_fp8_block": ("llama", simple("FP8_BLOCK")),
        "ct_fp8_kv": ("llama", simple("FP8", kv_cache_scheme=fp8_kv)),
        "ct_w8a8_smoothquant_gptq": ("llama", smoothed),
        "ct_w8a16": (
            "qwen2",
            grouped(QuantizationModifier, group_0=weights(8, strategy="channel", group_size=None)),
        ),
        "ct_w4a16_gptq": ("llama", grouped(GPTQModifier, group_0=weights(4))),
        "ct_w4a16_gptq_static_order": (
            "qwen2", grouped(GPTQModifier, group_0=weights(4, actorder="static"))
        ),
        "ct_w4a16_asymmetric": (
            "qwen2", grouped(QuantizationModifier, group_0=weights(4, symmetric=False))
        ),
        "ct_w4a16_channel": (
            "llama",
            grouped(QuantizationModifier,
                    group_0=weights(4, strategy="channel", group_size=None)),
        ),
        "ct_nvfp4": ("llama", simple("NVFP4")),
        "ct_mxfp4": ("llama", simple("MXFP4A16")),
        "ct_mixed": ("llama", grouped(QuantizationModifier, group_0=attention, group_1=mlp)),
        "ct_mixtral_w4a16": ("mixtral", grouped(QuantizationModifier, group_0=weights(4))),
        "ct_mixtral_fp8_dynamic": ("mixtral", simple("FP8_DYNAMIC")),
    }  # fmt: skip
    return {row: partial(_compress, row, family, make) for row, (family, make) in rows.items()}


def _compress(row: str, family: str, make_recipe: Callable[[], list[Any]], folder: Path) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot

    plain = folder / "plain"
    make_model(family).to(torch.bfloat16).save_pretrained(plain)
    _tokenizer().save_pretrained(plain)
    generator = torch.Generator().manual_seed(2)
    texts = torch.randint(97, (16, 32), generator=generator).tolist()
    data = Dataset.from_dict({"input_ids": texts, "attention_mask": [[1] * 32] * 16})
    oneshot(
        model=str(plain),
        dataset=data,
        recipe=make_recipe(),
        num_calibration_samples=16,
        max_seq_length=32,
        output_dir=str(folder / "saved"),
        save_compressed=True,
    )
    write(row, folder / "saved", family, _decompressed(folder / "saved"))


def _tokenizer() -> Any:
    """A word for each token."""
    from tokenizers import Tokenizer, models

    words = {f"w{index}": index for index in range(97)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0")


def _decompressed(folder: Path) -> dict[str, Tensor]:
    """The weights as compressed-tensors itself widens them."""
    from compressed_tensors.compressors.nvfp4 import helpers
    from transformers.utils.quantization_config import CompressedTensorsConfig

    # Or else the numbers of NVFP4 would come rounded to bfloat16.
    helpers.unpack_fp4_from_uint8.__defaults__ = (torch.float32,)
    with tempfile.TemporaryDirectory() as name:  # scales in float32: numbers come in their type
        shutil.copytree(folder, name, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        wide = {
            name: each.float() if each.dtype == torch.bfloat16 else each
            for name, each in tensors.items()
        }
        save_file(wide, Path(name) / "model.safetensors", {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(run_compressed=False),
        )
    return {**_linears_of(model), **_experts(folder)}


def _experts(folder: Path) -> dict[str, Tensor]:
    """Those of Mixtral, which llmcompressor takes apart and transformers does not read again."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    saved = load_file(folder / "model.safetensors")
    found = {}
    for name in sorted(each for each in saved if each.endswith("weight_scale")):
        module = name.removesuffix(".weight_scale")
        if ".experts." not in name:
            continue
        scales = saved[name].float()
        if f"{module}.weight_packed" in saved:
            shape = torch.Size(saved[f"{module}.weight_shape"].tolist())
            numbers = unpack_from_int32(saved[f"{module}.weight_packed"], 4, shape)
        else:
            numbers = saved[f"{module}.weight"]
        size = numbers.shape[1] // scales.shape[1]
        wide = numbers.float() * scales.repeat_interleave(size, dim=1)
        found[f"{module}.weight".replace("block_sparse_moe", "mlp")] = wide
    return _stacked(found)


def _stacked(linears: dict[str, Tensor]) -> dict[str, Tensor]:
    """Linears of experts in the tensors that transformers has of them."""
    found: dict[str, list[Tensor]] = {}
    for name, each in sorted(linears.items()):
        place, is_expert, part = name.partition(".experts.")
        if is_expert and part[0].isdigit():
            found.setdefault(f"{place}.experts.{part.split('.')[1]}", []).append(each)
    stacked = {name: torch.stack(each) for name, each in found.items()}
    for name in [each for each in stacked if each.endswith("gate_proj")]:
        place = name.removesuffix("gate_proj")
        halves = (stacked.pop(name), stacked.pop(f"{place}up_proj"))
        stacked[f"{place}gate_up_proj"] = torch.cat(halves, dim=1)
    return stacked


# bitsandbytes


def _of_bitsandbytes() -> Writers:
    _made_by_packages.append("bitsandbytes")
    from transformers import BitsAndBytesConfig

    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "bnb_nf4": ("llama", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        "bnb_nf4_double": (
            "qwen2",
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_compute_dtype": torch.bfloat16,
            },
        ),
        "bnb_int8": ("qwen2", {"load_in_8bit": True}),
    }

    def run(row: str, family: str, config: dict[str, Any], folder: Path) -> None:
        with tempfile.TemporaryDirectory() as plain:
            make_model(family).to(torch.bfloat16).save_pretrained(plain)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                plain, quantization_config=BitsAndBytesConfig(**config), device_map={"": "cpu"}
            )
        wide = {}
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if weight is None:
                continue
            if hasattr(weight, "quant_state") and weight.quant_state is not None:
                import bitsandbytes.functional as functional

                weight.quant_state.dtype = torch.float32
                wide[f"{name}.weight"] = functional.dequantize_4bit(weight.data, weight.quant_state)
            elif weight.dtype == torch.int8:
                wide[f"{name}.weight"] = weight.data.float() * weight.SCB[:, None] / 127
        model.save_pretrained(folder)
        write(row, folder, family, wide)

    return {row: partial(run, row, family, config) for row, (family, config) in rows.items()}


# ModelOpt


def _of_modelopt() -> Writers:
    _made_by_packages.append("nvidia-modelopt")
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def run(row: str, config: dict[str, Any], sizes: dict[str, Any], folder: Path) -> None:
        model = make_model("qwen2", **sizes).to(torch.bfloat16)
        model.config.architectures = [type(model).__name__]
        tokens = torch.randint(97, (8, 32), generator=torch.Generator().manual_seed(2))
        mtq.quantize(model, config, forward_loop=lambda each: each(tokens))
        export_hf_checkpoint(model, export_dir=folder)
        write(row, folder, "qwen2", _widened_by_modelopt(folder), **sizes)

    fp8_kv = [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]
    large = {"hidden_size": 128, "intermediate_size": 256}  # than a group, or a block
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "modelopt_fp8_kv": ({**mtq.FP8_DEFAULT_CFG, "quant_cfg": fp8_kv}, {}),
        "modelopt_fp8_block": (mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, large),
        "modelopt_int4_awq": (mtq.INT4_AWQ_CFG, large),
        "modelopt_mxfp4": (mtq.MXFP4_DEFAULT_CFG, {}),
        "modelopt_nvfp4": (mtq.NVFP4_DEFAULT_CFG, {}),
    }
    return {row: partial(run, row, config, sizes) for row, (config, sizes) in rows.items()}


def _widened_by_modelopt(folder: Path) -> dict[str, Tensor]:
    """As ModelOpt's classes widen them; it has none for the bytes of INT4."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, NVFP4QTensor

    saved = load_file(folder / "model.safetensors")
    wide = {}
    for name, each in saved.items():
        scale = saved.get(f"{name}_scale")
        if scale is None:
            continue
        shape = torch.Size((each.shape[0], 2 * each.shape[1]))
        if each.dtype != torch.uint8:
            sizes = {} if scale.dim() < 4 else {"block_sizes": {-1: 128, -2: 128}}
            scale = scale[:, 0, :, 0] if sizes else scale
            made = FP8QTensor(each.shape, torch.float32, each).dequantize(scale=scale, **sizes)
        elif f"{name}_scale_2" in saved:
            made = NVFP4QTensor(shape, torch.float32, each).dequantize(
                scale=scale, double_scale=saved[f"{name}_scale_2"], block_sizes={-1: 16}
            )
        elif scale.dtype == torch.uint8:
            made = MXFP4QTensor(shape, torch.float32, each).dequantize(
                scale=scale, block_sizes={-1: 32}
            )
        else:
            numbers = torch.stack((each & 15, each >> 4), dim=1).flatten(0, 1).float()
            numbers[numbers > 7] -= 16
            made = numbers * scale.repeat_interleave(each.shape[1] // scale.shape[1], dim=1)
        factors = saved.get(f"{name.removesuffix('weight')}pre_quant_scale")
        wide[name] = made.float() if factors is None else made.float() * factors.float()
    return wide


# AutoRound, which writes the formats of GPTQ and AWQ


def _of_auto_round() -> Writers:
    _made_by_packages.append("auto-round")
    from auto_round import AutoRound

    def run(row: str, family: str, form: str, settings: dict[str, Any], folder: Path) -> None:
        model = make_model(family).to(torch.bfloat16)
        rounder = AutoRound(
            model,
            _tokenizer(),
            **{"bits": 4, "group_size": 32, "sym": True, **settings},
            iters=0,
            device_map="cpu",
            disable_opt_rtn=True,
        )
        rounder.quantize()
        wide = {name: each.clone() for name, each in _linears_of(model).items()}
        wide |= _stacked(wide)
        rounder.save_quantized(folder, format=form)
        write(row, folder, family, wide)

    rows: dict[str, tuple[str, str, dict[str, Any]]] = {
        "gptq": ("llama", "auto_gptq", {}),
        "gptq_asymmetric": ("qwen2", "auto_gptq", {"sym": False}),
        "awq": ("qwen2", "auto_awq", {"sym": False}),
        "auto_round_mixtral": ("mixtral", "auto_round", {}),
    }
    return {row: partial(run, row, *rest) for row, rest in rows.items()}


# GPTQModel


def _of_gptqmodel() -> Writers:
    _made_by_packages.append("gptqmodel")
    os.cpu_count = lambda: 8  # its pools want more workers than two processors are given
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    tokens = torch.randint(97, (32, 64), generator=torch.Generator().manual_seed(2)).tolist()
    texts = [{"input_ids": each, "attention_mask": [1] * 64} for each in tokens]

    def run(row: str, settings: dict[str, Any], sizes: dict[str, Any], folder: Path) -> None:
        plain, saved = folder / "plain", folder / "saved"
        make_model("qwen2", **sizes).to(torch.bfloat16).save_pretrained(plain)
        _tokenizer().save_pretrained(plain)
        backend = BACKEND.AWQ_TORCH if "awq" in row else BACKEND.GPTQ_TORCH
        config = QuantizeConfig(bits=4, group_size=32, **settings)
        model = GPTQModel.load(str(plain), config, device="cpu")
        model.quantize(texts, batch_size=4, backend=backend)
        model.save(str(saved))
        content = json.loads((saved / "config.json").read_text())
        del content["quantization_config"]["meta"]["offload_to_disk_path"]  # of this machine
        (saved / "config.json").write_text(json.dumps(content, indent=2))
        again = GPTQModel.load(str(saved), backend=backend, device="cpu")
        wide, tensors = {}, load_file(saved / "model.safetensors")
        for name, module in again.model.named_modules():
            if hasattr(module, "qweight"):  # whose scales have been rounded while it was loaded
                module.scales.data = tensors[f"{name}.scales"].float()
                packed = module.qweight, module.qzeros, module.scales
                is_awq = settings.get("method") == "awq"
                made = dequantize_gemm(*packed, 4, 32) if is_awq else module.dequantize_weight()
                wide[f"{name}.weight"] = made.float().t()
        write(row, saved, "qwen2", wide, **sizes)

    order = {"desc_act": True, "act_group_aware": False, "format": "gptq_v2"}
    large = {"hidden_size": 128, "intermediate_size": 256}  # AWQ's search wants 64 rows of each
    return {
        "gptqmodel_v2_order": partial(run, "gptqmodel_v2_order", order, {}),
        "gptqmodel_awq": partial(run, "gptqmodel_awq", {"method": "awq", "format": "gemm"}, large),
    }


# AutoAWQ: its packing, since its search for scales wants an accelerator and an older transformers


def _of_autoawq() -> Writers:
    _made_by_packages.append("autoawq")
    found = find_spec("awq")
    assert found is not None
    package = ModuleType("awq")  # all of it would import what transformers no longer has
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules["awq"] = package
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    size = 32

    def run(folder: Path) -> None:
        model = make_model("qwen2").to(torch.float16)
        tensors, wide = model.state_dict(), {}
        tensors.pop("lm_head.weight")
        for name, module in model.model.layers.named_modules(prefix="model.layers"):
            if not isinstance(module, torch.nn.Linear):
                continue
            grouped = module.weight.detach().float()
            grouped = grouped.view(len(grouped), -1, size)
            low, high = grouped.amin(2), grouped.amax(2)
            scales = ((high - low).clamp(min=1e-5) / 15).half()
            zeros = (-low / scales).round().clamp(0, 15)
            grouped = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
            rounded = (grouped - zeros[..., None]) * scales[..., None]
            module.weight.data = rounded.flatten(1)
            made = WQLinear_GEMM.from_linear(
                module, 4, size, scales=scales.float().t(), zeros=zeros.t()
            )
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{end}": each for end, each in made.state_dict().items()}
            packed = made.qweight, made.qzeros, made.scales.float()
            wide[f"{name}.weight"] = dequantize_gemm(*packed, 4, size).t()
        model.config.quantization_config = {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": size,
            "zero_point": True,
            "modules_to_not_convert": None,
        }
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        saved = {name: each.contiguous() for name, each in tensors.items()}
        save_file(saved, folder / "model.safetensors", {"format": "pt"})
        write("awq_autoawq", folder, "qwen2", wide)

    return {"awq_autoawq": run}


_TOOLS = {
    "llmcompressor": _of_llmcompressor,
    "bitsandbytes": _of_bitsandbytes,
    "modelopt": _of_modelopt,
    "auto_round": _of_auto_round,
    "gptqmodel": _of_gptqmodel,
    "autoawq": _of_autoawq,
}


def main() -> None:
    """Write the rows of one tool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tool", choices=_TOOLS)
    parser.add_argument("rows", nargs="*")
    options = parser.parse_args()
    writers = _TOOLS[options.tool]()
    for row, run in writers.items():
        if options.rows and row not in options.rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(Path(folder))
            except Exception as error:  # of a tool; the other rows are still written
                print(f"{row}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
