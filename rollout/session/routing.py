"""One of several session servers on neighbouring ports: a session lives in one of them, and any of them answers for it.

A session's id begins with its process's slot. A request that reaches another process is passed on, not
redirected: httpx, and so the OpenAI SDK, drops Authorization where a redirect leads to another port.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from yarl import URL

from rollout.errors import SessionRefused
from rollout.session.answering import answer

log = logging.getLogger(__name__)

HERE = "X-Rollout-Here"
"""Header: whatever its value, the process that is asked answers for itself alone."""

MAX_PROCESSES = 64
LIST_TIMEOUT_S = 5.0
"""Seconds that GET /sessions waits for another process."""

_HOP = frozenset({"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"})
_REQUEST_OWN = _HOP | {"host", "content-length", "content-encoding", "expect"}
"""Not passed on: of this connection only, or untrue of a body that has been read and unpacked."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process's place in its range: `slot` of `size`, all on `host`, the first on `first_port`."""

    slot: int
    size: int
    host: str
    first_port: int

    def new_session_id(self) -> str:
        """32 hex digits: two for the slot, the rest no one guesses (120 bits)."""
        return f"{self.slot:02x}{secrets.token_hex(15)}"

    def slot_of(self, session_id: str) -> int | None:
        """The process of a session; None where the id is none of the range's."""
        try:
            slot = int(session_id[:2], 16)
        except ValueError:
            return None
        return slot if len(session_id) == 32 and slot < self.size else None

    def port(self, slot: int) -> int:
        return self.first_port + slot

    def url(self, slot: int) -> str:
        """Where the other processes reach it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port(slot)}"


class Router:
    """The middleware that makes one server's application a part of its range."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._next = place.slot
        self._http: aiohttp.ClientSession | None = None

    def install(self, app: web.Application) -> None:
        """Add it as the innermost middleware: what it refuses is answered as any other refusal."""
        app.middlewares.append(self._route)
        app.cleanup_ctx.append(self._connected)

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        # No limit on time: a generation takes as long as it takes. Bodies pass as they are.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent", "Content-Type", "Accept"),
        ) as self._http:
            yield

    @web.middleware
    async def _route(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        slot = self._place.slot_of(request.match_info.get("session_id", ""))
        if slot is not None and slot != self._place.slot:
            return await self._pass_on(request, slot)
        if request.path == "/sessions" and HERE not in request.headers:
            if request.method == "POST":
                return await self._open(request, handler)
            if request.method == "GET":
                return await self._list(request, handler)
        return await handler(request)

    @asynccontextmanager
    async def _asked(self, request: web.Request, slot: int, **more: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The same request to another process, under the host name that the client knows.

        Raises:
            SessionRefused: 503, it does not answer; a repeat may find it started again.
        """
        assert self._http is not None
        headers = request.headers.copy()
        for name in _REQUEST_OWN:
            headers.popall(name, None)
        headers["Host"] = f"{_bracketed(request.url.host or self._place.host)}:{self._place.port(slot)}"
        headers.update(more)
        body = await request.read()
        url = f"{self._place.url(slot)}{request.rel_url.raw_path_qs}"  # a target may be a whole URL
        try:
            reply = await self._http.request(
                request.method, URL(url, encoded=True), headers=headers, data=body or None, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            raise SessionRefused(503, f"process {slot} of this server does not answer: {error}", retry=True) from error
        async with reply:
            yield reply

    async def _pass_on(self, request: web.Request, slot: int) -> web.StreamResponse:
        """Answer as the session's own process does, piece by piece. A client that leaves ends that request too."""
        async with self._asked(request, slot) as reply:
            passed = web.StreamResponse(status=reply.status, reason=reply.reason)
            for name, value in reply.headers.items():
                if name.lower() not in _HOP:
                    passed.headers.add(name, value)
            await passed.prepare(request)
            try:
                async for piece in reply.content.iter_any():
                    await passed.write(piece)
            except aiohttp.ClientError as error:
                log.warning("process %d broke off %s %s: %s", slot, request.method, request.path, error)
                if request.transport is not None:
                    request.transport.close()  # before its end, so that no client takes it for whole
                return passed
            except ConnectionError:
                return passed
            await passed.write_eof()
            return passed

    async def _open(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Open a session in the next process of the range; a full one, or one that is down, is passed over."""
        first, self._next = self._next, (self._next + 1) % self._place.size
        full: SessionRefused | web.Response | None = None
        for step in range(self._place.size):
            slot = (first + step) % self._place.size
            try:
                opened = await self._open_at(request, handler, slot)
            except SessionRefused as refusal:
                if refusal.status not in (429, 503):
                    raise
                full = refusal
                continue
            if opened.status not in (429, 503):
                return opened
            full = opened
        if isinstance(full, SessionRefused):
            raise full
        assert full is not None
        return full

    async def _open_at(self, request: web.Request, handler: Handler, slot: int) -> web.Response:
        if slot == self._place.slot:
            own = await handler(request)
            assert isinstance(own, web.Response) and isinstance(own.body, bytes)
            status, body, headers = own.status, own.body, dict(own.headers)
        else:
            async with self._asked(request, slot, **{HERE: "1"}) as reply:
                status, body = reply.status, await reply.read()
                headers = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP}
        if status != 200:
            headers.pop("Content-Length", None)
            return web.Response(status=status, body=body, headers=headers)
        opened = orjson.loads(body)
        host = _bracketed(request.url.host or self._place.host)
        origin = f"{request.scheme}://{host}:{self._place.port(slot)}"
        return answer({**opened, "base_url": f"{origin}/sessions/{opened['session_id']}"})

    async def _list(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The sessions of all processes, each with its process; `missing` has the processes that did not answer."""
        own = await handler(request)  # refuses for all
        assert isinstance(own, web.Response) and isinstance(own.body, bytes)
        others = [slot for slot in range(self._place.size) if slot != self._place.slot]
        lists = dict(zip(others, await asyncio.gather(*(self._listed(request, slot) for slot in others)), strict=True))
        lists[self._place.slot] = orjson.loads(own.body)["sessions"]
        rows = [{**row, "process": slot} for slot in sorted(lists) for row in lists[slot] or []]
        return answer({"sessions": rows, "missing": [slot for slot in sorted(lists) if lists[slot] is None]})

    async def _listed(self, request: web.Request, slot: int) -> list[dict[str, Any]] | None:
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S), self._asked(request, slot, **{HERE: "1"}) as reply:
                return list(orjson.loads(await reply.read())["sessions"]) if reply.status == 200 else None
        except (SessionRefused, TimeoutError, aiohttp.ClientError) as error:
            log.warning("process %d does not list its sessions: %s", slot, error)
            return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
