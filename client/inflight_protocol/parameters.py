"""Every key of the model's ``parameters`` block."""

from __future__ import annotations

from inflight_protocol.specs import ParameterSpec
from inflight_scheduler import POLICIES

MAX_QUEUE_SIZE = 10**7
"""Of `max_queue_size`, and what its 0 stands for."""


def _int(name: str, default: str, minimum: int, maximum: int, meaning: str) -> ParameterSpec:
    return ParameterSpec(name, "int", default, meaning, minimum=minimum, maximum=maximum)


def _float(name: str, default: str, minimum: float, maximum: float, meaning: str) -> ParameterSpec:
    return ParameterSpec(name, "float", default, meaning, minimum=minimum, maximum=maximum)


def _choice(name: str, default: str, choices: tuple[str, ...], meaning: str) -> ParameterSpec:
    return ParameterSpec(name, "choice", default, meaning, choices)


def _unused(name: str, kind: str, default: str, meaning: str) -> ParameterSpec:
    """Only the default is accepted."""
    return ParameterSpec(name, kind, default, meaning, is_honoured=False)


PARAMETERS: tuple[ParameterSpec, ...] = (
    _choice(
        "gpt_model_type",
        "inflight_fused_batching",
        ("V1", "v1", "inflight_batching", "inflight_fused_batching"),
        "how requests are batched",
    ),
    ParameterSpec("gpt_model_path", "str", "", "Hugging Face checkpoint folder"),
    ParameterSpec("tokenizer_dir", "str", "", "folder of the tokenizer; default: the checkpoint"),
    _choice(
        "generation_config",
        "auto",
        ("auto", "none"),
        "requests with text that name no sampling settings have those of the checkpoint's "
        "generation_config.json; none: the defaults of the inputs",
    ),
    ParameterSpec(
        "default_sampling",
        "str",
        "",
        "settings that come before those of generation_config.json, as JSON: "
        '{"temperature": 0.7, "top_p": 0.9}',
    ),
    _choice(
        "batch_scheduler_policy",
        "guaranteed_no_evict",
        tuple(sorted(POLICIES)),
        "capacity policy; static_batch is an addition of ours",
    ),
    ParameterSpec(
        "scheduler_class",
        "str",
        "",
        "your own scheduler, or one of its two parts, as package.module:ClassName",
    ),
    _int("max_beam_width", "1", 1, 64, "largest beam_width"),
    _int(
        "max_batch_size",
        "256",
        1,
        65_536,
        "requests in flight; times max_beam_width, the kernels of a GPU take up to 65535",
    ),
    _int(
        "max_num_tokens",
        "",
        1,
        2**20,
        "tokens per iteration; default: 8192, without chunked context max_seq_len if that is more",
    ),
    _int("max_seq_len", "", 2, 2**24, "prompt plus new tokens; default: the checkpoint's limit"),
    _int("max_input_len", "", 1, 2**24, "prompt tokens; default: max_seq_len - 1"),
    _int(
        "max_queue_size",
        "4096",
        0,
        MAX_QUEUE_SIZE,
        "requests that may wait for a place; 0, no limit at the peer, is the highest number",
    ),
    _int("tokens_per_block", "32", 1, 1024, "tokens of a KV block"),
    _int("max_tokens_in_paged_kv_cache", "", 1, 2**40, "tokens of the KV pool, in all layers"),
    _float("kv_cache_free_gpu_mem_fraction", "0.9", 0.01, 0.99, "share of free GPU memory for KV"),
    _float(
        "cross_kv_cache_fraction",
        "0.5",
        0.01,
        0.99,
        "share of the KV cache for what an encoder says, in models that have one",
    ),
    ParameterSpec("exclude_input_in_output", "bool", "false", "default of the tensor of that name"),
    ParameterSpec(
        "merge_responses",
        "bool",
        "true",
        "tokens of a stream that wait to be sent leave as one response; false: those of each "
        "step by themselves, as the peer sends them, at the price of a send for each",
    ),
    _int("cancellation_check_period_ms", "100", 1, 60_000, "how often cancellation is looked for"),
    _int("stats_check_period_ms", "100", 1, 60_000, "how often metrics are updated"),
    _choice("device", "auto", ("auto", "cpu", "cuda"), "where the model runs"),
    _choice(
        "dtype",
        "auto",
        ("auto", "float32", "bfloat16", "float16"),
        "type of weights and KV; auto: the checkpoint's on a GPU, float32 on a CPU",
    ),
    _choice(
        "quantization",
        "none",
        ("none", "fp8", "int8", "int4"),
        "fp8: quantise the linears' weights at load, and what they read; int8, int4: the "
        "weights alone",
    ),
    _choice(
        "kv_cache_dtype",
        "auto",
        ("auto", "model", "fp8", "int8"),
        "type of the KV cache; model: dtype; auto: what the checkpoint has scales for, else model; "
        "fp8, int8: with the scales of the checkpoint, which int8 needs",
    ),
    _choice(
        "attention_backend",
        "auto",
        ("auto", "torch", "compiled", "triton"),
        "kernels; auto: triton on a GPU, on a CPU compiled ones (extra cpu: numba), else torch",
    ),
    ParameterSpec(
        "cuda_graph_mode", "bool", "true", "generation steps on a GPU are recorded and replayed"
    ),
    _int(
        "cuda_graph_mixed_tokens",
        "1024",
        0,
        8192,
        "so are steps with contexts, of up to so many tokens in all; 0: none",
    ),
    ParameterSpec(
        "deterministic_mode",
        "bool",
        "false",
        "answers do not depend on the batch, bit by bit; slower, needs attention_backend triton",
    ),
    _choice(
        "overlap_scheduler",
        "auto",
        ("auto", "on", "off"),
        "plan an iteration while the one before runs; auto: on a GPU",
    ),
    _int("tensor_parallel_size", "1", 1, 1024, "devices that hold a part of each layer"),
    _int("pipeline_parallel_size", "1", 1, 1024, "stages of neighbouring layers, each on as many"),
    ParameterSpec(
        "expert_parallel", "bool", "false", "each of them holds whole experts, not columns of all"
    ),
    _int("num_nodes", "1", 1, 1024, "machines that share the ranks"),
    ParameterSpec("rank_address", "str", "", "where the other machines join, as 10.0.0.1:29500"),
    ParameterSpec(
        "gpu_device_ids",
        "str",
        "",
        "the GPUs of the ranks, in order, as 0,1; alone it is the tensor_parallel_size, too",
    ),
    _float(
        "stall_seconds",
        "120",
        0.1,
        86_400,
        "requests in flight and nothing moves for so long: streams end, readiness false",
    ),
    ParameterSpec("status_file", "str", "", "file in which the model reports loading and state"),
    ParameterSpec(
        "drain_file",
        "str",
        "",
        "file whose appearance makes the model drain; that of NAME.stop ends what still runs",
    ),
    ParameterSpec("record_file", "str", "", "file in which all scheduling is recorded"),
    ParameterSpec(
        "kv_events",
        "str",
        "",
        "address at which a ZeroMQ socket tells routers what is cached, in vLLM's format, as "
        "tcp://127.0.0.1:5557: with the tokens of prompts",
    ),
    ParameterSpec(
        "kv_events_replay",
        "str",
        "",
        "address of a second socket, from which recent KV events can be had again",
    ),
    ParameterSpec("kv_events_topic", "str", "", "topic of KV events; llm-d wants kv@POD@MODEL"),
    _choice(
        "kv_events_format",
        "array",
        ("array", "map"),
        "how a KV event is written: array (vLLM until June 2026, SGLang, llm-d), map (vLLM since)",
    ),
    ParameterSpec(
        "enable_chunked_context",
        "bool",
        "",
        "a prompt may be computed in several iterations; default: where max_seq_len is above "
        "max_num_tokens, but not with V1 or deterministic_mode",
    ),
    _choice(
        "context_chunking_policy",
        "first_come_first_served",
        ("first_come_first_served", "equal_progress", "force_chunk", "pipeline_aware"),
        "who gets how much of the token budget, with chunked context",
    ),
    _int(
        "context_chunk_unit",
        "",
        1,
        2**20,
        "chunks are multiples of so many tokens; default: tokens_per_block",
    ),
    _float(
        "priority_span",
        "1000",
        0,
        1000000000.0,
        "later requests of priority 1 that may pass one of priority 0",
    ),
    _float(
        "max_queue_seconds",
        "",
        0.001,
        1000000000.0,
        "upper bound, and default, of max_queue_time_ms; default: none",
    ),
    _float(
        "max_run_seconds",
        "",
        0.001,
        1000000000.0,
        "upper bound, and default, of allotted_time_ms; default: none",
    ),
    ParameterSpec(
        "enable_kv_cache_reuse", "bool", "true", "share KV blocks with requests that begin alike"
    ),
    ParameterSpec(
        "max_attention_window_size",
        "str",
        "",
        "tokens that layers see at most, one number or several between commas, which begin again "
        "where there are more layers; default: what the checkpoint says",
    ),
    _int(
        "max_state_snapshots",
        "",
        0,
        65_536,
        "states of recurrences (Qwen3-Next) kept for requests that begin alike, 0: none; default: "
        "max_batch_size, at most 32",
    ),
    _choice(
        "guided_decoding_backend",
        "auto",
        ("auto", "llguidance", "none"),
        "what guides answers; auto: llguidance if it is installed and the model has a tokenizer",
    ),
    _float(
        "guided_decoding_compile_seconds",
        "0.2",
        0.01,
        10.0,
        "processor time that a guide may take to compile; one that needs more is refused",
    ),
    ParameterSpec(
        "logits_processors",
        "str",
        "",
        "callables for `logits_post_processor_name`, as name=package.module:callable,...",
    ),
    ParameterSpec(
        "normalize_log_probs",
        "bool",
        "false",
        "log probabilities among what the filters left (the peer's default until March 2026), "
        "not the model's own",
    ),
    _choice(
        "out_of_vocabulary",
        "refuse",
        ("refuse", "fold"),
        "ids of a prompt above the vocabulary; fold: each stands for its remainder by the size "
        "of the vocabulary, for benchmarks that draw ids up to 2147483647",
    ),
    _choice(
        "speculative_decoding_mode",
        "none",
        ("none", "ngram"),
        "who guesses tokens ahead; ngram: they are looked up in the text so far",
    ),
    _int(
        "max_draft_len",
        "8",
        0,
        1024,
        "draft tokens of a request in one step, draft_input_ids included",
    ),
    _int(
        "max_matching_ngram_size",
        "4",
        2,
        64,
        "ngram: tokens that are compared to find an earlier place like the end of the text",
    ),
    _int(
        "speculative_disable_by_batch_size",
        "16",
        1,
        65_536,
        "ngram: nothing is guessed while more requests are active",
    ),
    _choice(
        "enable_lora",
        "auto",
        ("auto", "true", "false"),
        "whether requests may have adapters; auto: on a CPU, where it costs nothing, and where "
        "lora_modules, lora_prefetch_dir or lora_root is set",
    ),
    _choice(
        "lora_experts",
        "auto",
        ("auto", "true", "false"),
        "whether pages on a GPU have room for adapters of experts and of latents, which take much; "
        "auto: if one of lora_modules has some",
    ),
    _int(
        "lora_cache_optimal_adapter_size",
        "8",
        1,
        1024,
        "rank of an adapter that fills one page of the device's memory",
    ),
    _int("lora_cache_max_adapter_size", "64", 1, 1024, "largest rank of an adapter"),
    ParameterSpec(
        "lora_cache_gpu_memory_fraction",
        "float",
        "0.05",
        "share of the device's memory, where the weights leave it, for adapters",
        minimum=0.0,
        maximum=1.0,
    ),
    _int(
        "lora_cache_host_memory_bytes",
        "1073741824",
        0,
        2**50,
        "bytes of adapters that are kept on the host",
    ),
    ParameterSpec(
        "lora_prefetch_dir",
        "str",
        "",
        "folder of folders named by task ids, whose adapters are loaded at start",
    ),
    ParameterSpec(
        "lora_modules",
        "str",
        "",
        "adapters by name, loaded at start: a JSON object {name: PEFT folder} or a file with one",
    ),
    ParameterSpec(
        "lora_root",
        "str",
        "",
        "folder below which adapters may be loaded and unloaded by name while the server runs",
    ),
    # Keys of tensorrtllm_backend that ask for something else than we do: refused unless neutral.
    _unused("enable_trt_overlap", "bool", "false", "deprecated"),
    _unused("encoder_model_path", "str", "", "encoder of T5-like models"),
    _unused("sink_token_length", "str", "", "StreamingLLM"),
    _unused("kv_cache_host_memory_bytes", "int", "0", "KV offload"),
    _unused("kv_cache_onboard_blocks", "bool", "true", "KV offload"),
    _unused("iter_stats_max_iterations", "int", "1000", "executor"),
    _unused("request_stats_max_iterations", "int", "0", "executor"),
    _unused("participant_ids", "str", "", "multi-GPU"),
    # The next two: what its configs have where several processes are not configured.
    _unused(
        "executor_worker_path",
        "str",
        "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "multi-GPU",
    ),
    _unused(
        "worker_path",
        "str",
        "/opt/tritonserver/backends/tensorrtllm/triton_tensorrtllm_worker",
        "multi-GPU",
    ),
    _unused("decoding_mode", "str", "", "kind of decoding"),
    _unused("lookahead_window_size", "str", "", "lookahead"),
    _unused("lookahead_ngram_size", "str", "", "lookahead"),
    _unused("lookahead_verification_set_size", "str", "", "lookahead"),
    _unused("medusa_choices", "str", "", "Medusa"),
    _unused("eagle_choices", "str", "", "EAGLE"),
    _unused("gpu_weights_percent", "float", "1.0", "weight offload"),
    _unused("enable_context_fmha_fp32_acc", "bool", "false", "kernels"),
    _unused("multi_block_mode", "bool", "true", "kernels"),
    _unused("cuda_graph_cache_size", "int", "0", "kernels"),
    _unused("speculative_decoding_fast_logits", "bool", "false", "speculation"),
    _unused("xgrammar_tokenizer_info_path", "str", "", "guided decoding"),
    _unused("max_num_sequences", "int", "", "v0.5-v0.8 name of max_batch_size"),
)

PARAMETER_BY_NAME: dict[str, ParameterSpec] = {spec.name: spec for spec in PARAMETERS}

TRITON_PARAMETERS: frozenset[str] = frozenset(
    {"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"}
)
"""Keys that the Python backend itself reads; passed over."""
