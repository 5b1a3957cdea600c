"""A session server's log: one event per line on stderr, as a JSON object or as text.

Every event has `ts`, `level` and `event`; those of a session have its `session_id`. What other modules log
comes as the event `log`. No event has the content of a message, a session's key or the driver's token.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp.http_exceptions import HttpProcessingError

from rollout.errors import EngineFailed, EngineRefused, SessionRefused
from rollout.session.options import LogFormat

STDERR = 2
TEXT_LIMIT = 300
"""Characters of a refusal's text that are logged."""
_QUOTED = re.compile(r"'.*'|\".*\"", re.DOTALL)


class EventLog:
    """Writes events to a file descriptor. Not through `logging`: that takes five times as long for every turn."""

    def __init__(self, log_format: LogFormat = "auto", descriptor: int = STDERR) -> None:
        self._descriptor = descriptor
        self._json = log_format == "json" or (log_format == "auto" and not os.isatty(descriptor))

    def write(self, event: str, *, level: str = "info", session_id: str | None = None, **fields: Any) -> None:
        """One event; `fields` are JSON values. A log that cannot be written stops nothing."""
        head = {"ts": datetime.now(UTC), "level": level, "event": event}
        if session_id is not None:
            head["session_id"] = session_id
        line = orjson.dumps({**head, **fields}, default=str, option=orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE)
        with suppress(OSError):
            os.write(self._descriptor, line if self._json else _as_text(line))

    def take_logging(self) -> None:
        """Write what this process logs by `logging` as events, too; from level INFO on."""
        logging.basicConfig(level=logging.INFO, handlers=[_Records(self)], force=True)


class _Records(logging.Handler):
    def __init__(self, events: EventLog) -> None:
        super().__init__()
        self._events = events
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(error := record.exc_info[1], HttpProcessingError):
            # Its text quotes the line that is no HTTP, which may be the one with a key.
            text = f"{record.getMessage()}: {type(error).__name__}"
            self._events.write("log", level="warning", logger=record.name, text=text)
            return
        # The formatter puts an exception's traceback behind the message.
        text = self.format(record).encode(errors="replace").decode()
        self._events.write("log", level=record.levelname.lower(), logger=record.name, text=text)


def text_of(refusal: SessionRefused) -> str:
    """A refusal's text as it may be logged: our own words, without those of a client, an engine or a hook in them."""
    cause = refusal.__cause__
    if isinstance(cause, EngineRefused | EngineFailed):
        return f"the engine answered {cause.status}"
    own = refusal.message if cause is None else refusal.message.partition(":")[0]
    return _QUOTED.sub("'...'", own)[:TEXT_LIMIT]


def _as_text(line: bytes) -> bytes:
    """`line` for readers: time, level, event, then name=value."""
    fields = orjson.loads(line)
    head = [fields.pop("ts"), fields.pop("level").upper(), fields.pop("event")]
    values = {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in fields.items()}
    shown = [f"{name}={value}" for name, value in values.items()]
    return (" ".join([*head, *shown]) + "\n").encode()
