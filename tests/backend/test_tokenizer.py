"""tokenizer.json and the files beside it: which tokens a text becomes, and which end it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from inflight_backend.errors import CheckpointError, InvalidRequest
from inflight_backend.requests.validation import RequestLimits
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.introspection import ModelInfo

BOS, EOS, PAD = "<bos>", "<eos>", "[PAD]"
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
TEXT = "a b"
NAMES = {"bos_token": BOS, "eos_token": {"content": EOS}, "tokenizer_class": "LlamaTokenizerFast"}
LIMITS = RequestLimits(258, 100, 200, exclude_input_in_output=False, refusal_reason=lambda _: None)


def make_tokenizer(bos: str = BOS, *, has_template: bool = False) -> Tokenizer:
    """A token for each byte, and three more; ``has_template`` puts the first before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([bos, EOS, PAD])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if has_template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["first", "$A"],
            special_tokens=[{"id": "first", "ids": [BOS_ID], "tokens": [bos]}],
        )
    return tokenizer


PLAIN = make_tokenizer().encode(TEXT).ids


def write(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """A folder with a tokenizer and the file that speaks of it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def told(folder: Path, codec: TextCodec) -> Tokenizer:
    """The tokenizer that clients are told."""
    description = json.loads(ModelInfo("m", folder, LIMITS, codec).to_json())
    return Tokenizer.from_str(description["files"]["tokenizer.json"])


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


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, None),
        ({"add_bos_token": True, "add_eos_token": False}, [BOS_ID, *PLAIN]),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS_ID, *PLAIN, EOS_ID]),
        ({"add_eos_token": True}, [BOS_ID, *PLAIN, EOS_ID]),
        ({"add_eos_token": False}, [BOS_ID, *PLAIN]),
        ({"add_eos_token": True, "add_bos_token": False}, [*PLAIN, EOS_ID]),
        ({"add_eos_token": False, "bos_token": None}, PLAIN),
        ({"add_bos_token": False}, PLAIN),
        ({"add_bos_token": None}, PLAIN),
        ({"add_bos_token": True, "bos_token": None}, PLAIN),
        ({"add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, None),
        ({"add_bos_token": False, "tokenizer_class": None}, None),
    ],
)
@pytest.mark.parametrize("has_template", [False, True])
def test_texts_begin_and_end_as_the_tokenizer_s_configuration_says(
    tmp_path: Path, config: dict[str, Any], wanted: list[int] | None, has_template: bool
) -> None:
    """DeepSeek-R1-Distill asks for the first token there, and its tokenizer.json adds none."""
    tokenizer = make_tokenizer(has_template=has_template)
    codec = TextCodec(write(tmp_path, tokenizer, **{**NAMES, **config}))
    wanted = tokenizer.encode(TEXT).ids if wanted is None else wanted
    assert codec.encode(TEXT, 10) == wanted
    assert codec.encode_word(TEXT) == PLAIN
    assert told(tmp_path, codec).encode(TEXT).ids == wanted


def test_special_tokens_may_be_named_in_their_own_file(tmp_path: Path) -> None:
    write(tmp_path, make_tokenizer(), add_bos_token=True, tokenizer_class="LlamaTokenizer")
    tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": {"content": PAD}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    codec = TextCodec(tmp_path)
    assert codec.encode(TEXT, 10) == [BOS_ID, *PLAIN]
    assert (codec.end_id, codec.pad_id) == (EOS_ID, PAD_ID)


def test_a_name_of_a_token_is_no_template(tmp_path: Path) -> None:
    bos = "$A:1 begin of: text"
    config = {**NAMES, "bos_token": bos, "add_bos_token": True}
    codec = TextCodec(write(tmp_path, make_tokenizer(bos), **config))
    assert codec.encode(TEXT, 10) == [BOS_ID, *PLAIN]


def test_a_first_token_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = {**NAMES, "bos_token": "<s>", "add_bos_token": True}
    write(tmp_path, make_tokenizer(), **config)
    with pytest.raises(CheckpointError) as caught:
        TextCodec(tmp_path)
    assert str(caught.value) == (
        "tokenizer_config.json: add_bos_token is true, and the tokenizer has no '<s>', "
        "the bos_token"
    )


def test_a_file_that_says_it_all_is_told_as_it_is(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(has_template=True)
    codec = TextCodec(write(tmp_path, tokenizer, **NAMES, add_bos_token=True))
    assert codec.changed_json is None
    text = json.loads(ModelInfo("m", tmp_path, LIMITS, codec).to_json())["files"]
    assert text["tokenizer.json"] == (tmp_path / "tokenizer.json").read_text()


@pytest.mark.case(104)
def test_an_added_token_without_a_row_is_named(tmp_path: Path) -> None:
    """Wizard-Vicuna: 32,000 rows, and [PAD] has id 32,000."""
    codec = TextCodec(write(tmp_path, make_tokenizer()))
    codec.check_fits(259)
    complaint = "259 tokens, .* only 257 rows: .* added_tokens .* from '<eos>' .id 257. on"
    with pytest.raises(CheckpointError, match=complaint):
        codec.check_fits(257)
    with pytest.raises(CheckpointError, match=r"255 rows: they do not belong together$"):
        codec.check_fits(255)


@pytest.mark.case(103, 104)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": 99999}', "the checkpoint's end id, 99999, is outside .* 259 rows"),
        ('{"eos_token_id": [1099511627776]}', "end id, 1099511627776, is outside"),
        ('{"eos_token_id": true}', "'eos_token_id' must be a token id, -1 for none, .* not true"),
        ('{"eos_token_id": -7}', "'eos_token_id' must be a token id, -1 for none, .* not -7"),
        ('{"pad_token_id": false}', "'pad_token_id' must be a token id, -1 for none, .* not false"),
        ('{"eos_token_id": [5, 300]}', "end id, 300, is outside .* 259 rows"),
        ('{"eos_token_id": [5, true]}', r"a token id, -1 for none, or a list .* not \[5, true\]"),
        ('{"eos_token_id": [5, -2]}', r"a token id, -1 for none, or a list .* not \[5, -2\]"),
        ('{"eos_token_id": "</s>"}', 'a token id, -1 for none, or a list of these, not "</s>"'),
        (json.dumps({"eos_token_id": [*range(65)]}), "holds 65 ids, more than 64"),
        ("[" * 100_000, "generation_config.json cannot be read"),
    ],
)
def test_an_impossible_end_id_is_found_at_load(tmp_path: Path, content: str, message: str) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        TextCodec(tmp_path).check_fits(259)


@pytest.mark.parametrize(
    ("files", "end_id", "more"),
    [
        ({"generation_config": [9, 7, 9, 8]}, 9, (7, 8)),
        ({"generation_config": 9, "config": [9, 7]}, 9, ()),
        ({"generation_config": None, "config": [9, 7]}, 9, (7,)),
        ({"generation_config": [7, 9], "eos_token": EOS}, 257, (7, 9)),
        ({"generation_config": [7, 257], "eos_token": EOS}, 257, (7,)),
        ({"config": -1, "eos_token": EOS}, 257, ()),
        ({"config": [-1, 5], "eos_token": EOS}, 257, (5,)),
        ({"eos_token": EOS}, 257, ()),
        ({"own": 0, "generation_config": [9, 7]}, 9, (7,)),  # the tokenizer's folder names no end
    ],
)
def test_a_checkpoint_may_end_texts_with_several_tokens(
    tmp_path: Path, files: dict[str, Any], end_id: int, more: tuple[int, ...]
) -> None:
    """The tokenizer's is the first; the model's are in its own folder."""
    tokenizer, model = tmp_path / "tokenizer", tmp_path / "model"
    tokenizer.mkdir()
    model.mkdir()
    make_tokenizer().save(str(tokenizer / "tokenizer.json"))
    if files.pop("own", 9):
        (tokenizer / "config.json").write_text('{"eos_token_id": 9}')
    for name, value in files.items():
        if name == "eos_token":
            content = json.dumps({"eos_token": value})
            (tokenizer / "tokenizer_config.json").write_text(content)
        else:
            (model / f"{name}.json").write_text(json.dumps({"eos_token_id": value}))
    codec = TextCodec.load(model, str(tokenizer))
    assert codec is not None
    codec.check_fits(259)
    assert (codec.end_id, codec.more_end_ids) == (end_id, more)


def test_a_pad_id_that_is_not_there_is_none(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"pad_token_id": 259, "eos_token_id": null}')
    codec = TextCodec(tmp_path)
    codec.check_fits(259)
    assert (codec.pad_id, codec.end_id) == (-1, -1)


@pytest.mark.case(81)
def test_a_long_text_stops_no_other_thread_while_it_is_encoded(tmp_path: Path) -> None:
    codec = TextCodec(write(tmp_path, make_tokenizer()))
    is_encoding = is_over = False
    num_turns = 0

    def take_turns() -> None:
        nonlocal num_turns
        while not is_over:
            time.sleep(0.001)
            num_turns += is_encoding

    thread = threading.Thread(target=take_turns)
    thread.start()
    is_encoding = True
    codec.encode("word " * 200_000, 1_000_000)
    is_encoding = False
    is_over = True
    thread.join()
    assert num_turns > 5, "with the interpreter lock held there is none, or one at its border"


def test_a_damaged_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer \(tokenizer\.json, "):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid s\n")
    with pytest.raises(CheckpointError, match="a pointer of Git LFS, not the file; run git lfs"):
        TextCodec(tmp_path)
    assert TextCodec.load(tmp_path / "nowhere", None) is None


def test_a_text_that_cannot_fit_is_refused_unread(tmp_path: Path) -> None:
    codec = TextCodec(write(tmp_path, make_tokenizer()))
    with pytest.raises(InvalidRequest, match="more than can fit max_input_len = 10 tokens"):
        codec.encode("a" * 10_000, 10)
