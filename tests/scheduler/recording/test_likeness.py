"""Made-up texts agree exactly as far as the real ones do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from inflight_recorder import likeness
from inflight_recorder import texts as texts_module
from inflight_recorder.likeness import NO_LIKENESS, Likeness, TextIndex, Texts, pack
from inflight_recorder.text_book import TextBook
from inflight_scheduler import LlmRequest

texts = st.lists(st.sampled_from((0, 1, 256)), min_size=1, max_size=12)


def num_common(one: list[int], other: list[int]) -> int:
    return next(
        (k for k, (x, y) in enumerate(zip(one, other, strict=False)) if x != y),
        min(len(one), len(other)),
    )


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=8), st.booleans())
def test_every_pair_agrees_as_far_as_the_real_pair(
    parts: list[tuple[list[int], list[int], bool]], grows_later: bool
) -> None:
    """Prompts come, then answers are added, at once or when all prompts are known."""
    index, book = TextIndex(16, 4), TextBook()
    real: list[list[int]] = []
    pending: list[tuple[int, list[int], list[int]]] = []

    def grow(number: int, prompt: list[int], answer: list[int]) -> None:
        real[number] = prompt + answer
        found = index.grow(b"", pack(real[number]), number, len(pack(prompt)))
        if found.length > len(prompt):
            book.extend(number, found, len(prompt))

    for prompt, answer, has_answer in parts:
        number = len(real)
        real.append(prompt)
        assert book.add(index.add(b"", pack(prompt), number)) == number
        if has_answer and not grows_later:
            grow(number, prompt, answer)
        elif has_answer:
            pending.append((number, prompt, answer))
    for item in pending:
        grow(*item)
    made = [book.tokens(number, 0, len(text)) for number, text in enumerate(real)]
    assert [len(text) for text in made] == [len(text) for text in real]
    for one, other in combinations(range(len(real)), 2):
        assert num_common(made[one], made[other]) == num_common(real[one], real[other])
    for number, text in enumerate(real):
        half = len(text) // 2
        assert book.tokens(number, half, len(text)) == made[number][half:]


def test_texts_with_other_salts_are_never_alike() -> None:
    index = TextIndex(16, 4)
    assert index.add(b"a", pack([1, 2, 3]), 0) == NO_LIKENESS
    assert index.add(b"b", pack([1, 2, 3]), 1) == NO_LIKENESS
    assert index.add(b"a", pack([1, 2, 4]), 2) == Likeness(0, 2)


def test_old_texts_are_forgotten_and_those_in_use_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "_MIN_TOKENS", 100)
    index = TextIndex(1, 1)
    index.add(b"", pack([1] * 20), 0)
    index.add(b"", pack([2] * 20), 1)
    for number in range(2, 40):
        start = 100 * number
        index.add(b"", pack(list(range(start, start + 20))), number)
        assert index.add(b"", pack([2] * 21), 1000 + number).length >= 20
    assert index.add(b"", pack([1] * 20), 99) == NO_LIKENESS
    assert index._young.num_tokens + index._old.num_tokens <= 2 * 100 + 40


def test_nobody_waits_until_all_texts_in_use_are_entered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand of them took a tenth of a second; now each new text brings one of them along."""
    monkeypatch.setattr(likeness, "_MIN_TEXTS", 100)
    in_use = {number: pack([number, number]) for number in range(80)}
    index = TextIndex(1, 1, lambda: Texts(in_use.copy(), {}))
    for number, text in in_use.items():
        index.add(b"", text, number)
    num_added = 0
    add = likeness._Tree.add

    def counted(*args: Any) -> Likeness:
        nonlocal num_added
        num_added += 1
        return add(*args)

    monkeypatch.setattr(likeness._Tree, "add", counted)
    for number in range(100, 1000):
        num_before = num_added
        index.add(b"", pack([number]), number)
        assert num_added - num_before <= 2
        assert all(map(index.is_named, range(80)))
        new = pack([number % 80, number % 80, 1])
        assert (len(pack([0, 0])), number % 80) in (
            *index._young.owners_along(b"", new),
            *index._old.owners_along(b"", new),
        )
    assert num_added > 900 + 6 * 80, "few were entered again: the test shows nothing"


def test_a_token_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a request comes back: of a long prompt nothing else would cost as much."""
    num_packed = 0

    def counted(tokens: Sequence[int]) -> bytes:
        nonlocal num_packed
        num_packed += len(tokens)
        return pack(tokens)

    monkeypatch.setattr(texts_module, "pack", counted)
    texts = texts_module.RecordedTexts(64, 4)
    request, other = LlmRequest(1, range(100), 20), LlmRequest(2, range(120), 1)
    texts.add(request)
    for token in range(100, 120):
        if token == 110:
            texts.grow(request)
            request.pause()
        request.add_new_token(token)
    texts.grow(request, is_last=True)
    assert num_packed == 120
    texts.add(other)
    assert texts.likeness(other) == Likeness(request.text_number, 120)


@pytest.mark.case(84)
def test_many_short_texts_are_as_few_as_blocks_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one token each: by their tokens a million of them would be kept, 300 bytes each."""
    monkeypatch.setattr(likeness, "_MIN_TEXTS", 100)
    index = TextIndex(50, 64)
    for number in range(5000):
        index.add(b"", pack([number]), number)
    assert sum(map(index.is_named, range(5000))) <= 2 * 200 + 2


def test_a_beginning_that_is_used_for_ever_goes_by_one_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By another one each time the index forgets, it would lean on all of them."""
    monkeypatch.setattr(likeness, "_MIN_TOKENS", 0)
    monkeypatch.setattr(likeness, "_MIN_TEXTS", 0)
    index = TextIndex(2, 8)
    found = [
        index.add(b"", pack([1, 2, 3, 4, *range(100 * number, 100 * number + 9)]), number)
        for number in range(200)
    ]
    assert found[1:] == [Likeness(0, 4)] * 199
    assert not index.is_named(1), "nothing was forgotten: the test shows nothing"


def test_what_is_forgotten_is_given_back_a_little_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred thousand texts at once took a tenth of a second."""
    monkeypatch.setattr(likeness, "_MIN_TEXTS", 400)
    index = TextIndex(1, 1)
    before, size = None, 0
    num_given_back = 0
    for number in range(3000):
        index.add(b"", pack([number, number]), number)
        forgotten = index._forgotten
        if forgotten is not None and forgotten is before:
            assert size - 4 <= len(forgotten._edges) < size
            num_given_back += size - len(forgotten._edges)
        before, size = forgotten, 0 if forgotten is None else len(forgotten._edges)
    assert num_given_back > 1500


def test_what_goes_on_in_place_counts_as_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "_MIN_TOKENS", 0)
    index = TextIndex(1, 1)  # four tokens, and forgotten from twice that on
    index.add(b"", pack([1]), 0)
    index.grow(b"", pack([1, 2, 3, 4, 5]), 0, len(pack([1])))
    index.add(b"", pack([6, 7, 8, 9, 10]), 1)
    assert (index.is_named(0), index.is_named(1)) == (False, True)


def test_what_another_text_goes_on_with_counts_as_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(likeness, "_MIN_TOKENS", 0)
    index = TextIndex(1, 1)
    for number in range(12):  # each takes the node of the one before over
        index.add(b"", pack(range(number + 1)), number)
    assert (index.is_named(0), index.is_named(11)) == (False, True)


def test_the_walk_is_as_long_as_a_text_has_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client that asks token by token it was as long as the text: a millisecond for 1,000."""
    num_steps = 0
    common_size = likeness._common_size

    def counted(*args: Any) -> int:
        nonlocal num_steps
        num_steps += 1
        return common_size(*args)

    monkeypatch.setattr(likeness, "_common_size", counted)
    monkeypatch.setattr(likeness, "_MIN_TEXTS", 100)
    index = TextIndex(1, 1)
    for number in range(300):
        text = list(range(number + 2))
        found = index.add(b"", pack(text[:-1]), number)
        assert found == (Likeness(number - 1, number + 1) if number else NO_LIKENESS)
        assert index.grow(b"", pack(text), number, len(pack(text[:-1]))) == NO_LIKENESS
    assert num_steps < 10 * 300, "in both trees: a hundred times as many without"


def test_each_text_makes_two_nodes_at_most() -> None:
    """Also one that another one begins with: by so many texts memory is bounded."""
    index = TextIndex(16, 4)
    for number, length in enumerate(range(200, 0, -1)):
        text = pack(range(length))
        assert index.add(b"", text, number) == (Likeness(0, length) if number else NO_LIKENESS)
        index.grow(b"", text + pack([length]), number, len(text))
    assert len(index._young._edges) <= 1 + 2 * index._young.num_texts
