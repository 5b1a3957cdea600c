"""Client of an engine that answers SGLang's `/generate`: the embedded one, a server, or a router."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from rollout.errors import EngineError, EngineFailed, EngineRefused, EngineUnreachable

ROUTING_HEADER = "X-SMG-Routing-Key"
"""SGLang's router sends requests with one key to one worker: a session's prefix stays cached there."""

_KEEPALIVE_S = 4.0
"""Idle connections are dropped before the servers do it (uvicorn: 5 s), which would fail a request."""
_ADMIN_TIMEOUT_S = 10.0
_CONNECT_S = 10.0
"""A host that is gone refuses no connection: it stays silent. An engine at work is not: its kernel accepts."""
_JSON = {"Content-Type": "application/json"}


class EngineClient:
    """One engine, any number of requests at once over reused connections.

    Belongs to one event loop; use it as an async context manager, or close it there.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 600.0) -> None:
        """`timeout_s`: deadline of one generation, from sending to the last byte of its answer."""
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(self, request: dict[str, Any], *, rid: str, session_id: str | None) -> dict[str, Any]:
        """POST `request` with this `rid` to /generate; the engine's answer as it is, doubles bit for bit.

        Raises:
            EngineRefused: a 4xx, with its status and body.
            EngineFailed: a 5xx, likewise.
            EngineUnreachable: no connection could be made; nothing was sent.
            EngineError: connection lost, deadline passed (the generation is aborted),
                another status, or an answer that is no JSON object.
        """
        headers = _JSON if session_id is None else {**_JSON, ROUTING_HEADER: session_id}
        body = orjson.dumps({**request, "rid": rid})
        try:
            return await self._exchange("POST", "/generate", self._timeout_s, data=body, headers=headers)
        except _DeadlinePassed:
            with suppress(EngineError):
                await self.abort(rid)
            raise

    async def abort(self, rid: str) -> None:
        """Ask the engine to end a request; fine if it has ended already.

        Raises:
            EngineError: the engine cannot be reached or refuses.
        """
        await self._read("POST", "/abort_request", _ADMIN_TIMEOUT_S, data=orjson.dumps({"rid": rid}), headers=_JSON)

    async def model_info(self) -> dict[str, Any]:
        """The engine's /model_info.

        Raises:
            EngineError: as for `generate`.
        """
        return await self.facts("/model_info")

    async def facts(self, path: str) -> dict[str, Any]:
        """What the engine tells of itself at `path`: /server_info, /v1/models.

        Raises:
            EngineError: as for `generate`.
        """
        return await self._exchange("GET", path, _ADMIN_TIMEOUT_S)

    async def update_weights(self, path: str, version: str, *, timeout_s: float) -> None:
        """Have the engine load the weights at `path`, as it sees it, and call them `version`.

        Raises:
            EngineRefused: it cannot load them, and goes on with those it has.
            EngineError: as for `generate`, or an answer that does not say that it did.
        """
        body = orjson.dumps({"model_path": path, "weight_version": version})
        said = await self._exchange("POST", "/update_weights_from_disk", timeout_s, data=body, headers=_JSON)
        if said.get("success") is not True:
            raise EngineError(f"{self.base_url} did not load {path}: {said.get('message')}")

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _exchange(self, method: str, path: str, timeout_s: float, **kwargs: Any) -> dict[str, Any]:
        body = await self._read(method, path, timeout_s, **kwargs)
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self.base_url}{path} answered no JSON: {error}") from error
        if not isinstance(value, dict):
            raise EngineError(f"{self.base_url}{path} answered {type(value).__name__}, not an object")
        return value

    async def _read(self, method: str, path: str, timeout_s: float, **kwargs: Any) -> bytes:
        url, timeout = self.base_url + path, aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._session().request(method, url, timeout=timeout, **kwargs) as response:
                body = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnreachable(f"{url} failed: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise _DeadlinePassed(f"{url} gave no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{url} failed: {type(error).__name__}: {error}") from error
        if 400 <= response.status < 500:
            raise EngineRefused(response.status, body)
        if response.status >= 500:
            raise EngineFailed(response.status, body)
        if response.status != 200:
            raise EngineError(f"{url} answered {response.status}: {body[:300].decode(errors='replace')}")
        return body

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._http = aiohttp.ClientSession(connector=connector)
        return self._http


class _DeadlinePassed(EngineError):
    """The engine did not answer in time."""
