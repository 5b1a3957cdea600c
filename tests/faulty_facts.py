"""An engine behind a proxy that lies: about itself, about the time, and about what it generated."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import orjson
from aiohttp import web
from faulty_proxy import FaultyProxy


class FaultyFacts(FaultyProxy):
    """`facts` stand in its /model_info and `server_facts` in its /server_info in place of the engine's, `late_s` is
    how far its clock is behind.

    `change(request, reply)` may spoil each generation; `ask(request)` what the engine is asked for.
    """

    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self.facts: dict[str, Any] = {}
        self.server_facts: dict[str, Any] = {}
        self.late_s = 0.0
        self.ask: Callable[[dict[str, Any]], None] = lambda request: None
        self.change: Callable[[dict[str, Any], dict[str, Any]], None] = lambda request, reply: None

    async def forward(self, http: web.Request) -> web.Response:
        body = await http.read()
        asked = orjson.loads(body) if body else {}
        self.ask(asked)
        data = orjson.dumps(asked) if body else None
        async with self._http.request(http.method, self.engine + http.path, data=data) as reply:
            answer, status = await reply.read(), reply.status
        if status == 200 and http.path == "/generate":
            told = orjson.loads(answer)
            self.change(asked, told)
            answer = orjson.dumps(told)
        if http.path == "/model_info":
            answer = orjson.dumps({**orjson.loads(answer), **self.facts})
        if http.path == "/server_info":
            answer = orjson.dumps({**orjson.loads(answer), **self.server_facts})
        headers = {"Date": formatdate(time.time() - self.late_s, usegmt=True)}
        return web.Response(body=answer, status=status, content_type="application/json", headers=headers)
