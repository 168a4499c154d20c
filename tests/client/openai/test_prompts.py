"""What the front makes of the tokenizer that the server tells."""

from __future__ import annotations

from client.openai.front import DESCRIPTION
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import BPE

from inflight_client.openai.prompts import make_prompt_reader


def test_the_text_of_a_token_has_the_space_that_it_begins_with() -> None:
    """Else the `text_offset` of a completion is short by one for every word before."""
    words = ["\N{LOWER ONE EIGHTH BLOCK}Hello", "\N{LOWER ONE EIGHTH BLOCK}wor", "ld", "!"]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = Metaspace()
    description = DESCRIPTION | {"files": {"tokenizer.json": tokenizer.to_str()}}
    reader = make_prompt_reader(description, None, None)
    assert [reader.token(token).text for token in range(4)] == [" Hello", " wor", "ld", "!"]


def test_the_text_of_a_token_of_the_demo_model() -> None:
    reader = make_prompt_reader(DESCRIPTION, None, None)
    ids = reader.encode("a b", "prompt", add_special_tokens=False)
    assert [reader.token(token).text for token in ids] == ["a", " ", "b"]
