"""Events of a stream, against the examples of the standard and any way of cutting the bytes, and
errors of HTTP."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_client.errors import ServerError
from inflight_client.http_transport import SseParser, decode_event, error_of_status, model_path


def parse(pieces: list[bytes]) -> list[str]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: one\n\ndata: two\n\n", ["one", "two"]),
        (b"data: one\r\n\r\ndata: two\r\n\r\n", ["one", "two"]),
        (b"data: one\r\rdata: two\r\r\n", ["one", "two"]),
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", ["YHOO\n+2\n10"]),
        (b"data:no space\n\ndata:  two spaces\n\n", ["no space", " two spaces"]),
        (b": a comment\n\nevent: x\nid: 3\ndata: one\n\n", ["one"]),
        (b"data\n\n", [""]),
        (b"\n\n\n", []),
        (b"data: cut off", []),
        (b"data: cut off\n", []),
    ],
)
def test_streams(stream: bytes, events: list[str]) -> None:
    assert parse([stream]) == events
    assert parse([stream[index : index + 1] for index in range(len(stream))]) == events


@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(0, 200)),
)
def test_cuts_do_not_matter(texts: list[str], newline: bytes, cuts: list[int]) -> None:
    stream = b"".join(b"data: " + text.encode() + newline * 2 for text in texts)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]

    pieces = [stream[start:end] for start, end in pairwise(edges)]

    assert parse(pieces) == texts


@pytest.mark.parametrize("data", ["", "[1]", "{", "null"])
def test_event_that_is_not_an_object(data: str) -> None:
    with pytest.raises(ServerError, match="not a JSON object"):
        decode_event(data)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":"unknown model"}', "unknown model"),
        (b'data: {"error":"no prompt"}\n\n', "no prompt"),
        (b"<html>proxy</html>", "HTTP status 502: <html>proxy</html>"),
        (b"", "HTTP status 502: no explanation"),
        (b"[]", r"HTTP status 502: \[\]"),
    ],
)
def test_error_of_an_http_status(body: bytes, message: str) -> None:
    with pytest.raises(ServerError, match=f"^{message}$"):
        raise error_of_status(502, body)


def test_model_name_cannot_leave_its_place_in_the_path() -> None:
    assert model_path("../a?b", "ready") == "/v2/models/..%2Fa%3Fb/ready"
