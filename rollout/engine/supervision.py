"""What the supervisor of a host's engines and its users share: a folder with two locks and a status file.

supervisor.lock  held exclusively by the supervisor for as long as it lives: there is one per host
users.lock       held shared by each user. The kernel drops it with a user that is killed, so nobody counts;
                 a supervisor that can take it exclusively has no user, and ends its engines
status.json      who supervises, what it serves and how that is; replaced as a whole
supervisor.log   what the supervisor says; engine-<n>.log what the engines say

The folder is this host's own: ROLLOUT_HOME may be shared between hosts.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from rollout.process import started_at

State = Literal["starting", "ready", "failed", "ending"]

TAKEN = 3
"""A supervisor's exit code: another one was there first."""


@dataclass(kw_only=True, slots=True)
class EngineStatus:
    """One engine: its port, its process while it is up, and how often it was lost."""

    port: int
    gpus: list[str] = field(default_factory=list)
    up: bool = False
    pid: int | None = None
    losses: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(kw_only=True, slots=True)
class Status:
    """A supervisor's own account. `key` is what its users must agree on; `started` tells its pid from a later one's."""

    pid: int
    started: int | None
    key: str
    model: str
    recipe: str
    flags: list[str]
    flags_hash: str
    state: State = "starting"
    message: str = ""
    engines: list[EngineStatus] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.started is not None and started_at(self.pid) == self.started

    @property
    def ends(self) -> bool:
        return self.state in ("failed", "ending")

    @property
    def losses(self) -> int:
        return sum(engine.losses for engine in self.engines)

    @property
    def up(self) -> bool:
        """Whether there is an engine to use: one that is being started again is stood in for by the others."""
        return self.state == "ready" and any(engine.up for engine in self.engines)


class SupervisionFolder:
    """The files of one host's supervision below `home`."""

    def __init__(self, home: Path) -> None:
        self.path = home / "engines" / socket.gethostname()
        self.path.mkdir(parents=True, exist_ok=True)
        self.users = self.path / "users.lock"
        self.log = self.path / "supervisor.log"
        self._status = self.path / "status.json"

    def engine_log(self, number: int) -> Path:
        return self.path / f"engine-{number}.log"

    def read(self) -> Status | None:
        """The last status that was written, whoever wrote it; null if there is none."""
        try:
            found: dict[str, Any] = json.loads(self._status.read_text())
            return Status(**{**found, "engines": [EngineStatus(**engine) for engine in found["engines"]]})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, status: Status) -> None:
        part = self._status.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(status), indent=1))
        part.replace(self._status)

    def remove(self) -> None:
        self._status.unlink(missing_ok=True)

    def lock_supervisor(self) -> TextIO | None:
        """The supervisor's lock, held until it is closed; null while another process has it."""
        return _lock(self.path / "supervisor.lock", fcntl.LOCK_EX)

    def lock_unused(self) -> TextIO | None:
        """All users' lock at once, which keeps new ones out until it is closed; null while there is a user."""
        return _lock(self.users, fcntl.LOCK_EX)

    def lock_user(self) -> TextIO | None:
        """One user's lock; null while a supervisor is ending."""
        return _lock(self.users, fcntl.LOCK_SH)


def _lock(path: Path, kind: int) -> TextIO | None:
    held = path.open("a")
    try:
        fcntl.flock(held, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        return None
    return held
