"""Bodies of requests to jobs: what is honoured, forwarded by tensor name, or refused by name."""

from __future__ import annotations

import bisect
import json
from pathlib import Path
from typing import Any

import pytest
from client.openai.front import DESCRIPTION

from inflight_client.errors import InvalidArgument, ServerError
from inflight_openai.errors import TENSOR_TO_FIELD, ApiError, from_upstream
from inflight_openai.fields import Body
from inflight_openai.parsing import GenerationJob, parse_chat, parse_completion
from inflight_openai.prompts import PromptReader, make_prompt_reader
from inflight_openai.upstream import make_calls
from inflight_protocol import INPUT_BY_NAME, OUTPUT_BY_NAME


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    return make_prompt_reader(DESCRIPTION, None, None)


def completion(reader: PromptReader, **fields: Any) -> GenerationJob:
    body = {"model": "demo", "prompt": "1 2", **fields}
    return parse_completion(Body(json.dumps(body).encode()), reader)


def chat(reader: PromptReader, **fields: Any) -> GenerationJob:
    body = {"model": "demo", "messages": [{"role": "user", "content": "1 2"}], **fields}
    return parse_chat(Body(json.dumps(body).encode()), reader, None)


def test_a_completion_with_nothing_but_a_prompt(reader: PromptReader) -> None:
    job = completion(reader)
    assert [len(prompt) for prompt in job.prompts] == [4]  # <|begin|> and a token per byte
    assert (job.max_tokens, job.num_answers, job.is_streaming) == (16, 1, False)
    assert job.values == {"end_id": 1, "runtime_top_p": 1.0}  # it draws


def test_a_chat_takes_all_the_room_there_is(reader: PromptReader) -> None:
    job = chat(reader)
    assert len(job.prompts[0]) == 5  # the template writes <|begin|> itself: it is there once
    assert job.max_tokens == 95
    assert chat(reader, max_tokens=7).max_tokens == 7
    assert chat(reader, max_completion_tokens=8).max_tokens == 8
    assert chat(reader, max_completion_tokens=8, max_tokens=7).max_tokens == 8  # the newer name
    assert completion(reader, max_completion_tokens=8, max_tokens=7).max_tokens == 8


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5}, {"runtime_top_p": 0.5}),
        ({"top_p": 0}, {"runtime_top_p": 1e-6}),  # the likeliest; the server's 0 leaves all
        ({"top_k": 5}, {"runtime_top_k": 5}),
        ({"top_k": -1}, {"runtime_top_k": 0}),
        ({"min_tokens": 2}, {"min_length": 2}),
        ({"seed": 7}, {"random_seed": 7}),
        ({"seed": -1}, {"random_seed": 2**64 - 1}),
        ({"sampling_seed": 7}, {"random_seed": 7}),  # SGLang's
        ({"seed": 8, "sampling_seed": 7}, {"random_seed": 8}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"bad_words": ["x"]}, {"bad_words": ["x"]}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        # On the wire penalties count the prompt as well, and weigh whatever the temperature is.
        ({"presence_penalty": -2}, {"presence_penalty": -2.0, "prompt_ignore_length": 2**31 - 1}),
        (
            {"frequency_penalty": 0.5, "presence_penalty": 0, "temperature": 2},
            {
                "frequency_penalty": 0.25,
                "presence_penalty": 0.0,
                "temperature": 2.0,
                "prompt_ignore_length": 2**31 - 1,
            },
        ),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"min_p": 0.1, "cache_salt": "me"}, {"min_p": 0.1, "cache_salt": "me"}),
        ({"stop": "x"}, {"stop_words": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop_words": ["x", "y"]}),
        ({"stop": []}, {}),
        ({"n": 3}, {"num_return_sequences": 3}),
        ({"ignore_eos": True}, {"end_id": None}),
        ({"stop_token_ids": [9, 7, 9]}, {"stop_token_ids": [7, 9]}),
        ({"stop_token_ids": []}, {}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_object"}},
            {
                "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": '{"type":"object"}',
            },
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},  # instructor's
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"a":1}'},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"a":1}'},
        ),
    ],
)
def test_sampling_fields_become_tensors(
    reader: PromptReader, fields: dict[str, Any], tensors: dict[str, Any]
) -> None:
    usual = {"end_id": 1, "runtime_top_p": 1.0}
    wanted = {name: value for name, value in {**usual, **tensors}.items() if value is not None}
    for job in (completion(reader, **fields), chat(reader, **fields)):
        assert job.values == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, (False, False)),
        ({"include_usage": None, "include_obfuscation": False}, (False, False)),
        ({"include_usage": True}, (True, False)),
        # As guidellm and aiperf send them, which count tokens by the usage of each event.
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"continuous_usage_stats": True}, (False, False)),  # as vLLM has it
    ],
)
def test_what_a_stream_tells_of_its_usage(
    reader: PromptReader, options: dict[str, Any], wanted: tuple[bool, bool]
) -> None:
    for job in (
        completion(reader, stream=True, stream_options=options),
        chat(reader, stream=True, stream_options=options),
    ):
        assert (job.includes_usage, job.has_running_usage) == wanted


def test_log_probabilities_of_the_chosen_tokens(reader: PromptReader) -> None:
    assert completion(reader, logprobs=0).values["return_log_probs"] is True
    assert chat(reader, logprobs=True, top_logprobs=0).has_log_probs
    assert not chat(reader, logprobs=False).has_log_probs
    assert chat(reader, logprobs=True, top_logprobs=5).values["num_top_log_probs"] == 5
    assert completion(reader, logprobs=3).num_top_log_probs == 3
    assert "num_top_log_probs" not in completion(reader, logprobs=0).values


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": "other"}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", {}]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"max_tokens": 10**4000}, "max_tokens"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 101}, "truncate_prompt_tokens"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"bad_words": "x"}, "bad_words"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"metadata": "m"}, "metadata"),
        ({"store": 1}, "store"),
        ({"messages": [{}]}, "messages"),  # of the other call
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": []}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"user": 5}, "user"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ],
)
def test_a_bad_field_of_a_completion_is_named(
    reader: PromptReader, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        completion(reader, **fields)
    assert caught.value.param == param
    assert caught.value.status == (404 if fields == {"model": "other"} else 400)
    assert param in caught.value.message or param == "model"
    assert len(caught.value.message) < 100


def test_a_schema_that_could_just_be_read_may_be_too_deep_to_be_passed_on(
    reader: PromptReader,
) -> None:
    def body(depth: int) -> bytes:
        schema = '{"a":' * depth + "1" + "}" * depth
        guide = f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}'
        return f'{{"model":"demo","prompt":"1","response_format":{guide}}}'.encode()

    def is_too_deep(depth: int) -> bool:
        try:
            Body(body(depth))
        except ApiError:
            return True
        return False

    def refusal(content: Body, num_frames: int) -> ApiError | None:
        if num_frames:
            return refusal(content, num_frames - 1)
        try:
            parse_completion(content, reader)
        except ApiError as error:
            return error
        return None

    deepest = bisect.bisect_left(range(100_000), True, key=is_too_deep) - 1
    error = refusal(Body(body(deepest)), 50)
    if error:  # from Python 3.12 on frames do not count there
        assert "nested too deeply" in error.message
        assert (error.status, error.param) == (400, "response_format")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{}] * 4097}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"prompt": "x"}, "prompt"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
def test_a_bad_field_of_a_chat_is_named(
    reader: PromptReader, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(reader, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_what_is_missing_is_called_nothing(reader: PromptReader) -> None:
    for message, field in (({"role": "user", "content": None}, "content"), ({}, "role")):
        with pytest.raises(
            ApiError, match=f"messages\\[0\\].{field}: expected a string, got nothing"
        ):
            chat(reader, messages=[message])


def test_a_chat_names_variables_of_the_template(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ bos_token if enable_thinking else self_made }}")
    reader = make_prompt_reader(DESCRIPTION, None, path)
    assert chat(reader, chat_template_kwargs={"enable_thinking": True}).prompts == ((0,),)
    named = {"enable_thinking": False, "self_made": "12", "self": 1, "bos_token": ""}
    assert len(chat(reader, chat_template_kwargs=named).prompts[0]) == 2
    with pytest.raises(ApiError, match="no valid Unicode"):
        chat(reader, chat_template_kwargs={"self_made": "\ud800"})


def test_parts_of_text_are_one_text(reader: PromptReader) -> None:
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    joined = chat(reader, messages=[{"role": "user", "content": parts}])
    assert joined.prompts == chat(reader, messages=[{"role": "user", "content": "1\n2"}]).prompts


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000, b'{"n": 1, "n": 2}']
)
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError, match="body"):
        Body(raw)


def test_a_model_without_a_template_refuses_chats_only() -> None:
    files = {"tokenizer.json": DESCRIPTION["files"]["tokenizer.json"]}  # type: ignore[index]
    bare = make_prompt_reader({**DESCRIPTION, "files": files}, "mine", None)
    body = {"model": "mine", "prompt": "1"}
    assert parse_completion(Body(json.dumps(body).encode()), bare).prompts
    with pytest.raises(ApiError, match="--chat-template"):
        chat(bare, model="mine")


def test_what_a_model_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no tokenizer\.json"):
        make_prompt_reader({**DESCRIPTION, "files": {}}, None, None)
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json of the server"):
        make_prompt_reader({**DESCRIPTION, "files": {"tokenizer.json": "{}"}}, None, None)
    with pytest.raises(InvalidArgument, match="--chat-template"):
        make_prompt_reader(DESCRIPTION, None, tmp_path / "none.jinja")


def test_logit_bias_is_a_bias_for_every_token(reader: PromptReader) -> None:
    bias: Any = completion(reader, logit_bias={"5": -100, "257": 0.5}).values["embedding_bias"]
    assert (bias.shape, bias.dtype) == ((258,), "float32")
    assert (bias[5], bias[257], abs(bias).sum()) == (-100, 0.5, 100.5)


def test_an_echo_is_the_prompt_as_it_was_sent(reader: PromptReader) -> None:
    assert completion(reader, echo=True).echoes == ("1 2",)
    ids = reader.encode("3 4", "prompt", add_special_tokens=True)
    assert completion(reader, prompt=ids, echo=True).echoes == ("3 4",)
    assert completion(reader, prompt=["ä", "5"], echo=True, n=2).echoes == ("ä", "5")
    assert completion(reader, echo=False).echoes == ()


def test_every_prompt_is_a_request_of_its_own(reader: PromptReader) -> None:
    job = completion(reader, prompt=["1", "2"], n=2, logprobs=0, stream=True)
    calls = make_calls(job, "id")
    assert [call.request_id for call in calls] == ["id-0", "id-1"]
    for call in calls:
        assert set(call.values) <= set(INPUT_BY_NAME)
        assert set(call.outputs) <= set(OUTPUT_BY_NAME)
        assert call.values["streaming"] is True
        assert "sequence_index" in call.outputs


def test_a_feature_that_the_server_lacks_is_a_bad_request() -> None:
    error = from_upstream(ServerError("'random_seed' is not supported", "UNSUPPORTED"))
    assert (error.status, error.param) == (400, "seed")


def test_a_field_that_an_older_config_has_no_input_for_is_a_bad_request() -> None:
    """Triton names the input; other errors of its own say nothing about the request."""
    words = "unexpected inference input '{}' for model 'tensorrt_llm'"
    error = from_upstream(ServerError(words.format("stop_token_ids")))
    assert (error.status, error.param) == (400, "stop_token_ids")
    assert "its config.pbtxt, is too old" in error.message
    assert from_upstream(ServerError(words.format("what"))).status == 503


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("the prompt has 101 tokens, more than max_input_len = 99", "context_length_exceeded"),
        (
            "prompt (9 tokens) + request_output_len (99) = 108, more than max_seq_len = 100",
            "context_length_exceeded",
        ),
        (
            "prompt of 90 plus 1 output tokens needs 3 KV blocks of 32 tokens, but there are 2; "
            "ask for less or raise max_tokens_in_paged_kv_cache",
            "context_length_exceeded",
        ),
        (
            "prompt of 90 tokens exceeds max_num_tokens=60; shorten the prompt",
            "context_length_exceeded",
        ),
        ("'random_seed' is not supported", None),
    ],
)
def test_a_text_that_does_not_fit_has_the_code_and_the_words_that_clients_look_for(
    message: str, code: str | None
) -> None:
    error = from_upstream(ServerError(message, "INVALID_ARG"))
    assert error.code == code
    assert error.message.startswith("This model's maximum context length is") == bool(code)


@pytest.mark.parametrize(
    "message",
    [
        "Maximum queue size of 4096 has been reached (max_queue_size); try again later; 8 of 8 "
        "places are taken, 0 of those requests wait, and 0 of 64 KV blocks are free",
        "not started before its deadline: place 1 of 1 in the queue, and 8 of 8 places are taken, "
        "0 of those requests wait, and 0 of 64 KV blocks are free",
    ],
)
def test_a_server_that_is_full_asks_nobody_for_a_shorter_text(message: str) -> None:
    error = from_upstream(ServerError(message, "UNAVAILABLE"))
    assert (error.status, error.code) == (503, None)


def test_errors_translate_names_of_the_wire_only() -> None:
    assert set(TENSOR_TO_FIELD) <= set(INPUT_BY_NAME)
