"""Events and errors of HTTP that are not what they should be."""

from __future__ import annotations

import pytest

from inflight_client.errors import ServerError
from inflight_client.http_transport import decode_event, error_of_status, model_path


@pytest.mark.parametrize("data", [b"", b"[1]", b"{", b"null", b"\xff"])
def test_event_that_is_not_an_object(data: bytes) -> None:
    with pytest.raises(ServerError, match="not a JSON object"):
        decode_event(data)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":"unknown model"}', "unknown model"),
        (b'data: {"error":"no prompt"}\n\n', "no prompt"),
        (b"<html>proxy</html>", "HTTP status 502: <html>proxy</html>"),
        (b"", "HTTP status 502: no explanation"),
        (b'{"error":{"message":"Not Found"}}', r"Not Found \(OpenAI's API is there; .*\)"),
        (b"[]", r"HTTP status 502: \[\]"),
    ],
)
def test_error_of_an_http_status(body: bytes, message: str) -> None:
    with pytest.raises(ServerError, match=f"^{message}$"):
        raise error_of_status(502, body)


def test_model_name_cannot_leave_its_place_in_the_path() -> None:
    assert model_path("../a?b", "ready") == "/v2/models/..%2Fa%3Fb/ready"
