"""One HTTP exchange with an engine, its failures in this project's words."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from rollout.errors import EngineError, EngineFailed, EngineRefused, EngineUnreachable

_CONNECT_S = 10.0
"""A host that is gone refuses no connection: it stays silent. An engine at work is not: its kernel accepts."""
_KEEPALIVE_S = 4.0
"""Idle connections are dropped before the servers do it (uvicorn: 5 s), which would fail a request."""


class DeadlinePassed(EngineError):
    """The engine did not answer in time."""


class Wire:
    """Connections that are reused, to any engine. Belongs to one event loop."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None

    async def ask(self, method: str, url: str, timeout_s: float, **kwargs: Any) -> dict[str, Any]:
        """The JSON object that `url` answers, doubles bit for bit; `kwargs` as aiohttp's.

        Raises:
            EngineError: as for `read`, or an answer that is no JSON object.
        """
        body = await self.read(method, url, timeout_s, **kwargs)
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{url} answered no JSON: {error}") from error
        if not isinstance(value, dict):
            raise EngineError(f"{url} answered {type(value).__name__}, not an object")
        return value

    async def read(self, method: str, url: str, timeout_s: float, **kwargs: Any) -> bytes:
        """The body of a 200.

        Raises:
            EngineRefused: a 4xx, with its status and body.
            EngineFailed: a 5xx, likewise.
            EngineUnreachable: no connection.
            DeadlinePassed: no whole answer within `timeout_s` seconds.
            EngineError: connection lost, another status.
        """
        timeout = aiohttp.ClientTimeout(total=max(0.001, timeout_s), sock_connect=_CONNECT_S)  # 0 means none
        try:
            async with self._session().request(method, url, timeout=timeout, **kwargs) as response:
                body = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnreachable(f"{url} failed: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise DeadlinePassed(f"{url} gave no answer within {timeout_s:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{url} failed: {type(error).__name__}: {error}") from error
        if 400 <= response.status < 500:
            raise EngineRefused(response.status, body)
        if response.status >= 500:
            raise EngineFailed(response.status, body)
        if response.status != 200:
            raise EngineError(f"{url} answered {response.status}: {body[:300].decode(errors='replace')}")
        return body

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._http = aiohttp.ClientSession(connector=connector)
        return self._http
