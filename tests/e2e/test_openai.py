"""`inflight openai` in front of the real server, used with the `openai` package."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import psutil
import pytest
from support.calls import WAIT_SECONDS, assert_counts, wait_for_active
from support.front_process import FrontProcess
from support.server_process import HOST, ServeProcess, free_ports

from inflight_client.address import parse_address
from inflight_client.errors import ServerError
from inflight_client.grpc_transport import GrpcTransport, SharedStream, encode_bytes
from inflight_client.options import Request, Response

pytestmark = pytest.mark.e2e

MODEL = "demo_model"
ANSWER: dict[str, Any] = {"model": MODEL, "prompt": "1 2 3", "temperature": 0}


@pytest.fixture(scope="module")
def front(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with FrontProcess(tmp_path_factory.mktemp("front"), server.grpc_url) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: FrontProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *, is_streaming: bool, **request: Any) -> list[Any]:
    """The chunks of a completion, or the whole one as the only part."""
    answer: Any = client.completions.create(**(ANSWER | request), stream=is_streaming)
    return list(answer) if is_streaming else [answer]


def texts_of(parts: list[Any]) -> list[str]:
    """By index of the choice."""
    texts: dict[int, str] = {}
    for choice in (choice for part in parts for choice in part.choices):
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    return [texts[index] for index in sorted(texts)]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "inflight")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(**ANSWER, max_tokens=20)
    [choice] = done.choices
    assert_counts("1 2 3", choice.text, 20)
    assert choice.finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (6, 20)


def test_sampling_is_the_default(client: openai.OpenAI) -> None:
    """OpenAI's defaults; the model is so sure of itself that it takes a high temperature to see."""
    for temperature, num_different in ((0, 1), (2, 2)):
        answers = client.completions.create(
            model=MODEL, prompt=["1 2 3"] * 2, max_tokens=60, temperature=temperature
        )
        assert len({choice.text for choice in answers.choices}) == num_different


def test_completions_of_several_prompts_text_and_ids(client: openai.OpenAI) -> None:
    prompts = ["1 2 3", "50 51", "7 8 9"]
    done = client.completions.create(**(ANSWER | {"prompt": prompts}), max_tokens=12)
    for prompt, text in zip(prompts, texts_of([done]), strict=True):
        assert_counts(prompt, text, 12)
    from_ids = client.completions.create(model=MODEL, prompt=[0, 18, 224, 19], max_tokens=9)
    assert from_ids.choices[0].finish_reason == "length"


def test_a_chat_goes_through_the_template(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "1 2"},
            {"role": "assistant", "content": "3 4"},
            {"role": "user", "content": [{"type": "text", "text": "5"}]},
        ],
        max_completion_tokens=10,
        temperature=0.1,
        seed=-3,
        top_p=0.9,
        user="somebody",
    )
    assert done.choices[0].message.role == "assistant"
    assert_counts("1 2 3 4 5 ", done.choices[0].message.content or "", 10)


def test_streams_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "1 2 3"}],
            max_tokens=100,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert_counts("1 2 3 ", text, 100)
    assert len(chunks) > 5  # tokens that pile up travel together
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 107


def test_every_event_tells_the_usage_so_far(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = ask(client, is_streaming=True, max_tokens=100, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert 0 < counts[0] < 100 == counts[-1]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_an_echo_stands_before_each_answer(client: openai.OpenAI, is_streaming: bool) -> None:
    for prompt, echoes in ((["1 2 3", "50 51"], ["1 2 3", "50 51"]), ([0, 18], ["<|begin|>1"])):
        request: Any = {"prompt": prompt, "echo": True, "n": 2, "max_tokens": 12}
        texts = texts_of(ask(client, is_streaming=is_streaming, **request))
        for text, echo in zip(texts, [each for each in echoes for _ in range(2)], strict=True):
            assert text.startswith(echo)
            assert_counts(echo.removeprefix("<|begin|>"), text.removeprefix(echo), 12)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_usage_counts_the_tokens_up_to_the_end(client: openai.OpenAI, is_streaming: bool) -> None:
    """Each character is a token here."""
    endings: list[tuple[dict[str, Any], str]] = [
        ({"stop": ["nix", "9 1"]}, " 4 5 6 7 8 9 1"),  # as vLLM, with the tokens of the stop string
        ({"stop": "9 1", "n": 3}, " 4 5 6 7 8 9 1"),
        ({"extra_body": {"stop_token_ids": [24]}}, " 4 5 6 "),  # "7"
        ({"logit_bias": {"1": 100}}, ""),  # the end id
        ({"stop": "nix"}, " 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 "),
    ]
    options = {"stream_options": {"include_usage": True}} if is_streaming else {}
    for ending, text in endings:
        *_, done = ask(client, is_streaming=is_streaming, max_tokens=40, **ending, **options)
        assert done.usage.completion_tokens == len(text) * ending.get("n", 1)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_stop_strings(client: openai.OpenAI, is_streaming: bool) -> None:
    request: Any = {"is_streaming": is_streaming, "max_tokens": 40, "stop": ["nix", "9 1"]}
    parts = ask(client, **request)
    assert texts_of(parts) == [" 4 5 6 7 8 "]
    assert parts[-1].choices[0].finish_reason == "stop"
    own = {"include_stop_str_in_output": True, "return_token_ids": True}
    parts = ask(client, **request, extra_body=own)
    assert texts_of(parts) == [" 4 5 6 7 8 9 1"]
    choices = [part.choices[0] for part in parts]
    ids = [token for each in choices for token in getattr(each, "token_ids", None) or ()]
    assert len(ids) == len(" 4 5 6 7 8 9 1")  # each character is a token here
    assert choices[0].prompt_token_ids[0] == 0  # <|begin|>
    exact = ask(client, **(request | {"stop": " 5", "max_tokens": 4}), extra_body=own)
    assert texts_of(exact) == [" 4 5"]
    assert exact[-1].choices[0].finish_reason == "stop"


def test_several_answers_with_log_probabilities(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "1 2 3"}],
        max_tokens=8,
        n=3,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
        frequency_penalty=0.0,
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    for choice in done.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        text = choice.message.content
        assert "".join(row.token for row in choice.logprobs.content) == text
        assert all(-1.0 < row.logprob <= 0.0 for row in choice.logprobs.content)
        for row in choice.logprobs.content:  # greedy: what was drawn is the likeliest
            best, second = row.top_logprobs
            assert (best.token, best.logprob) == (row.token, row.logprob)
            assert second.logprob < best.logprob
        assert_counts("1 2 3 ", text or "", 8)
    assert done.usage is not None
    assert done.usage.completion_tokens == 24


def test_the_best_of_several_answers(client: openai.OpenAI) -> None:
    """The likeliest by token, of each prompt; all of them count."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["1 2 3", "7 8"], "max_tokens": 9}
    asked |= {"temperature": 2, "seed": 3, "logprobs": 0}
    every = client.completions.create(**asked, n=4)
    best = client.completions.create(**asked, n=2, best_of=4)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage == every.usage

    def likelihood(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs)) / len(choice.logprobs.token_logprobs)

    for place in (0, 1):
        likeliest = sorted(every.choices[4 * place : 4 * place + 4], key=likelihood)[:1:-1]
        shown = best.choices[2 * place : 2 * place + 2]
        assert [each.text for each in shown] == [each.text for each in likeliest]


COMBINED: dict[str, list[dict[str, Any]]] = {
    "n": [{}, {"n": 2}],
    "log probs": [{}, {"logprobs": 0}, {"logprobs": 2}],
    "stop": [{}, {"stop": "5"}, {"stop": ["5", " 12"]}],
    "draw": [{"temperature": 0}, {"temperature": 1.5, "seed": 7}, {"seed": -5, "top_p": 0.9}],
    "bias": [{}, {"logit_bias": {"24": 4}}],
    "usage": [{}, {"stream_options": {"include_usage": True}}],
}


@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_settings_in_every_combination(client: openai.OpenAI, is_chat: bool) -> None:
    """What the SDK can send: a stream says what the whole answer says."""
    for several in itertools.product(*COMBINED.values()):
        settings: dict[str, Any] = {key: value for each in several for key, value in each.items()}
        options = {name: settings.pop(name) for name in ("stream_options",) if name in settings}
        settings |= {"model": MODEL, "max_tokens": 6}
        if is_chat:
            settings |= {"messages": [{"role": "user", "content": "1 2 3"}]}
            if "logprobs" in settings:
                settings |= {"logprobs": True, "top_logprobs": settings["logprobs"]}
        else:
            settings |= {"prompt": "1 2 3"}
        call: Any = client.chat.completions.create if is_chat else client.completions.create
        if "seed" not in settings and settings["temperature"]:
            continue
        whole = call(**settings)
        chunks = list(call(**settings, **options, stream=True))
        assert (chunks[-1].usage is not None) == bool(options), settings
        if options:
            assert chunks.pop().usage.completion_tokens == whole.usage.completion_tokens
        for choice in whole.choices:
            own = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
            texts = [(part.delta.content if is_chat else part.text) or "" for part in own]
            text = choice.message.content if is_chat else choice.text
            assert "".join(texts) == text, settings
            assert own[-1].finish_reason == choice.finish_reason, settings
            assert (choice.logprobs is not None) == ("logprobs" in settings), settings
            if choice.logprobs is not None:
                name = "content" if is_chat else "token_logprobs"
                told = [
                    row for part in own if part.logprobs for row in getattr(part.logprobs, name)
                ]
                rows = getattr(choice.logprobs, name)
                assert len(told) == len(rows), settings


def test_streams_of_several_answers(client: openai.OpenAI) -> None:
    request: Any = {"prompt": ["1 2 3", "50 51"], "n": 2, "max_tokens": 12, "logprobs": 1}
    chunks = ask(client, is_streaming=True, **request)
    tokens = [""] * 4
    for choice in (chunk.choices[0] for chunk in chunks):
        if choice.logprobs is not None:
            tokens[choice.index] += "".join(choice.logprobs.tokens or ())
            likeliest = [token for row in choice.logprobs.top_logprobs or () for token in row]
            assert likeliest == choice.logprobs.tokens
    assert texts_of(chunks) == tokens
    for prompt, text in zip(["1 2 3", "1 2 3", "50 51", "50 51"], tokens, strict=True):
        assert_counts(prompt, text, 12)


def test_concurrent_streams_do_not_mix(front: FrontProcess, server: ServeProcess) -> None:
    async def one(client: openai.AsyncOpenAI, first: int) -> None:
        prompts = [f"{first} {first + 1} ", f"{first + 500} {first + 501} "]
        stream = await client.completions.create(
            model=MODEL, prompt=prompts, max_tokens=60, temperature=0, stream=True
        )
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        for prompt, text in zip(prompts, texts, strict=True):
            assert_counts(prompt, text, 60)

    async def all_of_them() -> None:
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none") as client:
            await asyncio.gather(*(one(client, 1000 + 10 * i) for i in range(16)))

    asyncio.run(all_of_them())
    wait_for_active(server, 0)


def test_a_shared_stream_brings_what_own_streams_bring(server: ServeProcess) -> None:
    """Each kind of tensor, an error, and one that is given up; while others go on."""
    values = {"input_lengths": 4, "request_output_len": 40, "streaming": True}
    outputs = ("text_output", "output_ids", "sequence_length", "output_log_probs", "finish_reason")

    def call(first: int, request_id: str, **more: Any) -> bytes:
        own = {"input_ids": [0, 18, first, 19], "return_log_probs": True, **values, **more}
        return encode_bytes(Request(own, outputs, request_id))

    async def read(responses: AsyncGenerator[Response, None]) -> dict[str, list[Any]]:
        read: dict[str, list[Any]] = {name: [] for name in outputs}
        async with aclosing(responses):
            async for response in responses:
                for name, found in response.tensors.items():
                    read[name] += found
        counts, reasons = read.pop("sequence_length"), read.pop("finish_reason")
        return {**read, "text_output": ["".join(read["text_output"])], "last": reasons[-1:]} | {
            "count": [sum(counts)]
        }

    async def run() -> None:
        transport = GrpcTransport(parse_address(server.grpc_url, "grpc"))
        shared = SharedStream(transport)
        assert await shared.is_open(WAIT_SECONDS)
        calls = [call(200 + i, "") for i in range(6)]
        given_up = shared.receive(call(220, "given-up", request_output_len=8000), None)
        await anext(given_up)
        refused = read(shared.receive(call(220, "", beam_width=0), None))
        *together, error = await asyncio.gather(
            *(read(shared.receive(each, None)) for each in calls), refused, return_exceptions=True
        )
        assert isinstance(error, ServerError)
        assert "beam_width" in str(error)
        assert shared.is_usable, "no answer has come on an own stream"
        await given_up.aclose()
        assert not shared.is_usable, "that was the last one"
        alone = [await read(transport.infer_encoded(each, None).receive()) for each in calls]
        assert together == alone
        assert alone[0]["count"] == [40]
        await transport.close()

    asyncio.run(run())
    wait_for_active(server, 0)


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("num_prompts", [1, 3, 9])
def test_a_client_that_leaves_ends_its_request_on_the_server(
    front: FrontProcess, server: ServeProcess, is_streaming: bool, num_prompts: int
) -> None:
    before = wait_for_active(server, 0)["Iteration Counter"]
    body = {"prompt": ["1 2 3"] * num_prompts, "max_tokens": 8000, "stream": is_streaming}
    raw = json.dumps(ANSWER | body).encode()
    with socket.create_connection((HOST, front.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        if is_streaming:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        wait_for_active(server, num_prompts)
    assert wait_for_active(server, 0)["Iteration Counter"] - before < 8000, "it ran to its end"


BAD_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}


def test_response_format_is_kept(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": [1, 22, 333]}, "is_good": {"type": "boolean"}},
        "required": ["size", "is_good"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    own = {"response_format": wanted}
    [answer] = ask(client, is_streaming=False, max_tokens=300, extra_body=own)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].text), schema)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"prompt": [999_999]}, 400, "prompt"),  # judged by the server
        ({"min_tokens": 50}, 400, "min_tokens"),
        ({"response_format": BAD_SCHEMA}, 400, "response_format"),
        ({"model": "other"}, 404, "model"),  # judged by the front
        ({"temperature": 9}, 400, "temperature"),
        ({"mirostat": 2}, 400, "mirostat"),
        ({"guided_regex": "("}, 400, "guided_regex"),
    ],
)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_bad_request_names_its_field_and_affects_no_other(
    client: openai.OpenAI, fields: dict[str, Any], status: int, param: str, is_streaming: bool
) -> None:
    body = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 8, "stream": is_streaming, **fields}
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/completions", cast_to=object, body=body)
    assert (caught.value.status_code, caught.value.param) == (status, param)
    assert caught.value.type == "invalid_request_error"
    assert client.completions.create(model=MODEL, prompt="1 2", max_tokens=2).choices


@pytest.mark.parametrize("is_streaming", [False, True])
def test_skip_special_tokens(client: openai.OpenAI, is_streaming: bool) -> None:
    for skips, text in ((True, ""), (False, "<|begin|>" * 2)):
        request: Any = {"max_tokens": 2, "logit_bias": {"0": 100}}
        request["extra_body"] = {"skip_special_tokens": skips}
        assert texts_of(ask(client, is_streaming=is_streaming, **request)) == [text]


@pytest.mark.fast(1)  # test_guided.py has the others
@pytest.mark.parametrize(
    ("guide", "text"),
    [
        ({"guided_choice": ["yes.", "no"]}, "(yes\\.|no)"),
        ({"guided_regex": "[7-9]{3}"}, "[7-9]{3}"),
        ({"guided_grammar": 'root ::= "a" [bc]'}, "a[bc]"),
        ({"structured_outputs": {"json": {"enum": ["x", "yy"]}}}, '"(x|yy)"'),
    ],
)
def test_guides_as_vllm_has_them(client: openai.OpenAI, guide: dict[str, Any], text: str) -> None:
    request: Any = {"model": MODEL, "max_tokens": 9, "extra_body": guide}
    assert re.fullmatch(text, client.completions.create(prompt="1", **request).choices[0].text)
    messages: Any = [{"role": "user", "content": "1"}]
    chat = client.chat.completions.create(messages=messages, **request)
    assert re.fullmatch(text, chat.choices[0].message.content or "")


@pytest.mark.slow
def test_limits_and_a_stop_that_lets_running_answers_finish(
    server: ServeProcess, tmp_path: Path
) -> None:
    options = ["--max-requests=1", "--max-body-bytes=2048", "--served-model-name=mine"]
    body = ANSWER | {"model": "mine", "max_tokens": 300, "stream": True}
    with (
        FrontProcess(tmp_path, server.grpc_url, options) as front,
        httpx.Client(base_url=front.url, trust_env=False, timeout=WAIT_SECONDS) as http,
    ):
        assert http.get("/v1/models").json()["data"][0]["id"] == "mine"
        assert http.get("/health").status_code == 200
        large = http.post("/v1/completions", json={**body, "prompt": "1" * 3000})
        assert (large.status_code, large.json()["error"]["param"]) == (413, None)
        with http.stream("POST", "/v1/completions", json=body) as running:
            assert running.status_code == 200
            refused = http.post("/v1/completions", json=body)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            front.process.send_signal(signal.SIGTERM)
            received = list(running.iter_lines())
        assert front.process.wait(timeout=WAIT_SECONDS) == 0
    assert received[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in received if "{" in line]
    assert_counts("1 2 3", "".join(event["choices"][0]["text"] for event in events), 300)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def wait_until_not_ready(http: httpx.Client) -> None:
    """The model polls for a stop ten times a second."""
    deadline = time.monotonic() + WAIT_SECONDS
    while http.get("/health").status_code == httpx.codes.OK:
        assert time.monotonic() < deadline, "the front calls a draining server ready"


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", [1, 5])  # more than two share a stream
def test_a_missing_a_draining_and_a_killed_server(
    tmp_path: Path, serve: Any, num_prompts: int
) -> None:
    [unused] = free_ports(1)
    failed = FrontProcess(tmp_path, f"{HOST}:{unused}")
    assert failed.process.wait(timeout=WAIT_SECONDS) == 1
    assert f"no server answers at grpc://{HOST}:{unused}" in failed.output
    own = serve()
    body = ANSWER | {"max_tokens": 8000, "stream": True, "prompt": ["1 2 3"] * num_prompts}
    with (
        FrontProcess(tmp_path, own.grpc_url) as front,
        httpx.Client(base_url=front.url, trust_env=False, timeout=WAIT_SECONDS) as http,
    ):
        with http.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()
            assert next(lines).startswith("data: {")
            own.process.send_signal(signal.SIGTERM)
            wait_until_not_ready(http)
            asked = subprocess.run(
                [Path(sys.executable).parent / "inflight", "health", f"--url={own.grpc_url}"],
                capture_output=True,
                text=True,
            )
            assert (asked.returncode, asked.stdout.partition(":")[0]) == (1, "not ready")
            assert "data: {" in "".join(next(lines) for _ in range(2)), "the stream goes on"
            own.kill_tritonserver()
            last = [line for line in lines if line]
        assert json.loads(last[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert last[-1] == "data: [DONE]"
        gone = http.post("/v1/completions", json=body)
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "server_unreachable")
        assert str(own.grpc_port) not in gone.text
        assert http.get("/health").status_code == 503


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "date"}},
]
QUESTION: Any = {"model": MODEL, "messages": [{"role": "user", "content": "1 2"}], "tools": TOOLS}


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_tool_is_called(
    client: openai.OpenAI, choice: Any, reason: str, is_streaming: bool
) -> None:
    """And its result goes back to the model. The demo model only counts: its guide calls."""
    asked = QUESTION | {"tools": TOOLS[:1], "tool_choice": choice, "parallel_tool_calls": False}
    done: Any
    if is_streaming:
        with client.chat.completions.stream(**asked) as stream:
            deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
            done = stream.get_final_completion().choices[0]
        assert len(deltas) > 1
    else:
        done = client.chat.completions.create(**asked).choices[0]
    assert (done.finish_reason, done.message.content) == (reason, None)
    [call] = done.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    result = {"role": "tool", "tool_call_id": call.id, "content": "3 4 5"}
    messages = [*QUESTION["messages"], done.message.model_dump(), result]
    again = client.chat.completions.create(
        **(QUESTION | {"messages": messages}), tool_choice="none", max_tokens=9, temperature=0
    )
    assert again.choices[0].message.content


def test_a_schema_of_a_tool_that_cannot_be_followed_is_named(client: openai.OpenAI) -> None:
    function = {"name": "f", "parameters": {"type": "object", "minProperties": -1}}
    tools = [{"type": "function", "function": function}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**(QUESTION | {"tools": tools}), tool_choice="required")
    assert caught.value.param == "tools"


def test_responses(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "temperature": 0}
    done = client.responses.create(input="1 2 3", max_output_tokens=20, **asked)
    assert_counts("1 2 3 ", done.output_text, 20)
    assert (done.status, done.usage and done.usage.output_tokens) == ("incomplete", 20)
    stop = {"stop": ["12"]}
    with client.responses.stream(input="1 2 3", extra_body=stop, **asked) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "4 5 6 7 8 9 10 11 "
    form: Any = {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}
    guided = client.responses.create(input="1 2", text={"format": form}, **asked)
    jsonschema.validate(json.loads(guided.output_text), WEATHER)
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    called: Any = client.responses.create(
        input="1 2", tools=tools, tool_choice="required", parallel_tool_calls=False, **asked
    )
    [call] = called.output
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3 4 5"}
    again: Any = [{"role": "user", "content": "1 2"}, *called.output, result]
    assert client.responses.create(input=again, max_output_tokens=9, **asked).output_text
    with pytest.raises(openai.NotFoundError, match="embeddings need a model made for them"):
        client.embeddings.create(model=MODEL, input="1")


def test_usage_tells_how_much_of_a_prompt_was_cached(client: Any) -> None:
    """Whole answers, streams, several answers (the prompt counts once), and responses."""
    prompt = " ".join(map(str, range(300, 360)))  # which no other test asks
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    cached = []
    for more in ({}, {}, {"n": 2}):
        usage = client.completions.create(**asked, **more).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    *_, last = ask(client, is_streaming=True, **asked, stream_options={"include_usage": True})
    cached.append(last.usage.prompt_tokens_details.cached_tokens)
    assert usage.prompt_tokens > 200
    assert cached[0] < 100 < cached[1] < usage.prompt_tokens
    assert cached[1:] == cached[1:2] * 3
    responses = [
        client.responses.create(model=MODEL, input=prompt[::-1], max_output_tokens=2)
        for _ in range(2)
    ]
    first, again = (
        each.usage.input_tokens_details.cached_tokens for each in responses if each.usage
    )
    assert first < 100 < again


def test_tokens_of_a_text_and_back(front: FrontProcess) -> None:
    with httpx.Client(base_url=front.url, trust_env=False) as http:
        for body in ({"prompt": "1 2 3"}, {"messages": QUESTION["messages"]}):
            told = http.post("/tokenize", json={**body, "return_token_strs": True}).json()
            assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) > 3
            assert "1" in told["token_strs"]
            text = http.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]
            assert text.startswith("1 2")
        wrong = http.post("/detokenize", json={"tokens": [10**6]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
        listed = http.get("/v1/models").json()["data"][0]
        assert listed["max_model_len"] == told["max_model_len"]


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(
    ("num_top", "prompt", "num_unseen"),
    [
        (0, "1 2 3 4", 1),  # the token that begins a text
        (2, [18, 0, 18, 222, 19, 222, 20, 222, 21], 0),
    ],
)
def test_a_prompt_is_scored(
    client: openai.OpenAI, is_streaming: bool, num_top: int, prompt: Any, num_unseen: int
) -> None:
    """What `lm_eval` asks: log probabilities of the prompt, and nothing new; equal to those of the
    same tokens as an answer."""
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    tops: list[Any] = []
    asked = {"prompt": prompt, "echo": True, "logprobs": num_top, "max_tokens": 0}
    parts = ask(client, is_streaming=is_streaming, **asked)
    for part in parts:
        rows = part.choices[0].logprobs
        for name, values in told.items():
            values += getattr(rows, name) if rows is not None else []
        tops += (rows and rows.top_logprobs) or []
    [text], seen = texts_of(parts), told["tokens"][num_unseen:]
    assert "".join(seen) == text
    for token, offset in zip(seen, told["text_offset"][num_unseen:], strict=True):
        assert text[offset:].startswith(token)
    first, *others = told["token_logprobs"]
    assert first is None
    assert len(tops) == (len(told["tokens"]) if num_top else 0)
    assert all(len(top) in (2, 3) for top in tops[1:])
    done = client.completions.create(**ANSWER | {"prompt": prompt[:-2]}, max_tokens=2, logprobs=0)
    [choice] = done.choices
    assert choice.text == " 4"
    assert choice.logprobs is not None
    assert others[-2:] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)


def test_vllm_s_prompt_logprobs(client: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 1}
    done: Any = client.completions.create(**ANSWER, max_tokens=1, extra_body=extra)
    first, *others = done.choices[0].prompt_logprobs
    assert first is None
    assert len(others) == 5
    for row in others:
        assert {"logprob", "rank", "decoded_token"} == set(next(iter(row.values())))
    chat: Any = client.chat.completions.create(
        model=MODEL, messages=QUESTION["messages"], max_tokens=1, extra_body=extra
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs: not in a stream"):
        ask(client, is_streaming=True, extra_body=extra)


def wait_until_answered(sdk: openai.OpenAI) -> None:
    """Return when a completion is answered: fail if none is for too long."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            done = sdk.completions.create(**ANSWER, max_tokens=9)
        except (openai.APIConnectionError, openai.InternalServerError):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            continue
        assert_counts("1 2 3", done.choices[0].text, 9)
        return


def ask_often(sdk: openai.OpenAI) -> None:
    """Until a request is refused: the model polls for a stop ten times a second."""
    for _ in range(1000):
        sdk.completions.create(**ANSWER, max_tokens=9)


@pytest.mark.slow
def test_one_command_serves_it_with_a_key(serve: Any) -> None:
    """And its process is started again when it dies; one of the server's changes nothing."""
    [port] = free_ports(1)
    options = [f"--openai-port={port}", "--allow-origin=https://a.example"]
    own = serve(options=options, environment={"INFLIGHT_API_KEY": "s3cret"})
    base = f"http://{HOST}:{port}/v1"
    assert f"OpenAI     {base}" in own.stdout
    assert "s3cret" not in own.stdout + own.stderr
    for key in ("none", "s3cre", "s3cret2", "\u00fc"):
        headers = {b"Authorization": f"Bearer {key}".encode()}
        refused = httpx.get(f"{base}/models", headers=headers, trust_env=False)
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    page = {"Origin": "https://a.example"}
    healthy = httpx.get(f"http://{HOST}:{port}/health", headers=page, trust_env=False)
    assert healthy.status_code == 200
    assert healthy.headers["Access-Control-Allow-Origin"] == page["Origin"]
    with openai.OpenAI(base_url=base, api_key="s3cret", max_retries=0) as sdk:
        wait_until_answered(sdk)
        [front] = [
            child.pid
            for child in psutil.Process(own.process.pid).children()
            if "openai" in child.cmdline()
        ]
        os.kill(front, signal.SIGKILL)
        own.wait_until_printed("OpenAI's API ended: killed by SIGKILL; starting it again now")
        wait_until_answered(sdk)
        own.kill_model()
        own.wait_until_printed("ready again")
        wait_until_answered(sdk)
        assert own.stderr.count("OpenAI's API ended") == 1
        with sdk.completions.create(**ANSWER, max_tokens=2000, stream=True) as running:
            chunks = iter(running)
            text = next(chunks).choices[0].text
            own.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.InternalServerError) as caught:
                ask_often(sdk)
            assert caught.value.status_code == httpx.codes.SERVICE_UNAVAILABLE
            assert caught.value.response.headers["Retry-After"] == "1"
            text += "".join(chunk.choices[0].text for chunk in chunks)
        assert_counts("1 2 3", text, 2000)
    assert own.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--openai-port={taken}"], "--openai-port {taken} cannot be used on 127.0.0.1"),
        (["--api-key-file=/nowhere"], "--api-key-file /nowhere cannot be read: No such file"),
        (["--chat-template=/nowhere"], "OpenAI's API could not start: --chat-template /nowhere"),
    ],
)
def test_one_command_names_what_is_wrong_with_it(
    serve: Any, options: list[str], words: str
) -> None:
    with socket.create_server((HOST, 0)) as listening:
        taken = listening.getsockname()[1]
        ports = [f"--openai-port={free_ports(1)[0]}", *options]
        own = serve(options=[each.format(taken=taken) for each in ports], wait_for="")
        assert own.wait() == 1
    assert words.format(taken=taken) in own.stderr
