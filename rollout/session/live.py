"""The sessions that a server holds, and who may do what with them."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any

from rollout.errors import SessionRefused
from rollout.session.session import Session


@dataclass(kw_only=True, slots=True, eq=False)
class LiveSession:
    """One session with what only a server has: its key, its running generations, its refusals by status."""

    session: Session
    key: str
    opened_at: datetime
    generations: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    closed: bool = False

    def check_open(self) -> None:
        """Refuse what comes after the session was deleted.

        Raises:
            SessionRefused: 404, as for a session that never was.
        """
        if self.closed:
            raise not_found(self.session.session_id)

    def row(self, now: datetime) -> dict[str, Any]:
        """Its line in GET /sessions: no content."""
        return {
            "session_id": self.session.session_id,
            "version": self.session.settings.version,
            "turns": len(self.session.nodes),
            "running": self.session.running,
            "age_s": (now - self.opened_at).total_seconds(),
        }


class LiveSessions:
    """Sessions by id. Without a driver's token nothing is checked; such a server binds loopback only."""

    def __init__(self, driver_token: str | None, max_sessions: int) -> None:
        self._driver_token = driver_token
        self._max_sessions = max_sessions
        self._sessions: dict[str, LiveSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[LiveSession]:
        return list(self._sessions.values())

    def check_room(self) -> None:
        """Refuse one more session than there may be.

        Raises:
            SessionRefused: 429; a repeat may find room.
        """
        if len(self._sessions) >= self._max_sessions:
            raise SessionRefused(
                429, f"{self._max_sessions} sessions are open, as many as there may be", code="max_sessions", retry=True
            )

    def add(self, session: Session) -> LiveSession:
        live = LiveSession(session=session, key=f"sk-{secrets.token_urlsafe(24)}", opened_at=datetime.now(UTC))
        self._sessions[session.session_id] = live
        return live

    def remove(self, live: LiveSession) -> None:
        """Close a session: its generations are cancelled, late answers of theirs change nothing."""
        live.closed = True
        del self._sessions[live.session.session_id]
        for task in live.generations.values():
            task.cancel()

    def check_driver(self, tokens: Sequence[str]) -> None:
        """Refuse who does not have the driver's token among the ones that were sent.

        Raises:
            SessionRefused: 401.
        """
        if self._driver_token is not None and not _is_among(self._driver_token, tokens):
            raise SessionRefused(401, "the driver's token is wanted, as Bearer or x-api-key")

    def for_driver(self, session_id: str, tokens: Sequence[str]) -> LiveSession:
        """A session for the driver.

        Raises:
            SessionRefused: 401 without the driver's token, 404 for an unknown session.
        """
        self.check_driver(tokens)
        return self._find(session_id)

    def for_client(self, session_id: str, tokens: Sequence[str]) -> LiveSession:
        """A session for its client's endpoints: its own key will do, or the driver's token.

        Raises:
            SessionRefused: 404 for an unknown session, 401 without either.
        """
        live = self._find(session_id)
        wanted = (live.key, self._driver_token)
        if self._driver_token is None or any(one is not None and _is_among(one, tokens) for one in wanted):
            return live
        raise SessionRefused(401, "this session's key is wanted, as Bearer or x-api-key")

    def _find(self, session_id: str) -> LiveSession:
        live = self._sessions.get(session_id)
        if live is None:
            raise not_found(session_id)
        return live


def not_found(session_id: str) -> SessionRefused:
    return SessionRefused(404, f"session not found: session_id={session_id}")


def new_session_id() -> str:
    """32 hex digits that no one guesses."""
    return uuid.uuid4().hex


def _is_among(wanted: str, tokens: Sequence[str]) -> bool:
    # Bytes that are no UTF-8 reach us as surrogates; they are no reason to fail.
    return any(compare_digest(token.encode(errors="surrogateescape"), wanted.encode()) for token in tokens)
