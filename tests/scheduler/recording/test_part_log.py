"""What is left out of a recording's memory of texts says nothing about those that still matter."""

from __future__ import annotations

import random

import pytest

from inflight_recorder import part_log
from inflight_recorder.likeness import Likeness
from inflight_recorder.part_log import PartLog
from inflight_recorder.records import TextPart
from inflight_recorder.text_book import TextBook

LENGTH = 30


def book_of(parts: tuple[TextPart, ...] | list[TextPart], num_texts: int) -> TextBook:
    book = TextBook(num_texts)
    for part in parts:
        book.extend(part.number, Likeness(part.source, part.length), part.start)
    return book


@pytest.mark.parametrize("seed", range(20))
def test_texts_that_matter_agree_as_they_did_before_others_were_left_out(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of the last 20 texts one may ask, and new ones may be like them; some grow once."""
    monkeypatch.setattr(part_log, "MIN_PARTS", 40)
    numbers = random.Random(seed)
    num_texts = 0
    log = PartLog(lambda number: number >= num_texts - 20)
    everything: list[TextPart] = []

    def add(number: int, start: int) -> None:
        source = numbers.randrange(max(0, num_texts - 20), num_texts)
        found = Likeness(source, numbers.randrange(LENGTH))
        if source != number:
            log.add(number, found, start)
            if found.length > start:
                everything.append(TextPart(number, source, found.length, start))

    for _ in range(600):
        if num_texts:
            add(num_texts, 0)
        num_texts += 1
        if numbers.random() < 0.3:
            add(num_texts - 1, LENGTH // 2)
        if log.wants_walk and numbers.random() < 0.2:
            log.begin_walk({*range(max(0, num_texts - 20), num_texts)})
        log.walk_on()
    assert log.num_parts < 0.7 * len(everything)
    asked = set(range(num_texts - 20, num_texts))
    kept, whole = log.mark().needed(asked), book_of(everything, num_texts)
    short = book_of(kept, num_texts)
    for number in asked:
        assert short.tokens(number, 0, LENGTH) == whole.tokens(number, 0, LENGTH)


def test_a_new_text_looks_at_a_few_parts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """At all of a hundred thousand it took half a second, for which everybody waited."""
    num_asked = 0

    def is_named(_: int) -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    monkeypatch.setattr(part_log, "MIN_PARTS", 1000)
    log = PartLog(is_named)
    for number in range(1, 1001):
        log.add(number, Likeness(number - 1, 5), 0)
    assert log.wants_walk
    mark = log.mark()
    log.begin_walk({500})
    for number in range(1001, 1200):
        num_before = num_asked
        log.add(number, Likeness(number - 1, 4), 0)
        log.walk_on()
        assert num_asked - num_before <= 8
    assert num_asked == 500, "500 leans on 499, and that on 498: about those nobody asks"
    assert log.num_parts == 500 + 199
    assert len(mark.needed({1000})) == 1000, "who remembers a moment goes on remembering it"
