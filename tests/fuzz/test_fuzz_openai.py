"""Bodies of any kind for `inflight openai`: each becomes calls of the server, or is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzzing import assert_tells_nothing_internal, fuzzing
from support.openai_front import DESCRIPTION

from inflight_openai.errors import ApiError
from inflight_openai.generation import parse_chat, parse_completion
from inflight_openai.prompts import make_prompt_reader
from inflight_openai.schema import KNOWN_NAMES, UnknownFields
from inflight_openai.settings import FrontSettings
from inflight_openai.triton_client import encode_calls

pytestmark = pytest.mark.slow

READER = make_prompt_reader(DESCRIPTION, None, None)
FIELDS = sorted(KNOWN_NAMES)
NUMBERS = st.sampled_from(
    [0, 1, 2, -1, 5, 257, 258, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308]
)
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", "<|end|>", "<|en", "d|>", "\ud800", "\0", "5", "text", "json_object"]
)
KEYS = TEXTS | st.sampled_from(
    ["type", "json_schema", "schema", "role", "content", "text", "name", "function", "arguments"]
)
ROLES = TEXTS | st.sampled_from(["user", "assistant", "developer", "tool"])
MESSAGE_KEYS = st.sampled_from(["content", "tool_calls", "name", "refusal", "tool_call_id"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Mostly a request that could be served but for a few fields."""
    if not draw(st.integers(0, 9)):
        return draw(st.binary(max_size=60))
    content: dict[str, Any] = {"model": "demo"}
    if draw(st.booleans()):
        content["prompt"] = draw(st.sampled_from(["1 2", [5, 6], ["1", "2"], [[5], [6]]]))
    if draw(st.booleans()):
        message = {"role": draw(ROLES), "content": draw(TEXTS)}
        content["messages"] = [message | draw(st.dictionaries(MESSAGE_KEYS, VALUES, max_size=2))]
    content |= draw(st.dictionaries(st.sampled_from(FIELDS) | TEXTS, VALUES, max_size=3))
    return json.dumps(content).encode()


@pytest.mark.case(122, 123)
@fuzzing
@given(raw=bodies(), is_chat=st.booleans())
@example(b'{"model": "demo", "prompt": "1", "temperature": 1e999}', False)
@example(b'{"model": "demo", "prompt": "1", "logit_bias": {"5": 1' + b"0" * 400 + b"}}", False)
@example(b"[" * 100_000, False)
@example(b"9" * 5000, False)
def test_any_body_becomes_calls_or_is_refused(raw: bytes, is_chat: bool) -> None:
    refused, num_calls = None, 0
    try:
        parse = parse_chat if is_chat else parse_completion
        request = parse(raw, READER, UnknownFields(), FrontSettings())
        num_calls = len(encode_calls(request, "id"))
    except ApiError as error:
        refused = error
    assert (refused is None) == (num_calls > 0)
    if refused is not None:
        assert refused.status in (400, 404)
        assert_tells_nothing_internal(refused.message)
        assert json.dumps(refused.body).encode()
