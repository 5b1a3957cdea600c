"""The driver's client of a session server: opens sessions, collects their samples and tape, deletes them."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import pyarrow as pa

from rollout.closing import ClosedByBlock
from rollout.columns import table_to_samples
from rollout.errors import SessionRefused, SessionUnreachable, describe
from rollout.sample import Sample
from rollout.session.tape import Tape, table_to_tape

RETRY_S = 0.2
"""Seconds between two tries to reach a server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedSession:
    """A session as its agent needs it: `base_url` without the trailing /v1, and the session's own key.

    `instance_id` names the server's process, null where it has no name.
    """

    session_id: str
    session_key: str
    base_url: str
    instance_id: str | None = None


@dataclass(kw_only=True, slots=True)
class CollectedSamples:
    """The samples of a session at one moment.

    `messages` is each sample's whole conversation, in the samples' order; `exchanges` counts the
    tape's at that moment, null where the server does not say. `session_metadata` is what GET shows.
    """

    samples: list[Sample]
    empty_reason: str | None = None
    session_metadata: dict[str, Any] = field(default_factory=dict)
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    exchanges: int | None = None


class SessionClient(ClosedByBlock):
    """Requests with the driver's right to the session server at `base_url`.

    All methods raise SessionRefused for an answer outside 2xx and SessionUnreachable for none, or for
    one of a range of servers that says that the session's own is down.
    Belongs to one event loop; use it as an async context manager.
    """

    def __init__(
        self, base_url: str, *, driver_token: str | None = None, timeout_s: float = 60.0, patience_s: float = 0.0
    ) -> None:
        """`patience_s`: seconds for which a connection that fails is tried again, while a server is restarted."""
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {driver_token}"} if driver_token else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._patience_s = patience_s
        self._lost: str | None = None
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def give_up(self, reason: str) -> None:
        """The server is not coming back: be patient no longer, and say `reason` to who asks it."""
        self._patience_s, self._lost = 0.0, reason

    async def open(self, settings: dict[str, Any]) -> OpenedSession:
        """A new session with `settings` (the body of POST /sessions)."""
        instance_id = await self._instance_id()
        reply = orjson.loads(await self._ask("POST", "/sessions", settings))
        return OpenedSession(
            session_id=reply["session_id"],
            session_key=reply["session_key"],
            # One of several server processes says which of them has it.
            base_url=reply.get("base_url") or f"{self.base_url}/sessions/{reply['session_id']}",
            instance_id=instance_id,
        )

    async def _instance_id(self) -> str | None:
        """The server's name for itself; asked anew for each session, for a server may have been restarted."""
        try:
            found: str | None = orjson.loads(await self._ask("GET", "/health")).get("session_server_instance_id")
        except SessionRefused:
            return None
        return found

    async def samples(self, session_id: str, *, max_seq_len: int | None = None) -> CollectedSamples:
        """The session's samples, bit for bit as it assembled them; refused with 422 where it cannot."""
        body = {} if max_seq_len is None else {"max_seq_len": max_seq_len}
        table = _table(await self._ask("POST", f"/sessions/{session_id}/samples", body))
        facts = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        return CollectedSamples(
            samples=table_to_samples(table),
            empty_reason=facts.get("empty_reason"),
            session_metadata=json.loads(facts.get("session_metadata", "{}")),
            messages=json.loads(facts.get("messages", "[]")),
            exchanges=int(facts["exchanges"]) if "exchanges" in facts else None,
        )

    async def tape(self, session_id: str) -> Tape:
        """The session's tape as far as it has been committed."""
        return table_to_tape(_table(await self._ask("GET", f"/sessions/{session_id}/tape")))[0]

    async def delete(self, session_id: str) -> None:
        """End the session; its running generations are aborted. One that is gone already is no error."""
        try:
            await self._ask("DELETE", f"/sessions/{session_id}")
        except SessionRefused as refusal:
            if refusal.status != 404:
                raise

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        if self._http is None:
            # No limit of connections: the engine's slots limit the rollouts in flight.
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} if data is not None else None
        try:
            status, content = await self._exchange(self._http, method, path, data, headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SessionUnreachable(
                f"the session server gave no answer to {method} {path}: {self._lost or describe(error)}"
            ) from error
        if status >= 300:
            raise _refusal(status, content)
        return content

    async def _exchange(
        self, http: aiohttp.ClientSession, method: str, path: str, data: bytes | None, headers: dict[str, str] | None
    ) -> tuple[int, bytes]:
        began = time.monotonic()
        while True:
            try:
                async with http.request(method, self.base_url + path, data=data, headers=headers) as reply:
                    content = await reply.read()
                if reply.status != 503 or reply.headers.get("x-should-retry") == "false":
                    return reply.status, content
                # One of several processes is down, and the one that was asked says so.
                raise aiohttp.ClientConnectionError(_refusal(reply.status, content).message)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                # Repeating is safe: of these requests only an opening does more the second time, and that expires.
                if time.monotonic() - began >= self._patience_s:  # which may have ended meanwhile
                    raise
            await asyncio.sleep(RETRY_S)


def _table(stream: bytes) -> pa.Table:
    return pa.ipc.open_stream(stream).read_all()


def _refusal(status: int, content: bytes) -> SessionRefused:
    """The server's own text and code where the body has OpenAI's error shape."""
    try:
        error = orjson.loads(content)["error"]
        return SessionRefused(status, error["message"], code=error.get("code"))
    except (ValueError, KeyError, TypeError):
        return SessionRefused(status, content[:300].decode(errors="replace"))
