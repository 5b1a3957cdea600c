"""The journal: a folder with one file per live session, from which a server that crashed goes on.

    file    = frame(opened) frame(TAPE_SCHEMA) frame(the session's row) (frame(exchange) | frame(refused))...
    frame   = see rollout.frames
    opened  = JSON: the session's key, when it was opened, and the context length that it was opened with
    row, exchange = a row of the tape (rollout.session.tape) as RecordBatch.serialize() gives it
    refused = JSON: {"refused": a key of Tape.refused}, one more of it

A turn's frame is in the file before its client has the answer, an opened session's before its id is
told. Files are private: they hold the sessions' keys. They go with their sessions.

What survives: after a kill of the process, all that was answered. After a loss of power, what the kernel had
written back by itself, because nothing is synced: a session comes back without its last turns then.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from rollout.errors import BadConfig, CannotRestore, SessionRefused
from rollout.frames import Payload, read_frames, write_frame
from rollout.session.tape import Tape, rows_to_tape, session_row
from rollout.tape_columns import TAPE_SCHEMA

log = logging.getLogger(__name__)

FORMAT = 1
FAILED_CODE = "journal_failed"
_SUFFIX = ".journal"
_LOCK = "lock"
_ROW = pa.struct(list(TAPE_SCHEMA))
_JSON = b"{"
"""How a frame begins that is no row."""
_OTHER_RELEASE = "another release of this server wrote its file"


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """What a server knows of a session from its opening on, beside the session's own settings."""

    key: str
    opened_at: datetime
    context_length: int | None = None


class SessionJournal:
    """The file of one session; it is open only while something is appended."""

    __slots__ = ("_digest", "_end", "path")

    def __init__(self, path: Path, end: int = 0, digest: bytes = b"") -> None:
        """Use Journal.open or read_left. What comes next goes to the offset `end`, behind a frame with `digest`."""
        self.path, self._end, self._digest = path, end, digest

    def append(self, row: dict[str, Any]) -> int:
        """Keep a row of the tape; bytes written.

        Raises:
            SessionRefused: 500, the disk does not take it. The file is as it was.
        """
        return self._append([_packed(row)])

    def refused(self, status: str) -> int:
        """Keep that one more request was refused, as `append` does."""
        return self._append([orjson.dumps({"refused": status})])

    def remove(self) -> None:
        """Delete the file: its session is no more."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s stays: %s", self.path.name, error.strerror)

    def _append(self, *payloads: Payload) -> int:
        end, digest = self._end, self._digest
        try:
            # Not kept open: a server has more sessions than a process may have open files.
            descriptor = os.open(self.path, os.O_WRONLY)
            try:
                for payload in payloads:
                    end, digest = write_frame(descriptor, payload, end=end, before=digest)
            except OSError:
                os.ftruncate(descriptor, self._end)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            log.error("%s takes no more: %s", self.path.name, error.strerror)
            text = f"the turn could not be kept: {error.strerror}"
            raise SessionRefused(500, text, code=FAILED_CODE) from None
        written = end - self._end
        self._end, self._digest = end, digest
        return written


@dataclass(kw_only=True, slots=True, eq=False)
class Journaled:
    """A session as its file has it: what it was opened with, its tape, and its file to go on with."""

    opened: Opened
    tape: Tape
    journal: SessionJournal


class Journal:
    """The folder of all files. One server at a time has it."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            BadConfig: the folder cannot be had, or another server has it.
        """
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BadConfig(f"journal {folder}: another session server has it") from None
        except OSError as error:
            raise BadConfig(f"journal {folder}: {error.strerror}") from error

    def close(self) -> None:
        """Give the folder up; its files stay."""
        os.close(self._lock)

    def open(self, opened: Opened, tape: Tape) -> SessionJournal:
        """A new file of a session that has no exchange yet.

        Raises:
            SessionRefused: 500, as SessionJournal.append.
        """
        made = SessionJournal(self.folder / f"{tape.session_id}{_SUFFIX}")
        try:
            os.close(os.open(made.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            made._append([_opened_json(opened)], [_schema()], [_packed(session_row(tape))])
        except OSError as error:
            text = f"the session could not be kept: {error.strerror}"
            raise SessionRefused(500, text, code=FAILED_CODE) from None
        except SessionRefused:
            made.remove()
            raise
        return made

    def files(self) -> list[Path]:
        """The files of all sessions in the folder; each is named by its session."""
        return sorted(self.folder.glob(f"*{_SUFFIX}"))


def read_opened(path: Path) -> Opened | None:
    """What the session of a journal's file was opened with; the rest is not looked at.

    A file that breaks off even before that is removed, and gives None.

    Raises:
        CannotRestore: another release wrote it; the file stays as it is.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        first = next(read_frames(file), None)
    if first is None:
        path.unlink()
        return None
    return _opened(first[0])


def read_left(path: Path) -> Generator[None, None, Journaled | None]:
    """In steps, a frame each: the session of a journal's file, which is cut behind its last good frame.

    One that breaks off before its session was told to anybody is removed, and gives None.

    Raises:
        CannotRestore: another release wrote it, with other columns; the file stays as it is.
        OSError: it cannot be read.
    """
    with path.open("r+b") as file:
        frames = read_frames(file)
        head = list(islice(frames, 3))
        if len(head) < 3:
            path.unlink()
            return None
        opened, rows, refused = _opened(head[0][0]), list[dict[str, Any]](), Counter[str]()
        if head[1][0] != _schema():
            raise CannotRestore(_OTHER_RELEASE)
        for frame in chain(head[2:], frames):
            payload, end, digest = frame
            if payload.startswith(_JSON):
                refused[orjson.loads(payload)["refused"]] += 1
            else:
                rows += _unpacked(payload)
            yield
        file.truncate(end)
    tape, _ = rows_to_tape(rows)
    tape.refused = dict(refused)
    return Journaled(opened=opened, tape=tape, journal=SessionJournal(path, end, digest))


def remove_left(parent: Path, prefix: str) -> None:
    """Remove the journals in `parent` whose folders' names begin so, if no living server has them."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(BadConfig, OSError):
            remove_journal(folder)


def remove_journal(folder: Path) -> None:
    """Remove a journal's folder with all its sessions.

    Raises:
        BadConfig: a living server has it.
        OSError: it cannot be removed.
    """
    held = Journal(folder)
    try:
        for path in (*folder.glob(f"*{_SUFFIX}"), folder / _LOCK):
            path.unlink()
        folder.rmdir()
    finally:
        held.close()


def _opened_json(opened: Opened) -> bytes:
    facts = {"key": opened.key, "opened_at": opened.opened_at, "context_length": opened.context_length}
    return orjson.dumps({"journal": FORMAT, **facts})


def _opened(payload: bytes) -> Opened:
    facts = orjson.loads(payload)
    if facts["journal"] != FORMAT:
        raise CannotRestore(_OTHER_RELEASE)
    opened_at = datetime.fromisoformat(facts["opened_at"])
    return Opened(key=facts["key"], opened_at=opened_at, context_length=facts["context_length"])


def _schema() -> bytes:
    schema: bytes = TAPE_SCHEMA.serialize().to_pybytes()
    return schema


def _packed(row: dict[str, Any]) -> memoryview:
    """One row of TAPE_SCHEMA as an Arrow message. By way of a struct: three times as fast as column by column."""
    return memoryview(pa.RecordBatch.from_struct_array(pa.array([row], _ROW)).serialize())


def _unpacked(message: bytes) -> list[dict[str, Any]]:
    """The rows of an Arrow message."""
    rows: list[dict[str, Any]] = pa.ipc.read_record_batch(pa.py_buffer(message), TAPE_SCHEMA).to_pylist()
    return rows
