"""A front in this process, over a server of the test's choice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from client.conftest import Local

from inflight_openai.app import Front
from inflight_openai.prompts import make_prompt_reader
from inflight_openai.running import make_runner
from inflight_openai.settings import FrontSettings
from inflight_openai.upstream import Upstream

DEMO = Path(__file__).parents[2] / "backend/inflight_backend/demo_model"
NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DESCRIPTION = {
    "model": "demo",
    "max_input_len": 99,
    "max_seq_len": 100,
    "vocab_size": 258,
    "end_id": 1,
    "files": {name: (DEMO / name).read_text(encoding="utf-8") for name in NAMES},
}
"""What the server says of the demo model, if it had room for 100 tokens."""


@asynccontextmanager
async def front_of(local: Local, **settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a front of ``local`` that serves until the block ends."""
    async with serving(local, **settings) as runner:
        host, port = runner.addresses[0]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            yield client


@asynccontextmanager
async def serving(local: Local, **settings: Any) -> AsyncIterator[web.AppRunner]:
    """What runs a front of ``local`` until the block ends."""
    own = FrontSettings(**settings)
    # What ends a request is the front.
    upstream = Upstream(local.url, timeout=100.0, headers=own.headers)
    reader = make_prompt_reader(DESCRIPTION, own.served_name, own.chat_template)
    runner = make_runner(own, Front(own, upstream, reader))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner
    finally:
        await runner.cleanup()
        await upstream.close()
