"""Guided answers of the real server: both models and wires, n > 1, bad grammars in a crowd."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from support.calls import PeerClient, assert_counts_in_part, generate_stream, stream_text
from support.server_process import ServeProcess
from typer.testing import CliRunner

from inflight_client import InflightClient
from inflight_client.cli import app
from inflight_client.errors import ServerError

pytestmark = pytest.mark.e2e

PROMPT = "1 2 3 4"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bc"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GUIDES = {
    "json_schema": json.dumps(SCHEMA),
    "regex": r"[a-c]{2}-[0-9]{1,3}x",
    "ebnf_grammar": 'root ::= pair (", " pair)?\npair ::= [a-f] "=" [0-9]',
}


def check(guide_type: str, text: str) -> None:
    if guide_type == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif guide_type == "regex":
        assert re.fullmatch(GUIDES["regex"], text)
    else:
        assert re.fullmatch(r"[a-f]=\d(, [a-f]=\d)?", text)


def post(server: ServeProcess, model: str, **values: Any) -> httpx.Response:
    body = {"text_input": PROMPT, "max_tokens": 250, "exclude_input_in_output": True, **values}
    url = f"{server.http_url}/v2/models/{model}/generate"
    return httpx.post(url, json=body, timeout=60, trust_env=False)


@pytest.mark.contract("tensorrt_llm input", "guided_decoding_guide_type guided_decoding_guide")
@pytest.mark.contract("ensemble input", "guided_decoding_guide_type guided_decoding_guide")
@pytest.mark.parametrize("guide_type", GUIDES)
@pytest.mark.parametrize(
    "model", ["tensorrt_llm", pytest.param("ensemble", marks=pytest.mark.slow)]
)
def test_answers_parse(server: ServeProcess, model: str, guide_type: str) -> None:
    guide = {
        "guided_decoding_guide_type": guide_type,
        "guided_decoding_guide": GUIDES[guide_type],
    }
    for more in ({}, {"temperature": 2.0, "runtime_top_k" if model != "ensemble" else "top_k": 99}):
        check(guide_type, post(server, model, **guide, **more).json()["text_output"])
    check(guide_type, "".join(stream_text(server, PROMPT, 250, model=model, **guide)))


def test_python_client_command_line_and_tokens(server: ServeProcess, tmp_path: Path) -> None:
    with InflightClient(server.grpc_url) as client:
        regex = GUIDES["regex"]
        answer = client.generate(PROMPT, 40, guide_type="regex", guide=regex)
        check("regex", answer.text)
        assert answer.finish == "stop"
        by_tokens = client.generate([5, 6], 40, guide_type="regex", guide="a{3}")
        assert len(by_tokens.token_ids) == 3  # the end id is the checkpoint's
        with pytest.raises(ServerError, match="needs an 'end_id'"):
            client.generate([5], 40, guide_type="json", end_id=-1)
    file = tmp_path / "grammar"
    file.write_text(GUIDES["ebnf_grammar"] + "\n")
    arguments = ["generate", PROMPT, f"--url={server.grpc_url}", f"--guide=ebnf_grammar={file}"]
    done = CliRunner().invoke(app, arguments)
    check("ebnf_grammar", done.stdout.removesuffix("\n"))


def test_each_of_several_sequences_is_guided(server: ServeProcess) -> None:
    body: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 30, "stream": True}
    body |= {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]{6}"}
    body |= {"temperature": 3.0, "runtime_top_k": 100, "random_seed": 5}
    texts: dict[int, str] = {}
    for event in generate_stream(server, "tensorrt_llm", num_return_sequences=3, **body):
        index = event.get("sequence_index", 0)
        texts[index] = texts.get(index, "") + event["text_output"]
    assert sorted(texts) == [0, 1, 2]
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts.values()), texts
    assert len(set(texts.values())) > 1


BAD = [
    ({"guided_decoding_guide_type": "lark"}, "'guided_decoding_guide_type' is"),
    ({"guided_decoding_guide_type": "json", "guided_decoding_guide": "{}"}, "takes none"),
    ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(?=a)"}, "look-around"),
    ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "["}, "invalid regex"),
    ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "[]"}, "object"),
    ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "x"}, "EBNF"),
    ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a" * 70_000}, "65536"),
]


def test_bad_grammars_are_named_and_affect_no_other(server: ServeProcess) -> None:
    prompts = ["1 2 3", "10 11 12", "20 21 22"]
    with PeerClient(server.grpc_url) as others:
        for prompt in prompts:
            others.send(prompt, text_input=prompt, max_tokens=7000, stream=True)
        for values, message in BAD:
            answer = post(server, "ensemble", **values)
            assert answer.status_code == 400, answer.text
            assert message in answer.json()["error"]
        for prompt, text in others.stop_all(*prompts).items():
            assert_counts_in_part(prompt, text, 7000)
