"""A family of each kind of layer, and quantised checkpoints, through the real server."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import openai
import pytest
import torch
import transformers
from e2e.conftest import ServeFactory
from safetensors.torch import load_file
from support.cache_scales import expected_logits, with_scales
from support.calls import stream_infer, tensors_of
from support.checkpoints import oracle_tokens, prompt_logits, write_checkpoint
from support.families import VOCAB_SIZE, write_family
from support.front_process import FrontProcess
from support.gguf_writer import keep_float32, write_gguf
from support.pairs import write_pair, write_tokenizer
from support.quantized import GPT_OSS, SCHEMES, Scheme, compressed, write_quantized
from tokenizers.pre_tokenizers import ByteLevel

Reference = Callable[[list[int]], torch.Tensor]
"""Logits [tokens, vocab] of all tokens of a text."""
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(
    "name",
    ["gpt2", "gemma3", "llama4", "gpt_oss", "deepseek_v3", "qwen3_next"],
    ids=["positions", "windows", "chunks", "experts and sinks", "latent cache", "recurrence"],
)
def test_logits_of_a_prompt_are_those_of_transformers(
    serve: ServeFactory, tmp_path: Path, name: str
) -> None:
    tokens, expected = write_family(tmp_path / name, name)
    found, token = served_logits(serve, tmp_path / name, tokens)
    assert float((found - expected).abs().max()) < 1e-3 * max(1.0, float(expected.std()))
    assert token == int(expected[-1].argmax())


_WRITTEN = Path(__file__).resolve().parents[1] / "data" / "quantized"
_ROUNDED = {"ct_w8a8_smoothquant_gptq": 0.08, "ct_fp8_kv": 0.08, "modelopt_fp8_kv": 0.1}
"""What linears read, or the cache: bounds of the mean, in deviations of the logits."""


@pytest.mark.parametrize(
    "row",
    [
        "awq",
        "gptq",
        "ct_w4a16_asymmetric",
        "ct_w4a16_gptq_static_order",
        "ct_w8a16",
        "ct_fp8_dynamic",
        "ct_fp8_block",
        "ct_nvfp4",
        "ct_mxfp4",
        "modelopt_nvfp4",
        "modelopt_int4_awq",
        "gptqmodel_v2_order",
        "gptq_asymmetric",
        "ct_mixed",
        "ct_mixtral_w4a16",
        "bnb_nf4_double",
        "bnb_int8",
        *_ROUNDED,
    ],
)
def test_logits_of_a_quantised_checkpoint_are_those_that_its_tool_says(
    serve: ServeFactory, row: str
) -> None:
    wanted = load_file(_WRITTEN / row / "expected.safetensors")
    found, token = served_logits(serve, _WRITTEN / row, wanted["tokens"])
    expected = wanted["logits"]
    off = (found - expected) / expected.std()
    if row in _ROUNDED:
        assert float(off.square().mean().sqrt()) < _ROUNDED[row]
    else:
        assert float(off.abs().max()) < 1e-3
        assert token == int(expected[-1].argmax())


def dequantised(scheme: Scheme, folder: Path, family: str = "") -> tuple[Path, Reference]:
    """A quantised checkpoint, and the logits of a plain one with the same numbers: of a Llama, or
    of the experts of ``family``."""
    plain = folder / "plain"
    if family:
        write_family(plain, family)
        pattern = re.compile(r".*experts\.(gate_up|down)_proj")
        quantised, expected = write_quantized(plain, folder, scheme, pattern)
    else:
        sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
        write_checkpoint(plain, **sizes)
        quantised, expected = write_quantized(plain, folder, scheme)
    return quantised, partial(prompt_logits, expected)


def with_int8_cache(folder: Path) -> tuple[Path, Reference]:
    """The weights are plain, and keys and values rounded by scales of the checkpoint."""
    plain = write_checkpoint(folder / "plain", num_key_value_heads=2, head_dim=32)
    scheme = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    config = {**compressed("pack-quantized"), "config_groups": {}, "kv_cache_scheme": scheme}
    scaled = with_scales(plain, folder / "scaled", "int8", ("k_scale", "v_scale"), config)
    return scaled, partial(expected_logits, plain, kind="int8")


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(partial(dequantised, SCHEMES["ct-fp8-tensor-static"]), id="fp8 per tensor"),
        pytest.param(partial(dequantised, SCHEMES["fbgemm_fp8"]), id="fbgemm_fp8"),
        pytest.param(partial(dequantised, SCHEMES["fp8-blocks"]), id="fp8 blocks"),
        pytest.param(partial(dequantised, GPT_OSS, family="gpt_oss"), id="mxfp4 experts"),
        pytest.param(with_int8_cache, id="int8 cache"),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_the_dequantised_model(
    serve: ServeFactory, tmp_path: Path, write: Callable[..., tuple[Path, Reference]]
) -> None:
    folder, reference = write(folder=tmp_path)
    prompt = [(7 * index + 3) % 97 for index in range(24)]
    running = serve(model=folder)
    asked = tensors_of(
        input_ids=prompt,
        request_output_len=8,
        exclude_input_in_output=True,
        return_log_probs=True,
        return_context_logits=True,
    )
    wanted = ("output_ids", "output_log_probs", "context_logits")
    (answer,) = stream_infer(running, "tensorrt_llm", asked, wanted)
    drawn = answer["output_ids"].flatten().tolist()
    logits = reference(prompt + drawn)[:-1]
    off = torch.from_numpy(answer["context_logits"][0]) - logits[: len(prompt)]
    assert float(off.abs().max()) < 1e-3 * float(logits.std())
    rows = logits[len(prompt) - 1 :]
    assert drawn == rows.argmax(-1).tolist()
    log_probs = rows.log_softmax(-1).amax(-1)
    found = torch.from_numpy(answer["output_log_probs"].flatten())
    assert float((found - log_probs).abs().max()) < 1e-3


def served_logits(
    serve: ServeFactory, folder: Path, tokens: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """The server's logits of a prompt, and the token that follows it."""
    running = serve(model=folder)
    asked = {"input_ids": tokens.tolist(), "request_output_len": 1, "return_context_logits": True}
    wanted = ("output_ids", "context_logits")
    (answer,) = stream_infer(running, "tensorrt_llm", tensors_of(**asked), wanted)
    logits = torch.from_numpy(answer["context_logits"][0])
    return logits, int(answer["output_ids"].flatten()[-1])


_LETTERS = sorted(ByteLevel.alphabet())[: VOCAB_SIZE - 3]
_TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", *_LETTERS, "!!"],
    "tokenizer.ggml.token_type": [3, 3, *[1] * (len(_LETTERS) + 1)],
    "tokenizer.ggml.merges": ["! !"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
}
"""Of one byte each, but for the last."""


def keep_q8(name: str, data: Any) -> tuple[Any, gguf.GGMLQuantizationType]:
    """Linears quantised."""
    if data.ndim < 2:
        return keep_float32(name, data)
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.quants.quantize(data, kind), kind


def test_a_gguf_file_is_served_as_it_is(serve: ServeFactory, tmp_path: Path) -> None:
    """Logits of transformers with widened weights; a text with the tokenizer of its metadata."""
    tokens, _ = write_family(tmp_path / "plain", "llama", intermediate_size=96)
    path = write_gguf(tmp_path / "plain", tmp_path / "tiny.gguf", "llama", keep_q8, values=_TOKENS)
    running = serve(model=path, settings={"dtype": "float32"})
    asked = {"input_ids": tokens.tolist(), "request_output_len": 1, "return_context_logits": True}
    (answer,) = stream_infer(
        running, "tensorrt_llm", tensors_of(**asked), ("output_ids", "context_logits")
    )
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    with torch.no_grad():
        for weight in oracle.parameters():
            data, kind = keep_q8("", weight.numpy())
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)))
        expected = oracle(tokens[None]).logits[0]
    found = torch.from_numpy(answer["context_logits"][0])
    assert float((found - expected).abs().max()) < 1e-3 * max(1.0, float(expected.std()))
    text = "".join(_LETTERS[:5])
    (answer,) = stream_infer(
        running, "tensorrt_llm", tensors_of(text_input=text, max_tokens=1), ("output_ids",)
    )
    assert answer["output_ids"].flatten()[:-1].tolist() == [0, 2, 3, 4, 5, 6]


def test_an_encoder_reads_the_prompt(
    serve: ServeFactory, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Texts and ids at once, a stream, and OpenAI's completions: as transformers generates."""
    pair = write_pair(tmp_path, "flan-t5")
    tokenizer = write_tokenizer(tmp_path)
    running = serve(model=tmp_path, settings={"max_batch_size": 4})
    texts = ["the encoder reads a prompt", "and another one", "s"]
    expected: list[str] = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        drawn = pair.greedy(ids, 12, [0])
        end = drawn.index(1) if 1 in drawn else len(drawn)
        expected.append(tokenizer.decode(drawn[:end], skip_special_tokens=True))
    for text, wanted in zip(texts, expected, strict=True):
        for stream in (False, True):
            asked = tensors_of(text_input=text, max_tokens=12, stream=stream)
            parts = stream_infer(running, "ensemble", asked, ("text_output",))
            assert "".join(part["text_output"].item().decode() for part in parts) == wanted
    ids = tokenizer(texts[0])["input_ids"]
    asked = tensors_of(input_ids=ids, request_output_len=12, decoder_input_ids=[0, 9, 10])
    (answer,) = stream_infer(running, "tensorrt_llm", asked, ("output_ids",))
    found = answer["output_ids"].flatten().tolist()
    assert found == [0, 9, 10, *pair.greedy(ids, 12, [0, 9, 10])]
    with (
        FrontProcess(tmp_path_factory.mktemp("front"), running.grpc_url) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        [model] = client.models.list().data
        done = client.completions.create(model=model.id, prompt=texts, max_tokens=12, temperature=0)
        assert [choice.text for choice in done.choices] == expected
        assert done.usage is not None
        assert done.usage.prompt_tokens == sum(len(tokenizer(each)["input_ids"]) for each in texts)
        with pytest.raises(openai.BadRequestError, match="an encoder reads the prompt"):
            client.completions.create(model=model.id, prompt="a", echo=True, logprobs=1)


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.1), ("int4", 1.5)])
def test_weights_are_rounded_at_load(
    serve: ServeFactory, tmp_path: Path, quantization: str, bound: float
) -> None:
    """Near what transformers says, and not the same."""
    tokens, expected = write_family(tmp_path / "llama", "llama")
    running = serve(model=tmp_path / "llama", settings={"quantization": quantization})
    asked = {"input_ids": tokens.tolist(), "request_output_len": 1, "return_context_logits": True}
    (answer,) = stream_infer(
        running, "tensorrt_llm", tensors_of(**asked), ("output_ids", "context_logits")
    )
    found = torch.from_numpy(answer["context_logits"][0]).float()
    assert 1e-3 < float((found - expected).square().mean().sqrt() / expected.std()) < bound


def test_a_text_longer_than_the_pool_comes_through_where_layers_have_windows(
    serve: ServeFactory, tmp_path: Path
) -> None:
    """One layer of seven sees all: with the room of 64 tokens in all layers there is enough for 200
    (50 blocks of that one, and what six windows of 6 and the longest chunk take)."""
    tokens, _ = write_family(tmp_path / "gemma3", "gemma3")
    prompt = (tokens.tolist() * 4)[:150]
    settings = {
        "max_tokens_in_paged_kv_cache": 64,
        "tokens_per_block": 4,
        "max_num_tokens": 16,
        "enable_chunked_context": "true",
    }
    running = serve(model=tmp_path / "gemma3", settings=settings)
    asked = {"input_ids": prompt, "request_output_len": 50, "exclude_input_in_output": True}
    answers = [
        [
            token
            for each in stream_infer(running, "tensorrt_llm", tensors_of(**asked), ("output_ids",))
            for token in each["output_ids"].flatten().tolist()
        ]
        for _ in range(2)  # then the prompt is cached, as far as it is seen
    ]
    assert answers == [oracle_tokens(tmp_path / "gemma3", prompt, 50)] * 2
