"""Restores what an earlier process left in the journal, while the server answers: what is asked for, then the rest.

A server over thousands of sessions answers as soon as it has read the first frame of each file. A left
session comes back with its first request, which waits for that, or in its turn. All of it is done in slices
of a millisecond, one in each round of the event loop, so that it holds live sessions up by so much; while no
request waits for it, it rests for as long as it works.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import deque
from collections.abc import Generator, Sequence

from rollout.errors import CannotRestore, SessionRefused, UnknownPart
from rollout.session.events import EventLog
from rollout.session.journal import read_left, read_opened
from rollout.session.keeping import Keeping
from rollout.session.left import LeftSession
from rollout.session.live import LiveSession, LiveSessions
from rollout.session.metrics import Metrics
from rollout.session.replaying import restore_session
from rollout.tito.renderer import Tito

log = logging.getLogger(__name__)

SLICE_S = 0.001
"""Seconds of work between two looks at what else there is; one exchange or frame more at most."""
AGAIN_S = 0.1
"""Seconds until a file is tried again that could not be opened because too many are."""
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


class Restoring:
    """The left sessions of one server, and what restores them, one after the other."""

    def __init__(
        self, keeping: Keeping, sessions: LiveSessions, tito: Tito, *, metrics: Metrics, events: EventLog
    ) -> None:
        self._keeping = keeping
        self._sessions = sessions
        self._tito = tito
        self._metrics = metrics
        self._events = events
        self._asked: deque[LeftSession] = deque()

    def find(self) -> None:
        """Hold every session in the journal as left. A file that cannot be read is told, and keeps no other away."""
        for path in self._keeping.left():
            try:
                opened = read_opened(path)
            except (CannotRestore, OSError) as error:
                self._give_up(path.stem, error)
                continue
            if opened is not None:
                self._sessions.leave(path, opened)

    async def restore(self) -> None:
        """Restore all; what is asked for meanwhile first. To be run as a task beside the requests."""
        while (left := self._next()) is not None:
            await asyncio.sleep(self._work(left))

    def stop(self) -> None:
        """No file is open any more; what is left stays in the journal. `restore` has been cancelled before."""
        for left in self._sessions.left.values():
            left.stop()

    async def for_driver(self, session_id: str, tokens: Sequence[str]) -> LiveSession:
        """As LiveSessions.for_driver, a left session included."""
        left = self._sessions.left.get(session_id)
        if left is not None:
            self._sessions.check_driver(tokens)
            await self._ask(left)
        return self._sessions.for_driver(session_id, tokens)

    async def for_client(self, session_id: str, tokens: Sequence[str]) -> LiveSession:
        """As LiveSessions.for_client, a left session included."""
        left = self._sessions.left.get(session_id)
        if left is not None:
            self._sessions.check_client(left, tokens)
            await self._ask(left)
        return self._sessions.for_client(session_id, tokens)

    async def _ask(self, left: LeftSession) -> None:
        if left.asked is None:
            left.asked = asyncio.get_running_loop().create_future()
            self._asked.append(left)
        await left.wait()

    def _next(self) -> LeftSession | None:
        """What was asked for first, else what was begun, else any; null once all is done."""
        while self._asked and self._asked[0].over:
            self._asked.popleft()
        return self._asked[0] if self._asked else next(iter(self._sessions.left.values()), None)

    def _work(self, left: LeftSession) -> float:
        """One slice of restoring; seconds to rest before the next."""
        if left.steps is None:
            left.steps = self._restored(left)
        began = time.perf_counter()
        try:
            next(left.steps)
            while time.perf_counter() - began < SLICE_S:
                next(left.steps)
        except StopIteration as done:
            self._done(left, done.value, left.worked_s + time.perf_counter() - began)
        except OSError as error:
            if error.errno in _TOO_MANY:
                left.steps = None
                return AGAIN_S
            self._fail(left, error)
        except Exception as error:
            self._fail(left, error)
        worked_s = time.perf_counter() - began
        left.worked_s += worked_s
        return worked_s if left.asked is None else 0.0

    def _restored(self, left: LeftSession) -> Generator[None, None, LiveSession | None]:
        """In steps: the session as it was; None where nobody was ever told of it."""
        found = yield from read_left(left.path)
        if found is None:
            return None
        yield
        session = yield from restore_session(found.tape, self._tito, context_length=found.opened.context_length)
        live = LiveSession(session=session, opened=found.opened, journal=found.journal)
        live.refused.update(found.tape.refused)
        return live

    def _done(self, left: LeftSession, live: LiveSession | None, worked_s: float) -> None:
        if live is None:
            self._sessions.drop(left)
            return
        self._keeping.attach(live)
        self._sessions.come_back(left, live)
        self._metrics.add("sessions_restored_total")
        self._events.write("restored", session_id=left.session_id, turns=live.turns, ms=round(worked_s * 1000, 1))

    def _fail(self, left: LeftSession, error: Exception) -> None:
        self._sessions.drop(left)
        self._give_up(left.session_id, error)

    def _give_up(self, session_id: str, error: Exception) -> None:
        """Tell that a session does not come out again; its file stays."""
        text = str(error)
        if isinstance(error, OSError):
            text = error.strerror or type(error).__name__
        elif not isinstance(error, CannotRestore | SessionRefused | UnknownPart):
            log.error("session %s is not restored", session_id, exc_info=error)
            text = type(error).__name__
        self._metrics.add("sessions_not_restored_total")
        self._events.write("not_restored", level="error", session_id=session_id, text=text)
