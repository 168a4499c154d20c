"""SmolLM2-135M as every engine reads it: the same weights as safetensors and as GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import save_file

NAME = "smollm2-135m"


def write_safetensors(file: Path, folder: Path) -> None:
    """The GGUF ``file``, its matrices widened to float16 and all else to float32, with its
    configuration and tokenizer."""
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    del model.config.quantization_config  # it has been widened
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    weights = {
        name: (each.half() if each.dim() == 2 else each.float()).contiguous()
        for name, each in model.state_dict().items()
        if name != "lm_head.weight"  # the embedding
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write_gguf(source: Path, target: Path, kind: str) -> Path:
    """``source`` with all matrices as ``kind``, such as "Q8_0"."""
    reader = gguf.GGUFReader(source)
    field = reader.get_field("general.architecture")
    assert field is not None
    writer = gguf.GGUFWriter(target, field.contents())
    for name, each in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        is_list = each.types[0] == gguf.GGUFValueType.ARRAY
        inner = each.types[-1] if is_list else None
        writer.add_key_value(name, each.contents(), each.types[0], inner)
    for tensor in reader.tensors:
        wide = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        chosen = gguf.GGMLQuantizationType[kind if wide.ndim == 2 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(wide, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
