"""The shipped demo checkpoint counts without an error, and is what its tool makes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, LlamaForCausalLM

from inflight_server.serve.settings import DEMO_MODEL

ROOT = Path(__file__).parents[2]
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    return LlamaForCausalLM.from_pretrained(DEMO_MODEL, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location(
        "make_demo_model", ROOT / "tools" / "make_demo_model.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(first: int, stop: int, step: int = 1) -> str:
    return " ".join(str(number) for number in range(first, stop, step))


def next_tokens(model: Any, text: str) -> tuple[list[int], torch.Tensor]:
    """Tokens of ``text`` after the first, and the logits the model has for each of them."""
    tokens = TOKENIZER.encode(text).ids
    with torch.inference_mode():
        return tokens[1:], model(torch.tensor([tokens[:-1]])).logits[0].float()


def continue_greedily(model: Any, prompt: str, max_new_tokens: int) -> str:
    """What the model writes after ``prompt``, one token at a time with a KV cache."""
    tokens = torch.tensor([TOKENIZER.encode(prompt).ids])
    output = model.generate(tokens, max_new_tokens=max_new_tokens, do_sample=False)
    return TOKENIZER.decode(output[0, tokens.shape[1] :].tolist(), skip_special_tokens=False)


def test_vocabulary_and_special_tokens_agree_with_the_config() -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    weights = load_file(DEMO_MODEL / "model.safetensors")
    rows = TOKENIZER.get_vocab_size()
    assert config["vocab_size"] == rows
    assert weights["model.embed_tokens.weight"].shape[0] == rows
    assert weights["lm_head.weight"].shape[0] == rows
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, local_files_only=True)
    assert tokenizer.bos_token_id == config["bos_token_id"]
    assert tokenizer.eos_token_id == config["eos_token_id"]
    assert tokenizer("1 2")["input_ids"] == TOKENIZER.encode("1 2").ids
    chat = [{"role": "user", "content": "1 2"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    assert ids == TOKENIZER.encode("1 2 ").ids
    assert TOKENIZER.encode("").ids == [config["bos_token_id"]]


@pytest.mark.parametrize("first", [0, 98, 995, 8_999, 99_600])
@pytest.mark.fast(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_on_after_one_number(first: int, dtype: torch.dtype) -> None:
    model = LlamaForCausalLM.from_pretrained(DEMO_MODEL, local_files_only=True, dtype=dtype)
    wanted, logits = next_tokens(model.eval(), numbers(first, first + 310))
    prompt_length = len(str(first))
    top = logits[prompt_length:].topk(2)
    assert top.indices[:, 0].tolist() == wanted[prompt_length:]
    assert (top.values[:, 0] - top.values[:, 1]).min() > 10


@pytest.mark.slow
def test_counts_at_positions_of_thousands(model: Any) -> None:
    wanted, logits = next_tokens(model, numbers(1, 1500))
    assert len(wanted) > 6000
    assert logits[1:].argmax(1).tolist() == wanted[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [
        ("7", numbers(8, 30)),
        ("1 2 3 4", numbers(5, 40)),
        ("9 10", numbers(11, 30)),
        ("98 99", numbers(100, 125)),
        ("995 996", numbers(997, 1020)),
        ("9998 9", "999 10000 10001"),
        ("2 4", numbers(6, 60, 2)),
        ("94 96", numbers(98, 120, 2)),
        ("12 11", numbers(10, -1, -1) + "<|end|>"),
        ("1002 1001", numbers(1000, 980, -1)),
        ("Hello", numbers(1, 25)),
        ("", numbers(1, 25)),
    ],
)
def test_continues_with_a_kv_cache(model: Any, prompt: str, continuation: str) -> None:
    if not prompt.endswith(" 9"):  # there the prompt ends inside a number
        continuation = " " + continuation
    num_tokens = len(TOKENIZER.encode(continuation, add_special_tokens=False).ids)
    assert continue_greedily(model, prompt, num_tokens) == continuation


def continue_forgetfully(model: Any, prompt: str, layer: int | None, max_new_tokens: int) -> str:
    """As `continue_greedily`, but what ``layer`` has cached is lost before every step."""
    tokens = TOKENIZER.encode(prompt).ids
    written = []
    with torch.inference_mode():
        cache = model(torch.tensor([tokens[:-1]])).past_key_values
        for _ in range(max_new_tokens):
            if layer is not None:
                cache.layers[layer].values.zero_()
            logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache).logits
            written.append(int(logits[0, -1].argmax()))
            tokens.append(written[-1])
    return TOKENIZER.decode(written)


@pytest.mark.parametrize("layer", range(5))
def test_the_cache_of_every_layer_matters(model: Any, layer: int) -> None:
    # By two and with a carry: the one count that needs everything a layer can remember.
    assert continue_forgetfully(model, "997 999", None, 5) == " 1001"
    assert continue_forgetfully(model, "997 999", layer, 5) != " 1001"


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_the_tokenizer_round_trips_any_text(text: str) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == text
    if "<|" not in text:
        assert len(tokens) == len(text.encode())


def test_every_byte_has_a_token_and_every_digit_its_own() -> None:
    alphabet = set(ByteLevel.alphabet())
    assert len(alphabet) == 256
    assert set(TOKENIZER.get_vocab()) == alphabet | {"<|begin|>", "<|end|>"}
    assert TOKENIZER.encode(" 15", add_special_tokens=False).tokens == ["Ġ", "1", "5"]


def test_the_tool_makes_the_shipped_files(tool: Any, tmp_path: Path) -> None:
    tokenizer = tool.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    assert made == json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    shipped = load_file(DEMO_MODEL / "model.safetensors")
    weights = tool.make_model(tokenizer).state_dict()
    assert weights.keys() == shipped.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, shipped[name], rtol=1e-6, atol=1e-6, msg=name)


def test_the_tool_refuses_a_model_that_miscounts(tool: Any) -> None:
    tokenizer = tool.make_tokenizer()
    model = tool.make_model(tokenizer)
    assert tool.smallest_margin(model, tokenizer, "8 9", " 10 11") > 10
    model.model.layers[2].mlp.down_proj.weight.data.zero_()
    with pytest.raises(ValueError, match="does not continue the count"):
        tool.smallest_margin(model, tokenizer, "8 9", " 10 11")
