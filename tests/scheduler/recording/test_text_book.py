"""Made-up texts: however they lean on one another, and however hostile a recording is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from inflight_recorder.errors import RecordingError
from inflight_recorder.likeness import NO_LIKENESS, Likeness
from inflight_recorder.text_book import MAX_STEPS, TextBook


@pytest.mark.case(112)
def test_hostile_texts_are_refused_in_time() -> None:
    book = TextBook()
    book.add()
    with pytest.raises(RecordingError, match="there is no text 7"):
        book.add(Likeness(7, 5))
    book = TextBook()
    last = book.add()
    for _ in range(MAX_STEPS):  # of which none goes on as one piece of another
        half = book.add(Likeness(last, 50))
        book.extend(half, Likeness(last, 99), 50)
        last = book.add(Likeness(half, 100))
    with pytest.raises(RecordingError, match="too many pieces"):
        book.tokens(last, 60, 70)
    loop = TextBook()
    loop.add()
    loop.extend(0, Likeness(0, 5), 0)  # like itself: nothing it could lean on was there before
    assert loop.tokens(0, 0, 3) == loop.tokens(0, 0, 3)


def test_a_text_that_grows_by_a_token_with_each_request_is_found_at_once() -> None:
    """As of a client that has one token generated at a time and sends all of them again."""
    book = TextBook()
    num_texts = 3 * MAX_STEPS
    for number in range(num_texts):
        book.add(Likeness(number - 1, number) if number else NO_LIKENESS)
    assert book.tokens(num_texts - 1, 0, num_texts) == list(range(num_texts))
    for start in range(0, num_texts, 64):  # one after another it would be a billion steps
        assert book.tokens(num_texts - 1, start, start + 1) == [start]


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.integers(0, 9)] * 2, st.integers(0, 12), st.integers(0, 12)), max_size=60
    )
)
def test_a_text_goes_on_as_the_other_was_known_then(facts: list[tuple[int, int, int, int]]) -> None:
    """Whatever is told, and in whatever order: as if all were copied at once."""
    book = TextBook()
    copies = [[book.add()] * 12 for _ in range(10)]
    num_known = [0] * 10
    for number, source, length, start in facts:
        book.extend(number, Likeness(source, length), start)
        if length > start:
            place = max(start, num_known[number])
            copies[number][place:length] = copies[source][place:length]
            num_known[number] = max(length, num_known[number])
    for number, copy in enumerate(copies):
        assert [book.tokens(number, k, k + 1)[0] for k in range(12)] == copy
        assert book.tokens(number, 2, 12) == copy[2:]
