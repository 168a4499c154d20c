"""What our calls of the peers rely on, looked up in their sources without importing them."""

from __future__ import annotations

import ast
from pathlib import Path

# File, class or "" for a function of the module, function, arguments we pass by name.
_FUNCTIONS = (
    (
        "flashinfer/decode.py",
        "BatchDecodeWithPagedKVCacheWrapper",
        "plan",
        "q_data_type kv_data_type sm_scale",
    ),
    (
        "flashinfer/decode.py",
        "BatchDecodeWithPagedKVCacheWrapper",
        "__init__",
        "float_workspace_buffer kv_layout use_tensor_cores",
    ),
    (
        "flashinfer/prefill.py",
        "BatchPrefillWithPagedKVCacheWrapper",
        "plan",
        "causal sm_scale q_data_type kv_data_type",
    ),
    (
        "vllm/sampling_params.py",
        "SamplingParams",
        "",
        "max_tokens ignore_eos temperature detokenize",
    ),
    (
        "vllm/engine/arg_utils.py",
        "EngineArgs",
        "",
        "model load_format skip_tokenizer_init dtype enable_prefix_caching max_model_len "
        "max_num_seqs max_num_batched_tokens block_size gpu_memory_utilization "
        "kv_cache_memory_bytes attention_backend compilation_config quantization kv_cache_dtype",
    ),
    ("vllm/config/compilation.py", "CompilationConfig", "", "mode cudagraph_mode"),
    ("minisgl/engine/config.py", "EngineConfig", "",
     "max_running_req attention_backend use_dummy_weight use_pynccl cuda_graph_max_bs "
     "max_seq_len_override num_page_override"),
    ("minisgl/scheduler/config.py", "SchedulerConfig", "", "max_extend_tokens cache_type"),
    ("minisgl/core.py", "SamplingParams", "", "ignore_eos max_tokens"),
)  # fmt: skip
# File and text that must stand in it.
_TEXTS = (
    ("vllm/v1/attention/backends/registry.py", "FLASH_ATTN = "),
    ("vllm/v1/attention/backends/registry.py", "TRITON_ATTN = "),
    ("vllm/config/compilation.py", "FULL_DECODE_ONLY"),
    ("vllm/vllm_flash_attn/flash_attn_interface.py", "torch.ops._vllm_fa3_C.fwd("),
)
_FILES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "flashinfer/__init__.py",
    "tvm_ffi/__init__.py",
)


def broken_promises(site: Path) -> list[str]:
    """One sentence for each thing that is not as we call it; peers that are absent are passed."""
    problems = [f"{name} is missing" for name in _FILES if not (site / name).is_file()]
    for file, owner, function, names in _FUNCTIONS:
        path = site / file
        if not path.is_file():
            if (site / file.split("/")[0]).is_dir():
                problems.append(f"{file} is missing")
            continue
        known = _arguments(path, owner, function)
        where = f"{file}: {owner}{'.' + function if function else ''}"
        problems += [f"{where} has no {name}" for name in names.split() if name not in known]
    for file, text in _TEXTS:
        path = site / file
        if path.is_file() and text not in path.read_text(encoding="utf-8"):
            problems.append(f"{file} does not say {text!r}")
    return problems


def _arguments(path: Path, owner: str, function: str) -> set[str]:
    """Arguments of a method, or the annotated fields of a class."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef) or node.name != owner:
            continue
        if not function:
            fields = (item for item in node.body if isinstance(item, ast.AnnAssign))
            return {item.target.id for item in fields if isinstance(item.target, ast.Name)}
        found = [
            item for item in node.body
            if isinstance(item, ast.FunctionDef) and item.name == function
        ]  # fmt: skip
        if found:
            arguments = found[-1].args  # overloads come first
            return {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}
    return set()
