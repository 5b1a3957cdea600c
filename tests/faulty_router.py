"""A router that injects faults: in front of engines it gives the answers of sglang-router and smg."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from loopback import served


class FaultyRouter:
    """Knows `workers` by their URLs and passes nothing on. `seen` has the path of each request.

    `facts` is what it says of itself at /get_model_info and /get_server_info.
    """

    def __init__(self, workers: list[str]) -> None:
        self.workers = workers
        self.seen: list[str] = []
        self.facts: dict[str, Any] = {"router_manager": True}

    async def handle(self, http: web.Request) -> web.Response:
        self.seen.append(http.path)
        if http.path == "/workers":
            return web.json_response({"workers": [{"url": url, "is_healthy": True} for url in self.workers]})
        if http.path in ("/get_model_info", "/get_server_info"):
            return web.json_response(self.facts)
        return web.json_response({"error": {"code": "unknown_url", "message": http.path}}, status=404)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        async with served(app) as url:
            yield url
