"""The session server's application in this process, over real HTTP, in front of an engine that injects faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from faulty_engine import FaultyEngine
from session_stage import END, TITO, Stage

from rollout.engine.client import EngineClient
from rollout.engine.tiny import CHECKPOINT
from rollout.session.app import SessionServer
from rollout.session.options import ServerOptions
from rollout.tito.renderer import Tito


@asynccontextmanager
async def app_stage(*, tito: Tito = TITO, **options: Any) -> AsyncIterator[Stage]:
    """A `Stage` whose server is the application with these options of it."""
    engine = FaultyEngine([*TITO.tokenizer.encode("ok"), END])
    runners = []
    try:
        url = await _serve(engine.app(), runners)
        given = ServerOptions(engine=url, tokenizer=CHECKPOINT, **options)
        server = SessionServer(EngineClient(url), tito, given)
        url = await _serve(server.app(), runners)
        async with aiohttp.ClientSession() as http:
            yield Stage(url, engine, http, given.driver_token)
    finally:
        for runner in reversed(runners):
            await runner.cleanup()


async def _serve(app: web.Application, runners: list[web.AppRunner]) -> str:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    runners.append(runner)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"
