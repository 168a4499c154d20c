"""Headers that go with every call: the key of Triton's restricted APIs, or of a gateway before it.

A value is a secret: no message holds one, nor a name that is none and may be part of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from inflight_client.errors import AccessDenied, InvalidArgument

Headers = tuple[tuple[str, str], ...]
"""Name and value of each, fit for both wires."""

_NAME = re.compile(r"[0-9A-Za-z_.-]{1,200}")
_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_OWN = frozenset(
    {"connection", "content-length", "content-type", "host", "te", "transfer-encoding"}
)
_DENIED = re.compile(r"is restricted, expecting header")


def checked_headers(headers: Mapping[str, str] | None) -> Headers:
    """``headers`` as they are sent; `InvalidArgument` for what no server would get."""
    checked = tuple((headers or {}).items())
    for name, value in checked:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgument("headers: a name consists of letters, digits, -, _ and dots.")
        low = name.lower()
        if low in _OWN or low.startswith("grpc-") or low.endswith("-bin"):
            raise InvalidArgument(f'headers: "{name}" is not for callers to set.')
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise InvalidArgument(
                f'headers: the value of "{name}" must be ASCII text without blanks at its ends.'
            )
    return checked


def parse_headers(arguments: Iterable[str] | None) -> dict[str, str]:
    """``NAME: VALUE`` of the command line, or ``@FILE`` with a line for each, as curl has them."""
    headers: dict[str, str] = {}
    for line in _lines(arguments or ()):
        name, has_colon, value = line.partition(":")
        if not has_colon:
            raise InvalidArgument('--header: write "NAME: VALUE", or @FILE with a line for each.')
        if name.strip() in headers:
            raise InvalidArgument("--header: the same name is given twice.")
        headers[name.strip()] = value.strip()
    return headers


def _lines(arguments: Iterable[str]) -> Iterator[str]:
    for argument in arguments:
        if not argument.startswith("@"):
            yield argument
            continue
        try:
            text = Path(argument[1:]).read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
            raise InvalidArgument(f"--header: {argument[1:]} cannot be read: {reason}.") from None
        yield from filter(str.strip, text.splitlines())


API_KEY_VARIABLE = "INFLIGHT_API_KEY"


def read_api_keys(key: str | None, file: Path | None) -> tuple[str, ...]:
    """The keys of a server that asks for one: ``key``, and the lines of ``file``; empty if both are
    None. `InvalidArgument` for a key that no client can send, and for a file without one."""
    keys = [] if key is None else [key]
    if file is not None:
        try:
            text = file.read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
            raise InvalidArgument(f"--api-key-file {file} cannot be read: {reason}.") from None
        found = [line.strip() for line in text.splitlines() if line.strip()]
        if not found:
            raise InvalidArgument(f"--api-key-file {file} has no key: write one in a line.")
        keys += found
    if not all(map(_VALUE.fullmatch, keys)):
        raise InvalidArgument("--api-key: a key is ASCII text without blanks at its ends.")
    return tuple(keys)


def is_denied(words: str) -> bool:
    """Whether Triton says with ``words`` that a header of a restricted API is missing or wrong."""
    return _DENIED.search(words) is not None


def denied(words: str) -> AccessDenied:
    """The error for a call that was refused with ``words`` for want of a header."""
    return AccessDenied(
        f"{words or 'access is denied'}. Send it with headers= (on the command line: --header)."
    )
