"""A session that an earlier process left in the journal, until it is restored: what is known without its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rollout.session.journal import Opened, SessionJournal


@dataclass(kw_only=True, slots=True, eq=False)
class LeftSession:
    """Its file's path and first frame. `used_at` is of the server's clock, in seconds.

    `asked` is done once the session is left no more, whatever became of it; null while no request waits for
    that. `steps` restores it, `worked_s` seconds so far.
    """

    path: Path
    opened: Opened
    used_at: float
    asked: asyncio.Future[None] | None = None
    steps: Generator[None, None, Any] | None = None
    worked_s: float = 0.0

    @property
    def session_id(self) -> str:
        return self.path.stem

    @property
    def turns(self) -> None:
        """How many generations it has is not known yet."""

    @property
    def over(self) -> bool:
        """Whether it was asked for, and is left no more."""
        return self.asked is not None and self.asked.done()

    async def wait(self) -> None:
        """Until it is left no more. Who waits first has made `asked`."""
        assert self.asked is not None
        await asyncio.shield(self.asked)  # one client that goes takes nothing from the others

    def end(self) -> None:
        """It is left no more: its restore stops, requests go on."""
        self.stop()
        if self.asked is not None and not self.asked.done():
            self.asked.set_result(None)

    def stop(self) -> None:
        """Restore no further; its file is closed."""
        if self.steps is not None:
            self.steps.close()

    def remove(self) -> None:
        """Delete its file."""
        SessionJournal(self.path).remove()

    def row(self, now: datetime, clock: float) -> dict[str, Any]:
        """Its line in GET /sessions; what only its turns say is null."""
        return {
            "session_id": self.session_id,
            "version": None,
            "turns": self.turns,
            "running": 0,
            "age_s": (now - self.opened.opened_at).total_seconds(),
            "idle_s": clock - self.used_at,
            "restoring": True,
        }
