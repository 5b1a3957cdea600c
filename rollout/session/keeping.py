"""Live sessions and the journal: what is kept of them, and when."""

from __future__ import annotations

from pathlib import Path

from rollout.errors import SessionRefused
from rollout.session.journal import Journal, Opened
from rollout.session.live import LiveSession, LiveSessions
from rollout.session.metrics import Metrics
from rollout.session.node import Node
from rollout.session.recording import record_exchange
from rollout.session.session import Session
from rollout.session.tape import exchange_row


class Keeping:
    """Opens sessions with their files, and appends to these. Without a journal nothing is kept."""

    def __init__(self, journal: Journal | None, sessions: LiveSessions, metrics: Metrics) -> None:
        self._journal = journal
        self._sessions = sessions
        self._metrics = metrics

    def add(self, session: Session, opened: Opened) -> LiveSession:
        """Serve a new session.

        Raises:
            SessionRefused: 500, the journal does not take it.
        """
        live = LiveSession(session=session, opened=opened)
        if self._journal is not None:
            try:
                live.journal = self._journal.open(opened, session.tape())
            except SessionRefused:
                self._metrics.add("journal_failures_total")
                raise
        self.attach(live)
        self._sessions.add(live)
        return live

    def attach(self, live: LiveSession) -> None:
        """Keep every turn of a session in its file from now on, where it has one."""
        if live.journal is not None:
            live.session.keep = lambda node: self._keep(live, node)

    def left(self) -> list[Path]:
        """The files of the sessions that an earlier process left."""
        return self._journal.files() if self._journal is not None else []

    def _keep(self, live: LiveSession, node: Node) -> None:
        assert live.journal is not None
        before = live.session.nodes[-1] if live.session.nodes else None
        row = exchange_row(live.session.session_id, record_exchange(node, before))
        try:
            self._metrics.add("journal_bytes_total", live.journal.append(row))
        except SessionRefused:
            self._metrics.add("journal_failures_total")
            raise

    def count_refusal(self, live: LiveSession, kind: str) -> None:
        """One more refused request; the client gets its refusal whether the journal takes this or not."""
        live.refused[kind] += 1
        if live.journal is None or live.closed:
            return
        try:
            self._metrics.add("journal_bytes_total", live.journal.refused(kind))
        except SessionRefused:
            self._metrics.add("journal_failures_total")

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
