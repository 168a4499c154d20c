"""Stop words in text: nothing of them leaves, whatever pieces the text comes in."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inflight_backend.requests.sampling import MAX_WORD_TOKENS, MAX_WORDS
from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_io.beam_stream import BeamTexts
from inflight_backend.triton_io.stop_text import StopText, StopTokens
from inflight_backend.triton_io.token_stream import TextWriter

TEXT = st.text("abc", max_size=20)
WORDS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def until_stop(text: str, words: list[str]) -> str:
    places = [place for word in words if (place := text.find(word)) >= 0]
    return text[: min(places)] if places else text


@given(text=TEXT, words=WORDS, sizes=st.lists(st.integers(0, 5), max_size=20))
@example(text="cabc", words=["bc", "ab"], sizes=[])  # both are complete with one piece
@example(text="aabc", words=["abc", "ba"], sizes=[3])  # a shorter one may have begun later
def test_text_ends_before_the_first_word(text: str, words: list[str], sizes: list[int]) -> None:
    stop, left, rest = StopText(words), "", text
    expected = None
    for size in [*sizes, len(text)]:
        piece, rest = rest[:size], rest[size:]
        left += stop.push(piece, is_final=False)
        so_far = text.removesuffix(rest)
        if expected is None and any(word in so_far for word in words):
            expected = until_stop(so_far, words)
        # What has left can never be taken back, so it must be a beginning of the right answer.
        assert until_stop(text, words).startswith(left) or stop.is_hit
    left += stop.push("", is_final=True)
    # In pieces the word that is complete first counts, which may begin later than a longer one.
    assert stop.is_hit == (expected is not None)
    assert left == (text if expected is None else expected)


@pytest.mark.parametrize(
    ("words", "wanted"), [(["b c"], "a b c"), (["c", "b"], "a b"), (["b", "b c"], "a b"), ([], "")]
)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_text_may_end_behind_the_word(words: list[str], wanted: str, size: int) -> None:
    text = "a b c d"
    stop = StopText(words or ["nix"], keeps_word=True)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    told = "".join(stop.push(piece, is_final=False) for piece in pieces)
    assert told + stop.push("", is_final=True) == (wanted or text)


def test_only_what_may_become_a_word_is_held_back() -> None:
    stop = StopText(["abab!"])
    pieces = [stop.push(piece, is_final=False) for piece in ["xa", "b", "a", "c", "aba", "ba", "b"]]
    assert pieces == ["x", "", "", "abac", "", "ab", ""]
    assert stop.push("!zzz", is_final=False) == ""
    assert stop.is_hit


@given(
    ids=st.lists(st.integers(0, 2), max_size=15),
    words=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
    ),
)
def test_tokens_of_a_stop_word_are_never_decoded(
    ids: list[int], words: list[tuple[int, ...]]
) -> None:
    for end in range(1, len(ids) + 1):  # the request ends with the first word
        lengths = [len(w) for w in words if tuple(ids[max(end - len(w), 0) : end]) == w]
        if lengths:
            ids = ids[:end]
            expected = ids[: end - max(lengths)]
            break
    else:
        expected = ids
    stop = StopTokens(words)
    left = [token for i in ids for token in stop.push([i], is_final=False)]
    left += stop.push([], is_final=True)
    assert left == expected


def test_a_long_list_of_long_words_costs_no_more_than_itself(codec: TextCodec) -> None:
    """A table of all that its words begin with took 76 MB, for each request and, with beams, for
    each text of each response."""
    words = tuple(tuple(range(first, first + MAX_WORD_TOKENS)) for first in range(MAX_WORDS))
    beams = BeamTexts(codec, (5, 6), "", 0, words, ())
    tracemalloc.start()
    try:
        stop = StopTokens(words)
        assert stop.push([9, 3, 4], is_final=False) == [9]
        assert beams.text([40, 41], is_final=False) == b""
        assert beams.text([40, 41], is_final=True) == codec.decode([40, 41]).encode()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """One token per byte."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


@pytest.mark.parametrize(
    ("text", "word", "expected"),
    [
        ("one two three", " three", "one two"),
        ("naïve café — über", "é", "naïve caf"),
        ("日本語のテキスト", "のテ", "日本語"),
        ("stop at 🙂🙃 faces", "🙃", "stop at 🙂"),
        ("no word here", "nowhere", "no word here"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.case(35)
def test_words_across_tokens_and_inside_characters(
    codec: TextCodec, text: str, word: str, expected: str, size: int
) -> None:
    ids = codec.encode_word(text)
    writer = TextWriter(IncrementalDetokenizer(codec, [5, 6]), stop_text=StopText([word]))
    written, num_used = "", 0
    for start in range(0, len(ids), size):
        piece, num_ids = writer.write(ids[start : start + size], start + size >= len(ids))
        written, num_used = written + piece, num_used + num_ids
        if writer.is_stopped:
            break
    assert written == expected
    # Tokens count up to the one that completed the word.
    assert codec.decode(ids[:num_used]) == (expected + word if expected != text else text)
