"""Every key of the model's ``parameters`` block."""

from __future__ import annotations

from inflight_protocol.specs import ParameterSpec
from inflight_scheduler import POLICIES

MAX_QUEUE_SIZE = 10**7
"""Of `max_queue_size`, and what its 0 stands for."""

PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec(
        "gpt_model_type",
        "choice",
        "inflight_fused_batching",
        "how requests are batched",
        ("V1", "v1", "inflight_batching", "inflight_fused_batching"),
    ),
    ParameterSpec("gpt_model_path", "str", "", "Hugging Face checkpoint folder"),
    ParameterSpec("tokenizer_dir", "str", "", "folder of tokenizer.json; default: the checkpoint"),
    ParameterSpec(
        "batch_scheduler_policy",
        "choice",
        "guaranteed_no_evict",
        "capacity policy; static_batch is an addition of ours",
        tuple(sorted(POLICIES)),
    ),
    ParameterSpec(
        "scheduler_class",
        "str",
        "",
        "your own scheduler, or one of its two parts, as package.module:ClassName",
    ),
    ParameterSpec("max_beam_width", "int", "1", "largest beam_width", minimum=1, maximum=64),
    ParameterSpec(
        "max_batch_size",
        "int",
        "256",
        "requests in flight; times max_beam_width, the kernels of a GPU take up to 65535",
        minimum=1,
        maximum=65536,
    ),
    ParameterSpec(
        "max_num_tokens",
        "int",
        "",
        "tokens per iteration; default: 8192, without chunked context max_seq_len if that is more",
        minimum=1,
        maximum=2**20,
    ),
    ParameterSpec(
        "max_seq_len",
        "int",
        "",
        "prompt plus new tokens; default: the checkpoint's limit",
        minimum=2,
        maximum=2**24,
    ),
    ParameterSpec(
        "max_input_len",
        "int",
        "",
        "prompt tokens; default: max_seq_len - 1",
        minimum=1,
        maximum=2**24,
    ),
    ParameterSpec(
        "max_queue_size",
        "int",
        "4096",
        "requests that may wait for a place; 0, no limit at the peer, is the highest number",
        minimum=0,
        maximum=MAX_QUEUE_SIZE,
    ),
    ParameterSpec("tokens_per_block", "int", "32", "tokens of a KV block", minimum=1, maximum=1024),
    ParameterSpec(
        "max_tokens_in_paged_kv_cache",
        "int",
        "",
        "tokens of the KV pool",
        minimum=1,
        maximum=2**40,
    ),
    ParameterSpec(
        "kv_cache_free_gpu_mem_fraction",
        "float",
        "0.9",
        "share of free GPU memory for KV",
        minimum=0.01,
        maximum=0.99,
    ),
    ParameterSpec("exclude_input_in_output", "bool", "false", "default of the tensor of that name"),
    ParameterSpec(
        "merge_responses",
        "bool",
        "true",
        "tokens of a stream that wait to be sent leave as one response; false: those of each step "
        "by themselves, as the peer sends them, at the price of a send for each",
    ),
    ParameterSpec(
        "cancellation_check_period_ms",
        "int",
        "100",
        "how often cancellation is looked for",
        minimum=1,
        maximum=60_000,
    ),
    ParameterSpec(
        "stats_check_period_ms",
        "int",
        "100",
        "how often metrics are updated",
        minimum=1,
        maximum=60_000,
    ),
    ParameterSpec("device", "choice", "auto", "where the model runs", ("auto", "cpu", "cuda")),
    ParameterSpec(
        "dtype",
        "choice",
        "auto",
        "type of weights and KV; auto: the checkpoint's on a GPU, float32 on a CPU",
        ("auto", "float32", "bfloat16", "float16"),
    ),
    ParameterSpec(
        "quantization",
        "choice",
        "none",
        "fp8: quantise the linears' weights at load, and what they read",
        ("none", "fp8"),
    ),
    ParameterSpec(
        "kv_cache_dtype", "choice", "auto", "type of the KV cache; auto: dtype", ("auto", "fp8")
    ),
    ParameterSpec(
        "attention_backend",
        "choice",
        "auto",
        "attention kernels; auto: triton on a GPU, torch on a CPU",
        ("auto", "torch", "triton"),
    ),
    ParameterSpec(
        "cuda_graph_mode", "bool", "true", "generation steps on a GPU are recorded and replayed"
    ),
    ParameterSpec(
        "cuda_graph_mixed_tokens",
        "int",
        "512",
        "so are steps with contexts, of up to so many tokens in all; 0: none",
        minimum=0,
        maximum=8192,
    ),
    ParameterSpec(
        "deterministic_mode",
        "bool",
        "false",
        "answers do not depend on the batch, bit by bit; slower, needs attention_backend triton",
    ),
    ParameterSpec(
        "overlap_scheduler",
        "choice",
        "auto",
        "plan an iteration while the one before runs; auto: on a GPU",
        ("auto", "on", "off"),
    ),
    ParameterSpec(
        "stall_seconds",
        "float",
        "120",
        "requests in flight and nothing moves for so long: streams end, readiness false",
        minimum=0.1,
        maximum=86_400,
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
        "enable_chunked_context",
        "bool",
        "",
        "a prompt may be computed in several iterations; default: where max_seq_len is above "
        "max_num_tokens, but not with V1 or deterministic_mode",
    ),
    ParameterSpec(
        "context_chunking_policy",
        "choice",
        "first_come_first_served",
        "who gets how much of the token budget, with chunked context",
        ("first_come_first_served", "equal_progress", "force_chunk"),
    ),
    ParameterSpec(
        "context_chunk_unit",
        "int",
        "",
        "chunks are multiples of so many tokens; default: tokens_per_block",
        minimum=1,
        maximum=2**20,
    ),
    ParameterSpec(
        "priority_span",
        "float",
        "1000",
        "later requests of priority 1 that may pass one of priority 0",
        minimum=0,
        maximum=1e9,
    ),
    ParameterSpec(
        "max_queue_seconds",
        "float",
        "",
        "upper bound, and default, of max_queue_time_ms; default: none",
        minimum=0.001,
        maximum=1e9,
    ),
    ParameterSpec(
        "max_run_seconds",
        "float",
        "",
        "upper bound, and default, of allotted_time_ms; default: none",
        minimum=0.001,
        maximum=1e9,
    ),
    ParameterSpec(
        "enable_kv_cache_reuse", "bool", "true", "share KV blocks with requests that begin alike"
    ),
    ParameterSpec(
        "guided_decoding_backend",
        "choice",
        "auto",
        "what guides answers; auto: llguidance if it is installed and the model has a tokenizer",
        ("auto", "llguidance", "none"),
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
        "log probabilities among what the filters left (the peer's default until March 2026), not "
        "the model's own",
    ),
    ParameterSpec(
        "out_of_vocabulary",
        "choice",
        "refuse",
        "ids of a prompt above the vocabulary; fold: each stands for its remainder by the size of "
        "the vocabulary, for benchmarks that draw ids up to 2147483647",
        ("refuse", "fold"),
    ),
    ParameterSpec(
        "speculative_decoding_mode",
        "choice",
        "none",
        "who guesses tokens ahead; ngram: they are looked up in the text so far",
        ("none", "ngram"),
    ),
    ParameterSpec(
        "max_draft_len",
        "int",
        "8",
        "draft tokens of a request in one step, draft_input_ids included",
        minimum=0,
        maximum=1024,
    ),
    ParameterSpec(
        "max_matching_ngram_size",
        "int",
        "4",
        "ngram: tokens that are compared to find an earlier place like the end of the text",
        minimum=2,
        maximum=64,
    ),
    ParameterSpec(
        "speculative_disable_by_batch_size",
        "int",
        "16",
        "ngram: nothing is guessed while more requests are active",
        minimum=1,
        maximum=65536,
    ),
    # Keys of tensorrtllm_backend that ask for something else than we do: refused unless neutral.
    ParameterSpec("enable_trt_overlap", "bool", "false", "deprecated", is_honoured=False),
    ParameterSpec("encoder_model_path", "str", "", "encoder of T5-like models", is_honoured=False),
    ParameterSpec("max_attention_window_size", "str", "", "attention window", is_honoured=False),
    ParameterSpec("sink_token_length", "str", "", "StreamingLLM", is_honoured=False),
    ParameterSpec("cross_kv_cache_fraction", "str", "", "encoder-decoder", is_honoured=False),
    ParameterSpec("kv_cache_host_memory_bytes", "int", "0", "KV offload", is_honoured=False),
    ParameterSpec("kv_cache_onboard_blocks", "bool", "true", "KV offload", is_honoured=False),
    ParameterSpec("iter_stats_max_iterations", "int", "1000", "executor", is_honoured=False),
    ParameterSpec("request_stats_max_iterations", "int", "0", "executor", is_honoured=False),
    ParameterSpec("gpu_device_ids", "str", "", "multi-GPU", is_honoured=False),
    ParameterSpec("participant_ids", "str", "", "multi-GPU", is_honoured=False),
    ParameterSpec("num_nodes", "int", "1", "multi-GPU", is_honoured=False),
    # The next two: what its configs have where several processes are not configured.
    ParameterSpec(
        "executor_worker_path",
        "str",
        "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "multi-GPU",
        is_honoured=False,
    ),
    ParameterSpec(
        "worker_path",
        "str",
        "/opt/tritonserver/backends/tensorrtllm/triton_tensorrtllm_worker",
        "multi-GPU",
        is_honoured=False,
    ),
    ParameterSpec("lora_cache_optimal_adapter_size", "int", "8", "LoRA", is_honoured=False),
    ParameterSpec("lora_cache_max_adapter_size", "int", "64", "LoRA", is_honoured=False),
    ParameterSpec("lora_cache_gpu_memory_fraction", "float", "0.05", "LoRA", is_honoured=False),
    ParameterSpec("lora_cache_host_memory_bytes", "int", "1073741824", "LoRA", is_honoured=False),
    ParameterSpec("lora_prefetch_dir", "str", "", "LoRA", is_honoured=False),
    ParameterSpec("decoding_mode", "str", "", "kind of decoding", is_honoured=False),
    ParameterSpec("lookahead_window_size", "str", "", "lookahead", is_honoured=False),
    ParameterSpec("lookahead_ngram_size", "str", "", "lookahead", is_honoured=False),
    ParameterSpec("lookahead_verification_set_size", "str", "", "lookahead", is_honoured=False),
    ParameterSpec("medusa_choices", "str", "", "Medusa", is_honoured=False),
    ParameterSpec("eagle_choices", "str", "", "EAGLE", is_honoured=False),
    ParameterSpec("gpu_weights_percent", "float", "1.0", "weight offload", is_honoured=False),
    ParameterSpec("enable_context_fmha_fp32_acc", "bool", "false", "kernels", is_honoured=False),
    ParameterSpec("multi_block_mode", "bool", "true", "kernels", is_honoured=False),
    ParameterSpec("cuda_graph_cache_size", "int", "0", "kernels", is_honoured=False),
    ParameterSpec(
        "speculative_decoding_fast_logits", "bool", "false", "speculation", is_honoured=False
    ),
    ParameterSpec("xgrammar_tokenizer_info_path", "str", "", "guided decoding", is_honoured=False),
    ParameterSpec(
        "max_num_sequences", "int", "", "v0.5-v0.8 name of max_batch_size", is_honoured=False
    ),
)

PARAMETER_BY_NAME: dict[str, ParameterSpec] = {spec.name: spec for spec in PARAMETERS}

TRITON_PARAMETERS: frozenset[str] = frozenset(
    {"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"}
)
"""Keys that the Python backend itself reads; passed over."""
