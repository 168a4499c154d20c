"""Checks of whole engines on the device: who must give the same tokens, and how near others come.

``logits`` of a text come out of one context step; perplexity is that of the model on a fixed text.
All run in a dry run as well, with the CPU's reference as the device: at full size where that takes
seconds, since it is the sizes that meet the limits.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import inflight_backend
from gpu_parts.common import SMALL, TINY, Setting, make_engine
from gpu_parts.steps import without_mixed
from gpu_parts.whole_requests import run_requests
from inflight_backend.engine import Engine, EngineConfig
from inflight_scheduler import (
    NO_OUTPUTS,
    BlockAssignment,
    ContextChunk,
    OutputParams,
    SamplingParams,
    ScheduledBatch,
    SlotSetup,
)

_BLOCK = 16
_DEMO = Path(inflight_backend.__file__).parent / "demo_model"
_TEXT = "count: " + " ".join(map(str, range(1, 60)))


def equal_tokens(setting: Setting) -> tuple[Tensor, Tensor]:
    """Greedy tokens of a float32 checkpoint here and by transformers; lengths around blocks."""
    import transformers

    transformers.logging.set_verbosity_error()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    lengths = [1, _BLOCK - 1, _BLOCK, _BLOCK + 1, 120]
    num_tokens = 8
    prompts = make_prompts(lengths, 97)
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.LlamaForCausalLM(config).eval()
        model.save_pretrained(folder)
        expected = [_oracle(model, prompt, num_tokens) for prompt in prompts]
        engine = Engine.load(Path(folder), make_config(setting, "float32", len(lengths)))
    return torch.tensor(generate(engine, prompts, num_tokens)), torch.tensor(expected)


def _oracle(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def perplexity(setting: Setting, dtype: str) -> tuple[Tensor, Tensor]:
    """Of the demo model on a count, in ``dtype`` here and in float32 by the reference."""
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(_DEMO / "tokenizer.json")).encode(_TEXT).ids
    text = text[:24] if setting.is_dry else text
    found = _perplexity(Engine.load(_DEMO, make_config(setting, dtype, 1)), text)
    cpu = on_cpu(make_config(setting, "float32", 1))
    return found, _perplexity(Engine.load(_DEMO, cpu), text)


def _perplexity(engine: Engine, text: list[int]) -> Tensor:
    log_probs = logits(engine, text)[:-1].log_softmax(dim=1)
    losses = -log_probs.gather(1, torch.tensor(text[1:])[:, None])
    return losses.mean().exp().reshape(1)


def fp8_logits(setting: Setting) -> tuple[Tensor, Tensor]:
    """Logits with FP8 linears and cache, beside those of the same weights in full precision."""
    model = TINY if setting.is_dry else SMALL
    text = make_prompts([9 if setting.is_dry else 100], model.vocab_size)[0]
    config = make_config(setting, "bfloat16", 1)
    fp8 = replace(config, quantization="fp8", kv_cache_dtype="fp8", attention_backend="triton")
    found = logits(make_engine(setting, model, fp8), text)
    plain = make_engine(setting, model, replace(config, attention_backend="torch"))
    return found, logits(plain, text)


def deterministic(setting: Setting) -> tuple[Tensor, Tensor]:
    """Logits of a seeded request alone and as the last of many, in the deterministic mode."""
    count = 2 if setting.is_dry else 32
    model = TINY if setting.is_dry else replace(SMALL, layers=SMALL.layers * 2)
    config = replace(
        make_config(setting, "bfloat16", count), attention_backend="triton", deterministic_mode=True
    )
    engine = make_engine(setting, model, config)
    prompts = make_prompts([1 + 37 * row % 120 for row in range(count)], model.vocab_size)
    num_tokens = 2 if setting.is_dry else 16
    together = generate(engine, prompts, num_tokens, seed=5)[-1]
    alone = generate(engine, prompts[-1:], num_tokens, seed=5 + count - 1)[-1]
    return torch.tensor(alone), torch.tensor(together)


def reuse(setting: Setting) -> tuple[Tensor, Tensor]:
    """Greedy float32 tokens with block reuse and without; two at a time, of texts that begin alike.

    They share whole blocks, and of the next one a part, which is copied.
    """
    engine = make_engine(setting, TINY, make_config(setting, "float32", 2))
    text = make_prompts([5 * _BLOCK], TINY.vocab_size)[0]
    shared = [0, _BLOCK - 1, _BLOCK + 5, 2 * _BLOCK, 5 * _BLOCK]
    rest = make_prompts([_BLOCK // 2] * len(shared), TINY.vocab_size)
    prompts = [text[:count] + other for count, other in zip(shared, rest, strict=True)]
    prompts = prompts[::2] if setting.is_dry else prompts + prompts[::-1]
    output_lens = [2 if setting.is_dry else 24] * len(prompts)
    on = run_requests(engine, prompts, output_lens, enable_reuse=True)
    if not on.num_reused_blocks:
        raise RuntimeError("no block was reused: nothing is compared")
    off = run_requests(engine, prompts, output_lens)
    return torch.tensor(on.tokens), torch.tensor(off.tokens)


def recorded_mixed_steps(setting: Setting) -> tuple[Tensor, Tensor]:
    """Greedy float32 tokens where mixed steps are replayed and where they run eagerly; ragged
    prompts, a few at a time beside generations. An engine that has recorded none of them, though it
    should, compares nothing."""
    num_slots = 2 if setting.is_dry else 12
    config = replace(make_config(setting, "float32", num_slots), max_num_tokens=150)
    engine = make_engine(setting, TINY, config)
    if config.cuda_graph_mixed_tokens and not (setting.is_dry or engine.num_mixed_graphs):
        raise RuntimeError("no mixed step could be recorded; stderr says why")
    lengths = [1, 9, 17] if setting.is_dry else [1 + 23 * row % 120 for row in range(48)]
    output_lens = [2 if setting.is_dry else 5 + row % 20 for row in range(len(lengths))]
    prompts = make_prompts(lengths, TINY.vocab_size)
    found = run_requests(engine, prompts, output_lens)
    with without_mixed(engine):
        expected = run_requests(engine, prompts, output_lens)
    return _flat(found.tokens), _flat(expected.tokens)


def _flat(answers: list[list[int]]) -> Tensor:
    return torch.tensor([token for answer in answers for token in answer])


def adversarial(setting: Setting) -> tuple[Tensor, Tensor]:
    """1 where every token of prompts of awkward lengths could be drawn: no NaN anywhere."""
    longest = TINY.max_position_embeddings - 2
    lengths = [1, _BLOCK - 1, _BLOCK, _BLOCK + 1, 127, 128, 129, longest]
    engine = make_engine(setting, TINY, make_config(setting, "bfloat16", len(lengths)))
    tokens = torch.tensor(generate(engine, make_prompts(lengths, TINY.vocab_size), 2))
    return (tokens >= 0).float(), torch.ones(tokens.shape)


def on_cpu(config: EngineConfig) -> EngineConfig:
    """The same by the reference."""
    return replace(config, device="cpu", attention_backend="torch")


def make_config(setting: Setting, dtype: str, num_slots: int) -> EngineConfig:
    """Blocks of 16 for prompts and answers of up to 512 tokens in each slot."""
    return EngineConfig(
        device=setting.device.type,
        dtype=dtype,
        max_batch_size=num_slots,
        max_num_tokens=2048,
        tokens_per_block=_BLOCK,
        max_tokens_in_paged_kv_cache=_BLOCK * 32 * num_slots,
        max_seq_len=None,
    )


def make_prompts(lengths: list[int], vocab_size: int) -> list[list[int]]:
    """Seeded tokens of these lengths."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def _setup(
    engine: Engine, prompts: list[list[int]], seed: int | None, outputs: OutputParams = NO_OUTPUTS
) -> ScheduledBatch:
    """The plan that computes the prompts, a slot each."""
    per_slot = min(engine.num_blocks // len(prompts), -(-engine.max_seq_len // _BLOCK))
    blocks = [
        BlockAssignment(slot, index, slot * per_slot + index)
        for slot, prompt in enumerate(prompts)
        for index in range(min(-(-(len(prompt) + 32) // _BLOCK), per_slot))
    ]
    setups = []
    for slot in range(len(prompts)):
        drawing = SamplingParams()
        if seed is not None:
            drawing = SamplingParams(temperature=1.5, top_p=0.95, seed=seed + slot)
        setups.append(SlotSetup(slot, slot + 1, drawing, outputs=outputs))
    chunks = [ContextChunk(slot, 0, tuple(p), is_last=True) for slot, p in enumerate(prompts)]
    return ScheduledBatch(1, tuple(setups), tuple(blocks), tuple(chunks))


def generate(
    engine: Engine, prompts: list[list[int]], num_tokens: int, seed: int | None = None
) -> list[list[int]]:
    """Tokens of each prompt, greedy or drawn."""
    steps = [engine.execute(_setup(engine, prompts, seed))]
    batch = ScheduledBatch(2, generation_slots=tuple(range(len(prompts))))
    steps += [engine.execute(batch) for _ in range(num_tokens - 1)]
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def logits(engine: Engine, text: list[int]) -> Tensor:
    """[len(text), vocab] float32 on the host."""
    engine.execute(_setup(engine, [text], None, OutputParams(context_logits=True)))
    outputs = engine.take_outputs()
    assert outputs is not None
    rows = [torch.from_numpy(part.logits).float() for part in outputs.context_logits]
    return torch.cat(rows)
