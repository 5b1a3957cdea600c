"""An aiohttp application of a test's own, served in the running loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def served(app: web.Application, *, handler_cancellation: bool = False) -> AsyncIterator[str]:
    """Serve `app` on a free loopback port while the block lasts; its URL.

    Args:
        handler_cancellation: a client that leaves cancels its handler.
    """
    runner = web.AppRunner(app, handler_cancellation=handler_cancellation, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
