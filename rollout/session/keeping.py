"""Live sessions and the journal: what is kept of them, and how they come back."""

from __future__ import annotations

import time

from rollout.errors import CannotRestore, SessionRefused, UnknownPart
from rollout.session.events import EventLog
from rollout.session.journal import Journal, Left, Opened, read_left
from rollout.session.live import LiveSession, LiveSessions
from rollout.session.metrics import Metrics
from rollout.session.node import Node
from rollout.session.recording import record_exchange
from rollout.session.replaying import restore_session
from rollout.session.session import Session
from rollout.session.tape import exchange_row
from rollout.tito.renderer import Tito


class Keeping:
    """Opens sessions with their files, appends to these, and restores what an earlier process left.

    Without a journal nothing is kept and nothing comes back.
    """

    def __init__(self, journal: Journal | None, sessions: LiveSessions, metrics: Metrics, events: EventLog) -> None:
        self._journal = journal
        self._sessions = sessions
        self._metrics = metrics
        self._events = events

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
        self._serve(live)
        return live

    def _serve(self, live: LiveSession) -> None:
        if live.journal is not None:
            live.session.keep = lambda node: self._keep(live, node)
        self._sessions.add(live)

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

    def restore(self, tito: Tito) -> None:
        """Serve every session that an earlier process left. One that does not come out again keeps its file.

        Raises:
            OSError: a file cannot be read.
        """
        for path in self._journal.files() if self._journal is not None else ():
            began, session_id = time.perf_counter(), path.stem
            try:
                left = read_left(path)
                if left is None:
                    continue
                self._serve(_restored(left, tito))
            except (CannotRestore, SessionRefused, UnknownPart) as error:
                self._metrics.add("sessions_not_restored_total")
                self._events.write("not_restored", level="error", session_id=session_id, text=str(error))
                continue
            self._metrics.add("sessions_restored_total")
            ms = round((time.perf_counter() - began) * 1000, 1)
            self._events.write("restored", session_id=session_id, turns=len(left.tape.exchanges), ms=ms)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def _restored(left: Left, tito: Tito) -> LiveSession:
    session = restore_session(left.tape, tito, context_length=left.opened.context_length)
    live = LiveSession(session=session, opened=left.opened, journal=left.journal)
    live.refused.update(left.tape.refused)
    return live
