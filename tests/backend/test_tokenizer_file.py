"""tokenizer.json and what stands beside it: which tokens a text becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from inflight_backend.errors import CheckpointError
from inflight_backend.text import TextCodec

BOS, EOS, PAD = "<bos>", "<eos>", "[PAD]"
EOS_ID, PAD_ID = 257, 258
TEXT = "a b"


def make_tokenizer() -> Tokenizer:
    """A token for each byte, and three more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    return tokenizer


PLAIN = make_tokenizer().encode(TEXT).ids


def write(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """A folder with a tokenizer and the file that speaks of it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_limits_of_the_training_are_not_those_of_requests(tmp_path: Path) -> None:
    """transformers sets both anew for each call."""
    import transformers

    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(pad_id=PAD_ID, pad_token=PAD, length=8)
    codec = TextCodec(write(tmp_path, tokenizer))
    assert codec.encode(TEXT, 10) == PLAIN
    assert len(codec.encode_word("word " * 100)) == 500
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert oracle.encode(TEXT) == PLAIN


def test_special_tokens_may_be_named_in_their_own_file(tmp_path: Path) -> None:
    write(tmp_path, make_tokenizer())
    tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": {"content": PAD}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    codec = TextCodec(tmp_path)
    assert (codec.end_id, codec.pad_id) == (EOS_ID, PAD_ID)


def test_an_added_token_without_a_row_is_named(tmp_path: Path) -> None:
    """Wizard-Vicuna: 32,000 rows, and [PAD] has id 32,000."""
    codec = TextCodec(write(tmp_path, make_tokenizer()))
    codec.check_fits(259)
    complaint = "259 tokens, .* only 257 rows: .* added_tokens .* from '<eos>' .id 257. on"
    with pytest.raises(CheckpointError, match=complaint):
        codec.check_fits(257)
    with pytest.raises(CheckpointError, match=r"255 rows: they do not belong together$"):
        codec.check_fits(255)


def test_a_pointer_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid s\n")
    with pytest.raises(CheckpointError, match="a pointer of Git LFS, not the file; run git lfs"):
        TextCodec(tmp_path)
