"""Client of an engine that answers SGLang's `/generate`: the embedded one, a server, or a router before several."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from rollout.closing import ClosedByBlock
from rollout.engine.pressure import Gate, Load, read_loads
from rollout.engine.retrying import persist
from rollout.engine.wire import DeadlinePassed, Wire
from rollout.engine.workers import Workers
from rollout.errors import EngineError, EngineRefused

log = logging.getLogger(__name__)

ROUTING_HEADER = "X-SMG-Routing-Key"
"""SGLang's router sends requests with one key to one worker: a session's prefix stays cached there."""

PATIENCE_S = 5.0
QUEUE_BOUND = 16
_ADMIN_TIMEOUT_S = 10.0
_JSON = {"Content-Type": "application/json"}
OTHER_PATHS = {"/model_info": "/get_model_info", "/server_info": "/get_server_info"}
"""Routers know these facts by their older names alone."""


class EngineClient(ClosedByBlock):
    """One engine, or one router, any number of requests at once over reused connections.

    Belongs to one event loop; use it as an async context manager, or close it there.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 600.0,
        patience_s: float = PATIENCE_S,
        queue_bound: int = QUEUE_BOUND,
    ) -> None:
        """
        Args:
            timeout_s: deadline of one generation, from the call to the last byte of its answer.
            patience_s: how long a generation is tried again while nobody is there to begin it.
            queue_bound: requests that may wait in the engine; more wait here (rollout.engine.pressure).
        """
        self.base_url = base_url.rstrip("/")
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._wire = Wire()
        self._workers = Workers(self._wire, self.base_url)
        self._gate = Gate(self._loads, bound=queue_bound)
        self._served_as: dict[str, str] = {}

    @property
    def held(self) -> int:
        """Generations that wait here until the engine's queue has room."""
        return self._gate.held

    async def generate(
        self, request: dict[str, Any], *, rid: str, session_id: str | None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """POST `request` with this `rid` to /generate; the engine's answer as it is, doubles bit for bit.

        Sent again only where nothing was begun (rollout.engine.retrying), within the same deadline: `timeout_s`
        where less is left to this request than the client gives.

        Raises:
            EngineRefused: a 4xx, with its status and body.
            EngineFailed: a 5xx, likewise.
            EngineUnreachable: no connection could be made; nothing was sent.
            EngineError: connection lost, deadline passed (the generation is aborted),
                another status, or an answer that is no JSON object.
        """
        headers = _JSON if session_id is None else {**_JSON, ROUTING_HEADER: session_id}
        body = orjson.dumps({**request, "rid": rid})
        began, timeout_s = time.monotonic(), self._timeout_s if timeout_s is None else timeout_s
        try:
            await self._gate.enter(timeout_s)
        except TimeoutError as error:
            raise DeadlinePassed(f"{self.base_url}: its queue had no room for {timeout_s:.3g} s") from error

        async def send(left_s: float) -> dict[str, Any]:
            return await self._wire.ask("POST", f"{self.base_url}/generate", left_s, data=body, headers=headers)

        try:
            left_s = timeout_s - (time.monotonic() - began)
            return await persist(send, timeout_s=left_s, patience_s=self._patience_s)
        except DeadlinePassed:
            with suppress(EngineError):
                await self.abort(rid)
            raise
        finally:
            self._gate.leave()

    async def abort(self, rid: str) -> None:
        """Ask the engine to end a request, a router's every worker; fine if it has ended already.

        SGLang ends every request whose rid begins with this one: rids have one length.

        Raises:
            EngineError: no engine can be reached, or it refuses.
        """
        try:
            await self._abort_at(self.base_url, rid)
        except EngineRefused as refused:
            workers = await self._workers.urls() if refused.status == 404 else []
            ended = await asyncio.gather(*(self._abort_at(url, rid) for url in workers), return_exceptions=True)
            if all(isinstance(end, BaseException) for end in ended):  # none, too
                raise
            for url, end in zip(workers, ended, strict=True):
                if isinstance(end, BaseException):
                    log.info("the worker %s was not told to abort %s: %s", url, rid, end)

    async def _abort_at(self, url: str, rid: str) -> None:
        body = orjson.dumps({"rid": rid})
        await self._wire.read("POST", f"{url}/abort_request", _ADMIN_TIMEOUT_S, data=body, headers=_JSON)

    async def model_info(self) -> dict[str, Any]:
        """The engine's /model_info.

        Raises:
            EngineError: as for `generate`.
        """
        return await self.facts("/model_info")

    async def facts(self, path: str) -> dict[str, Any]:
        """What the engine tells of itself at `path`: /server_info, /v1/models.

        Behind a router the first worker that answers tells it: routers tell of themselves, or less. Where no worker
        can be asked from here, the router does.

        Raises:
            EngineError: as for `generate`.
        """
        workers: list[str] = []
        with suppress(EngineError):
            workers = await self._workers.urls()
        for url in workers:
            try:
                return await self._facts_of(url, path)
            except EngineError as error:
                log.info("the worker %s does not tell its %s: %s", url, path, error)
        return await self._facts_of(self.base_url, path)

    async def _facts_of(self, url: str, path: str) -> dict[str, Any]:
        other = OTHER_PATHS.get(path, path)
        try:
            return await self._wire.ask("GET", url + self._served_as.get(path, path), _ADMIN_TIMEOUT_S)
        except EngineRefused as refused:
            if refused.status != 404 or self._served_as.get(path, path) == other:
                raise
            told = await self._wire.ask("GET", url + other, _ADMIN_TIMEOUT_S)
            self._served_as[path] = other
            return told

    async def engines(self) -> list[str]:
        """URLs of the engines themselves: a router's workers, else this one's own.

        Raises:
            EngineError: as for `generate`.
        """
        return await self._workers.urls() or [self.base_url]

    async def update_weights(self, path: str, version: str, *, timeout_s: float) -> None:
        """Have the engine load the weights at `path`, as it sees it, and call them `version`.

        Raises:
            EngineRefused: it cannot load them, and goes on with those it has.
            EngineError: as for `generate`, or an answer that does not say that it did.
        """
        body = orjson.dumps({"model_path": path, "weight_version": version})
        url = f"{self.base_url}/update_weights_from_disk"
        said = await self._wire.ask("POST", url, timeout_s, data=body, headers=_JSON)
        if said.get("success") is not True:
            raise EngineError(f"{self.base_url} did not load {path}: {said.get('message')}")

    async def close(self) -> None:
        await self._gate.close()
        await self._wire.close()

    async def _loads(self) -> Sequence[Load] | None:
        """What the engines behind this client have to do; null where one has no /v1/loads."""
        urls = [f"{url}/v1/loads?include=core" for url in await self.engines()]
        asked = (self._wire.ask("GET", url, _ADMIN_TIMEOUT_S) for url in urls)
        told = await asyncio.gather(*asked, return_exceptions=True)
        if any(isinstance(one, EngineRefused) and one.status == 404 for one in told):
            return None
        answers = [one for one in told if not isinstance(one, BaseException)]
        for error in told if not answers else []:
            assert isinstance(error, BaseException)
            raise error
        return [load for one in answers for load in read_loads(one)]
