"""Headers that callers want sent: keys of restricted APIs. Their values are secrets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client.conftest import Local
from client.test_cli import run, server_options

from inflight_client import AccessDenied, InflightClient, InvalidArgument
from inflight_client.headers import checked_headers, parse_headers

KEY = ("infer-key", "s3cret: of mine")
PREFIX = {"grpc": "triton-grpc-protocol-", "http": ""}
CALLS: dict[str, Callable[[InflightClient], Any]] = {
    "generate": lambda client: client.generate("count", 2),
    "stream": lambda client: list(client.stream([1], 2)),
    "stop": lambda client: client.stop("mine"),
    "stats": lambda client: list(client.stats(follow=False)),
    "why": lambda client: client.why("waiting"),
    "recording": lambda client: client.recording(),
    "health": lambda client: client.health(),
}


def key_of(local: Local) -> dict[str, str]:
    """What the server is told to want of each call now, as a client sends it."""
    local.triton.key = KEY
    return {PREFIX[local.protocol] + KEY[0]: KEY[1]}


def call(name: str, local: Local, headers: dict[str, str] | None) -> Any:
    with InflightClient(local.url, protocol=local.protocol, headers=headers) as client:
        return CALLS[name](client)


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_them(name: str, local: Local) -> None:
    headers = key_of(local)
    assert call(name, local, headers) is not False
    for wrong in (None, dict.fromkeys(headers, "another")):
        with pytest.raises(AccessDenied, match=f"'{next(iter(headers))}'. Send it with headers="):
            call(name, local, wrong)


def test_the_question_to_triton_itself_has_them(local: Local) -> None:
    """Of a model that does not know ours."""
    with InflightClient(local.url, "foreign", local.protocol, headers=key_of(local)) as client:
        assert client.health()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate count", "stop a", "stats", "why a", "health"])
def test_the_command_line_takes_them(command: str, local: Local, tmp_path: Path) -> None:
    [(name, value)] = key_of(local).items()
    file = tmp_path / "headers"
    file.write_text(f"\n{name}: {value}\n")
    words = [*command.split(), *server_options(local)]
    for option in (f"--header={name}: {value}", f"-H{name}:{value}", f"-H@{file}"):
        assert run(*words, option).exit_code == 0
    refused = run(*words, f"-H{name}: {value}?")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "is restricted, expecting header" in refused.stderr
    assert value not in refused.stderr


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"a key": "s3cret"}, "a name consists of letters"),
        ({"key=s3cret": ""}, "a name consists of letters"),
        ({"Content-Type": "s3cret"}, '"Content-Type" is not for callers to set'),
        ({"grpc-timeout": "s3cret"}, '"grpc-timeout" is not for callers to set'),
        ({"key-bin": "s3cret"}, '"key-bin" is not for callers to set'),
        ({"key": "s3cret\r\nhost: x"}, 'the value of "key" must be ASCII text'),
        ({"key": "s3cret\u00e9"}, 'the value of "key" must be ASCII text'),
        ({"key": ""}, 'the value of "key" must be ASCII text'),
    ],
)
def test_what_no_wire_carries_is_refused(headers: dict[str, str], message: str) -> None:
    with pytest.raises(
        InvalidArgument, match=f"^headers: .*{message}|^headers: {message}"
    ) as caught:
        InflightClient("127.0.0.1:1", headers=headers)
    assert "s3cret" not in str(caught.value)
    assert checked_headers({"A-key_1.x": "a: b"}) == (("A-key_1.x", "a: b"),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["key=s3cret"], 'write "NAME: VALUE", or @FILE'),
        (["key: s3cret", "key: other"], "the same name is given twice"),
        (["@nowhere/s"], "nowhere/s cannot be read: No such file or directory"),
    ],
)
def test_bad_arguments_are_told_without_their_values(arguments: list[str], message: str) -> None:
    done = run("health", *(f"-H{argument}" for argument in arguments))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: --header: {message}")
    assert "s3cret" not in done.stderr
    assert parse_headers(None) == {}
