"""Work beside the event loop whose client has gone."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import aiohttp
from aiohttp import web

from inflight_openai.aside import Aside
from inflight_openai.places import Places

WAIT_SECONDS = 60.0


class Body(bytearray):
    """One that can be watched."""


def test_what_a_client_sent_that_left_is_freed_though_no_thread_is() -> None:
    is_over = threading.Event()
    places, aside = Places(10, WAIT_SECONDS), Aside(1, WAIT_SECONDS)
    bodies: list[weakref.ref[Body]] = []

    async def hold(request: web.Request) -> web.Response:
        with places.take(request) as place:
            await aside.run(place, lambda: is_over.wait(WAIT_SECONDS))
        return web.Response()

    async def take(request: web.Request) -> web.Response:
        with places.take(request) as place:
            body = Body(await request.read())
            bodies.append(weakref.ref(body))
            return web.Response(text=str(await aside.run(place, lambda: len(body))))

    async def run() -> str:
        app = web.Application()
        app.add_routes([web.post("/hold", hold), web.post("/take", take)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            holder = asyncio.create_task(client.post("/hold"))
            clients = [asyncio.create_task(client.post("/take", data=b"body")) for _ in range(5)]
            while len(bodies) < len(clients):
                await asyncio.sleep(0.01)
            for leaving in clients[1:]:
                leaving.cancel()
            while sum(body() is not None for body in bodies) > 1:
                await asyncio.sleep(0.01)
                gc.collect()
            is_over.set()
            await holder
            text = await (await clients[0]).text()
        await runner.cleanup()
        return text

    assert asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS / 2)) == "4"
