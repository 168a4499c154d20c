"""A front in this process, over a server of the test's choice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from client.conftest import Local

from inflight_openai.app import OpenAIApp
from inflight_openai.generation import GenerationRequest, parse_chat, parse_completion
from inflight_openai.prompts import PromptReader, make_prompt_reader
from inflight_openai.schema import UnknownFields
from inflight_openai.server import serving
from inflight_openai.settings import FrontSettings
from inflight_openai.triton_client import MetricsPage, TritonClient

DEMO = Path(__file__).parents[2] / "backend/inflight_backend/demo_model"
NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FILES = {name: (DEMO / name).read_text(encoding="utf-8") for name in NAMES}
DESCRIPTION: dict[str, Any] = {
    "model": "demo",
    "max_input_len": 99,
    "max_seq_len": 100,
    "vocab_size": 258,
    "end_id": 1,
    "files": FILES,
}
"""The demo model's description, as if it had room for 100 tokens."""

COMPLETION = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "1 2"}], "max_tokens": 3}
COMPLETIONS_PATH = "/v1/completions"
CHATS_PATH = "/v1/chat/completions"


def parse(
    reader: PromptReader, body: dict[str, Any], unknown: UnknownFields | None = None
) -> GenerationRequest:
    """A chat if the body has messages, else a completion."""
    parse_body = parse_chat if "messages" in body else parse_completion
    raw = json.dumps(body).encode()
    return parse_body(raw, reader, unknown or UnknownFields(), FrontSettings())


@asynccontextmanager
async def front_of(local: Local, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a front of ``local`` that serves until the block ends."""
    async with app_of(local, **settings) as app, client_of(app) as client:
        yield client


@asynccontextmanager
async def app_of(local: Local, **settings: Any) -> AsyncIterator[OpenAIApp]:
    """The application of a front of ``local``."""
    own = FrontSettings(**{"port": 0, "drain_seconds": 0.0, **settings})
    # The front's own limit ends a request before this one.
    triton = TritonClient(local.url, timeout=100.0, headers=own.headers)
    try:
        reader = _reader(own.served_name, own.chat_template)
        yield OpenAIApp(own, triton, reader, MetricsPage(own.metrics_url, triton.address))
    finally:
        await triton.close()


@cache
def _reader(served_name: str | None, chat_template: Path | None) -> PromptReader:
    """Kept, because each starts a process for its chat template."""
    return make_prompt_reader(DESCRIPTION, served_name, chat_template)


@asynccontextmanager
async def client_of(app: OpenAIApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of ``app``, which serves until the block ends."""
    async with serving(app) as [listening]:
        host, port = listening.getsockname()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=f"http://{host}:{port}", trust_env=False, timeout=60, limits=limits
        ) as client:
            yield client


async def post(client: httpx.AsyncClient, path: str, body: Any) -> tuple[int, str]:
    """Status and text of an answer."""
    answer = await client.post(path, json=body)
    return answer.status_code, answer.text
