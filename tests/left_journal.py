"""A journal as a server that died leaves it: many sessions that had one and the same conversation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripted import Conversation, call, tiny_tito, user

from rollout.session.journal import Journal, Opened
from rollout.session.tape import Tape, exchange_row

TITO = tiny_tito()


@dataclass(kw_only=True)
class LeftBehind:
    """The conversation: its tape, what its clients repeat, and the context length it was opened with."""

    talk: Conversation
    context_length: int | None = None

    def tape(self, session_id: str) -> Tape:
        """As the session of this id recorded it."""
        tape = self.talk.session.tape()
        tape.session_id = session_id
        return tape

    def write(self, folder: Path, ids: Iterable[str]) -> None:
        """Leave sessions with these ids in the journal; their keys are `key(id)`."""
        journal = Journal(folder)
        for session_id in ids:
            tape = self.tape(session_id)
            opened = Opened(key=key(session_id), opened_at=self.talk.now, context_length=self.context_length)
            file = journal.open(opened, Tape(session_id=session_id, settings=tape.settings))
            for exchange in tape.exchanges:
                file.append(exchange_row(session_id, exchange))
        journal.close()


def key(session_id: str) -> str:
    return f"sk-{session_id}"


def spoken(turns: int, **settings: Any) -> LeftBehind:
    """A conversation of so many turns; every third reply calls a tool."""
    talk = Conversation(TITO, "v2", **{"seed": "07", **settings})
    for turn in range(turns):
        talk.ask(user(f"question {turn}"), text=call(f"k{turn}") if turn % 3 == 2 else f"answer {turn}")
    return LeftBehind(talk=talk)
