"""Settings of `inflight openai`, and the limits of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inflight_client.front_options import FrontOptions

MAX_PROMPTS = 128
"""Prompts of one completion request, and answers to one prompt."""

MAX_STOP_STRINGS = 16
MAX_MESSAGES = 4096
MAX_TOP_LOG_PROBS = 20
"""OpenAI's bound of ``top_logprobs``; here of a completion's ``logprobs`` as well."""


@dataclass(frozen=True, slots=True)
class FrontSettings(FrontOptions):
    """One run of the front; times in seconds.

    ``headers``: of every call to the server; secrets.
    ``api_keys``: of which clients must send one; secrets; empty: anybody may call.
    ``thread_timeout``: how long a request may wait for a thread that parses it.
    ``metrics_url``: the server's metrics page, for ``/metrics``; "" for none, and None for that of
    its host at Triton's usual port.
    """

    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    host: str = "127.0.0.1"
    port: int = 9000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    body_timeout: float = 30.0
    thread_timeout: float = 30.0
    drain_seconds: float = 30.0
    metrics_url: str | None = None
