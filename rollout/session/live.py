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
from pathlib import Path
from typing import Any

from rollout.errors import SessionRefused
from rollout.session.coalescing import Running
from rollout.session.journal import Opened, SessionJournal
from rollout.session.left import LeftSession
from rollout.session.resent import Resent
from rollout.session.session import Session


@dataclass(kw_only=True, slots=True, eq=False)
class LiveSession:
    """One session with what only a server has: its key, its running generations, its refusals by status.

    `used_at` is of the server's own clock, in seconds; `resent` is of the last chat body that was accepted.
    """

    session: Session
    opened: Opened
    journal: SessionJournal | None = None
    used_at: float = 0.0
    generations: dict[str, Running] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    closed: bool = False
    resent: Resent = field(default_factory=Resent)

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def turns(self) -> int:
        """Its generations."""
        return len(self.session.nodes)

    def check_open(self) -> None:
        """Refuse what comes after the session was deleted.

        Raises:
            SessionRefused: 404, as for a session that never was.
        """
        if self.closed:
            raise not_found(self.session_id)

    def row(self, now: datetime, clock: float) -> dict[str, Any]:
        """Its line in GET /sessions: no content."""
        return {
            "session_id": self.session_id,
            "version": self.session.settings.version,
            "turns": self.turns,
            "running": self.session.running,
            "age_s": (now - self.opened.opened_at).total_seconds(),
            "idle_s": 0.0 if self.generations else clock - self.used_at,
            "restoring": False,
        }


class LiveSessions:
    """Sessions by id, the one that was used last at the end, and those that an earlier process left.

    Without a driver's token nothing is checked; such a server binds loopback only. A session is used by
    every request for it, and as long as it generates; the list of all sessions uses none. Every left
    session was used last when the server started.
    """

    def __init__(
        self, driver_token: str | None, *, max_sessions: int, idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._driver_token = driver_token
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._clock = clock
        self._started_at = clock()
        self._sessions: OrderedDict[str, LiveSession] = OrderedDict()
        self.left: OrderedDict[str, LeftSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[LiveSession]:
        return list(self._sessions.values())

    def rows(self) -> list[dict[str, Any]]:
        """GET /sessions, the oldest first."""
        now, clock = datetime.now(UTC), self._clock()
        held: list[LiveSession | LeftSession] = [*self._sessions.values(), *self.left.values()]
        return [one.row(now, clock) for one in sorted(held, key=lambda one: one.opened.opened_at)]

    def check_room(self) -> None:
        """Refuse one more session than there may be.

        Raises:
            SessionRefused: 429; a repeat may find room.
        """
        if len(self._sessions) + len(self.left) >= self._max_sessions:
            raise SessionRefused(
                429, f"{self._max_sessions} sessions are open, as many as there may be", code="max_sessions", retry=True
            )

    def add(self, live: LiveSession) -> None:
        """Serve a session from now on."""
        self._sessions[live.session_id] = live
        self.use(live)

    def leave(self, path: Path, opened: Opened) -> None:
        """Hold a session that an earlier process left in this file."""
        left = LeftSession(path=path, opened=opened, used_at=self._started_at)
        self.left[left.session_id] = left

    def come_back(self, left: LeftSession, live: LiveSession) -> None:
        """Serve a left session. It is used by that if a request waits for it."""
        del self.left[left.session_id]
        self._sessions[live.session_id] = live
        live.used_at = left.used_at
        if left.asked is None:
            self._sessions.move_to_end(live.session_id, last=False)  # nothing was used before the start
        else:
            self.use(live)
        left.end()

    def use(self, live: LiveSession) -> None:
        """Its idle time begins anew."""
        if not live.closed:
            live.used_at = self._clock()
            self._sessions.move_to_end(live.session_id)

    def remove(self, held: LiveSession | LeftSession) -> None:
        """Close a session: its generations are cancelled, late answers of theirs change nothing."""
        if isinstance(held, LeftSession):
            self.drop(held)
            held.remove()
            return
        held.closed = True
        del self._sessions[held.session_id]
        for running in held.generations.values():
            running.task.cancel()
        if held.journal is not None:
            held.journal.remove()

    def drop(self, left: LeftSession) -> None:
        """Hold a left session no more; its file stays."""
        del self.left[left.session_id]
        left.end()

    def expire(self, at_most: int = 100) -> list[LiveSession | LeftSession]:
        """Close what has been idle for too long, so many of it at once; what was closed. None of it generates."""
        gone: list[LiveSession | LeftSession] = []
        while len(gone) < at_most and (oldest := self._oldest()) is not None and self.next_due_s() <= 0:
            if isinstance(oldest, LiveSession) and oldest.generations:
                self.use(oldest)
            else:
                self.remove(oldest)
                gone.append(oldest)
        return gone

    def next_due_s(self) -> float:
        """Seconds until a session may have been idle for too long; below zero where it has."""
        oldest = self._oldest()
        return self._idle_s if oldest is None else oldest.used_at + self._idle_s - self._clock()

    def _oldest(self) -> LiveSession | LeftSession | None:
        """The one that was used longest ago. A left one that is asked for is in use."""
        left = next((one for one in self.left.values() if one.asked is None), None)
        return left or next(iter(self._sessions.values()), None)

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
        self.check_client(live, tokens)
        self.use(live)
        return live

    def check_client(self, held: LiveSession | LeftSession, tokens: Sequence[str]) -> None:
        """Refuse who has neither a session's key nor the driver's token.

        Raises:
            SessionRefused: 401.
        """
        wanted = (held.opened.key, self._driver_token)
        if self._driver_token is None or any(one is not None and _is_among(one, tokens) for one in wanted):
            return
        raise SessionRefused(401, "this session's key is wanted, as Bearer or x-api-key")

    def to_delete(self, session_id: str, tokens: Sequence[str]) -> LiveSession | LeftSession:
        """A session for the driver to remove, restored or not.

        Raises:
            SessionRefused: 401 without the driver's token, 404 for an unknown session.
        """
        self.check_driver(tokens)
        return self.left.get(session_id) or self._find(session_id)

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
