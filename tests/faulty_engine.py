"""An engine that injects faults: it answers /generate as a test says, late or never if so asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from rollout.engine.ports import HeldPort


class FaultyEngine:
    """Samples "ok" and the stop token unless `answer` says otherwise. `seen` has each request, `aborted` each rid,
    `looks` counts /model_info, `request` is the one being answered.
    """

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.answer: Callable[[dict[str, Any]], Awaitable[web.Response | None]] | None = None
        self.seen: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.aborted: list[str] = []
        self.looks = 0
        self.request: web.Request | None = None
        self.model_info: dict[str, Any] = {"model_path": "faulty", "context_length": 4096}

    def reply(self, request: dict[str, Any], **changes: Any) -> dict[str, Any]:
        meta = {
            "finish_reason": {"type": "stop", "matched": self.ids[-1]},
            "prompt_tokens": len(request["input_ids"]),
            "completion_tokens": len(self.ids),
            "cached_tokens": 0,
            "weight_version": self.model_info.get("weight_version", "w0"),
            "output_token_logprobs": [[-0.5, number, None] for number in self.ids],
            "e2e_latency": 0.001,
        }
        return {"text": "", "meta_info": {**meta, **changes}}

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/model_info", self._info),
            ]
        )
        return app

    async def _generate(self, http: web.Request) -> web.Response:
        request = orjson.loads(await http.read())
        self.seen.append((request, dict(http.headers)))
        self.request = http
        given = await self.answer(request) if self.answer else None
        return given or web.json_response(self.reply(request))

    async def _abort(self, http: web.Request) -> web.Response:
        self.aborted.append((await http.json())["rid"])
        return web.json_response({})

    async def _info(self, http: web.Request) -> web.Response:
        self.looks += 1
        return web.json_response(self.model_info)


async def wait_until(found: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Wait for `found()` to be true.

    Raises:
        TimeoutError: it stayed false.
    """
    async with asyncio.timeout(timeout_s):
        while not found():
            await asyncio.sleep(0.01)


class FaultyHost:
    """A faulty engine that comes and goes, always on one port."""

    def __init__(self, ids: list[int]) -> None:
        self.engine, self._port = FaultyEngine(ids), HeldPort()
        self.url = f"http://127.0.0.1:{self._port.port}"
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        self._runner = web.AppRunner(self.engine.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port.port).start()

    async def stop(self) -> None:
        """What it has in hand is lost, and who connects is refused."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def close(self) -> None:
        await self.stop()
        self._port.close()
