"""The sessions that a server holds, and who may do what with them."""

from __future__ import annotations

import secrets
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any

from rollout.errors import SessionRefused
from rollout.session.coalescing import Running
from rollout.session.journal import Opened, SessionJournal
from rollout.session.session import Session


@dataclass(kw_only=True, slots=True, eq=False)
class LiveSession:
    """One session with what only a server has: its key, its running generations, its refusals by status.

    `used_at` is of the server's own clock, in seconds.
    """

    session: Session
    opened: Opened
    journal: SessionJournal | None = None
    used_at: float = 0.0
    generations: dict[str, Running] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    closed: bool = False

    def check_open(self) -> None:
        """Refuse what comes after the session was deleted.

        Raises:
            SessionRefused: 404, as for a session that never was.
        """
        if self.closed:
            raise not_found(self.session.session_id)

    def row(self, now: datetime, clock: float) -> dict[str, Any]:
        """Its line in GET /sessions: no content."""
        return {
            "session_id": self.session.session_id,
            "version": self.session.settings.version,
            "turns": len(self.session.nodes),
            "running": self.session.running,
            "age_s": (now - self.opened.opened_at).total_seconds(),
            "idle_s": 0.0 if self.generations else clock - self.used_at,
        }


class LiveSessions:
    """Sessions by id, the one that was used last at the end.

    Without a driver's token nothing is checked; such a server binds loopback only. A session is used by
    every request for it, and as long as it generates; the list of all sessions uses none.
    """

    def __init__(
        self, driver_token: str | None, *, max_sessions: int, idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._driver_token = driver_token
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._clock = clock
        self._sessions: OrderedDict[str, LiveSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[LiveSession]:
        return list(self._sessions.values())

    def rows(self) -> list[dict[str, Any]]:
        """GET /sessions, the oldest first."""
        now, clock = datetime.now(UTC), self._clock()
        return [live.row(now, clock) for live in sorted(self.all(), key=lambda live: live.opened.opened_at)]

    def check_room(self) -> None:
        """Refuse one more session than there may be.

        Raises:
            SessionRefused: 429; a repeat may find room.
        """
        if len(self._sessions) >= self._max_sessions:
            raise SessionRefused(
                429, f"{self._max_sessions} sessions are open, as many as there may be", code="max_sessions", retry=True
            )

    def add(self, live: LiveSession) -> None:
        """Serve a session from now on."""
        self._sessions[live.session.session_id] = live
        self.use(live)

    def use(self, live: LiveSession) -> None:
        """Its idle time begins anew."""
        if not live.closed:
            live.used_at = self._clock()
            self._sessions.move_to_end(live.session.session_id)

    def remove(self, live: LiveSession) -> None:
        """Close a session: its generations are cancelled, late answers of theirs change nothing."""
        live.closed = True
        del self._sessions[live.session.session_id]
        for running in live.generations.values():
            running.task.cancel()
        if live.journal is not None:
            live.journal.remove()

    def expire(self, at_most: int = 100) -> list[LiveSession]:
        """Close what has been idle for too long, so many of it at once; what was closed. None of it generates."""
        gone: list[LiveSession] = []
        while self._sessions and self.next_due_s() <= 0 and len(gone) < at_most:
            oldest = next(iter(self._sessions.values()))
            if oldest.generations:
                self.use(oldest)
            else:
                self.remove(oldest)
                gone.append(oldest)
        return gone

    def next_due_s(self) -> float:
        """Seconds until a session may have been idle for too long; below zero where it has."""
        oldest = next(iter(self._sessions.values()), None)
        return self._idle_s if oldest is None else oldest.used_at + self._idle_s - self._clock()

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
        live = self._find(session_id)
        self.use(live)
        return live

    def for_client(self, session_id: str, tokens: Sequence[str]) -> LiveSession:
        """A session for its client's endpoints: its own key will do, or the driver's token.

        Raises:
            SessionRefused: 404 for an unknown session, 401 without either.
        """
        live = self._find(session_id)
        wanted = (live.opened.key, self._driver_token)
        if self._driver_token is None or any(one is not None and _is_among(one, tokens) for one in wanted):
            self.use(live)
            return live
        raise SessionRefused(401, "this session's key is wanted, as Bearer or x-api-key")

    def _find(self, session_id: str) -> LiveSession:
        live = self._sessions.get(session_id)
        if live is None:
            raise not_found(session_id)
        return live


def not_found(session_id: str) -> SessionRefused:
    return SessionRefused(404, f"session not found: session_id={session_id}")


def new_key() -> str:
    """A session's own key: 192 bits that no one guesses."""
    return f"sk-{secrets.token_urlsafe(24)}"


def new_session_id() -> str:
    """32 hex digits that no one guesses."""
    return uuid.uuid4().hex


def _is_among(wanted: str, tokens: Sequence[str]) -> bool:
    # Bytes that are no UTF-8 reach us as surrogates; they are no reason to fail.
    return any(compare_digest(token.encode(errors="surrogateescape"), wanted.encode()) for token in tokens)
