"""Settings of `inflight openai`, and the limits of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_PROMPTS = 128
"""Prompts of one completion request, and answers to one prompt."""

MAX_STOP_STRINGS = 16
MAX_MESSAGES = 4096
MAX_TOP_LOG_PROBS = 20
"""OpenAI's bound of ``top_logprobs``; here of a completion's ``logprobs`` as well."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """One run of the front; times in seconds, sizes in bytes.

    ``served_name``: name of the model for clients; None takes the server's name for it.
    ``api_keys``: of which clients must send one; secrets; empty: anybody may call.
    ``thread_timeout``: how long a request may wait for a thread that parses it.
    ``timeout``: for a request, from its head to the last byte of its answer.
    ``tool_parser``: name of the format of tool calls; None takes what the chat template tells.
    ``default_max_tokens``: bound of a chat answer whose request names none; None is all that fits.
    ``headers``: of every call to the server; secrets.
    ``is_strict``: refuse unknown fields of a request instead of ignoring them.
    ``metrics_url``: the server's metrics page, for ``/metrics``; "" for none, and None for that of
    its host at Triton's usual port.
    ``loads_adapters``: clients may load and unload adapters, as far as the server lets them.
    ``has_page``: the live page is served; ``shows_text``: with the texts of this front's requests.
    ``allowed_origins``: origins of web pages that may call the front; ``*`` for any.
    """

    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    host: str = "127.0.0.1"
    port: int = 9000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_name: str | None = None
    chat_template: Path | None = None
    tool_parser: str | None = None
    default_max_tokens: int | None = None
    max_requests: int = 1024
    max_body_bytes: int = 8 * 2**20
    body_timeout: float = 30.0
    thread_timeout: float = 30.0
    timeout: float = 600.0
    drain_seconds: float = 30.0
    is_strict: bool = False
    metrics_url: str | None = None
    allowed_origins: tuple[str, ...] = ()
    loads_adapters: bool = False
    has_page: bool = True
    shows_text: bool = False
