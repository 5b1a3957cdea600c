"""A real engine behind a proxy that counts every generation and injects faults into those that a test chooses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from loopback import served


class FaultyProxy:
    """Passes requests on to `engine`. `seen` has each generation that was asked for, in order.

    `fault(request)` may answer in the engine's place or wait; None lets the request through.
    `running` and `most_running` count generations in flight.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.url = ""
        self.fault: Callable[[dict[str, Any]], Awaitable[web.Response | None]] | None = None
        self.seen: list[dict[str, Any]] = []
        self.running = self.most_running = 0

    async def generate(self, http: web.Request) -> web.Response:
        request = orjson.loads(await http.read())
        self.seen.append(request)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            answer = await self.fault(request) if self.fault else None
            return answer or await self.forward(http)
        finally:
            self.running -= 1

    async def forward(self, http: web.Request) -> web.Response:
        async with self._http.request(http.method, self.engine + http.path, data=await http.read()) as reply:
            return web.Response(body=await reply.read(), status=reply.status, content_type=reply.content_type)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FaultyProxy]:
        """Serve in the running loop; a client that leaves ends its generation on the engine too."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self.generate)
        app.router.add_route("*", "/{path}", self.forward)
        async with aiohttp.ClientSession() as self._http, served(app, handler_cancellation=True) as self.url:
            yield self

    @contextmanager
    def in_thread(self) -> Iterator[FaultyProxy]:
        """Serve from a thread of its own, for tests that wait for processes."""
        loop, ended, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

        async def serve() -> None:
            async with self.serving():
                ready.set()
                await ended.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        try:
            assert ready.wait(10)
            yield self
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()
            loop.close()


def failing(status: int = 500) -> web.Response:
    """What an engine answers that failed."""
    return web.json_response({"error": {"message": "the engine failed"}}, status=status)
