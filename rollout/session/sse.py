"""The HTTP side of a stream: a reply that begins when there is something to say, or a comment is due."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from rollout.session.streaming import KEEP_ALIVE

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """One reply of server-sent events. Until it has started, another reply can be given in its place."""

    def __init__(self, request: web.Request, keepalive_s: float) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._keepalive_s = keepalive_s

    @property
    def started(self) -> bool:
        return self.response.prepared

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send a comment every `keepalive_s` seconds as long as the body lasts."""
        ended = asyncio.Event()
        comments = asyncio.create_task(self._comment(ended))
        try:
            yield
        except asyncio.CancelledError:
            comments.cancel()  # it may wait for a client that no longer reads
            raise
        finally:
            ended.set()  # and not cancelled: a reply must not be left half begun
            await asyncio.wait([comments])

    async def _comment(self, ended: asyncio.Event) -> None:
        with suppress(ConnectionError):  # the client is gone: its handler is told by being cancelled
            while True:
                try:
                    await asyncio.wait_for(ended.wait(), self._keepalive_s)
                    return
                except TimeoutError:
                    await self._write(KEEP_ALIVE)

    async def finish(self, events: Iterable[bytes]) -> web.StreamResponse:
        """Send the last events. A client that has gone does not get them."""
        with suppress(ConnectionError):
            await self._write(b"".join(events))
            await self.response.write_eof()
        return self.response

    async def _write(self, content: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(content)
