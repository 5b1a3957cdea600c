"""Where this machine keeps what is no batch's: logs of child processes, Prefect's state, spools, fetched models."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def state_home() -> Path:
    """ROLLOUT_HOME, else a folder in XDG's state folder. Not created here."""
    if given := os.environ.get("ROLLOUT_HOME"):
        return Path(given).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "rollout-lake"


@contextmanager
def claim_folder(parent: Path, name: str) -> Iterator[Path]:
    """The first of `name`, `name-2`, ... in `parent` that no living process has, held while the block lasts.

    Raises:
        OSError: it cannot be made, or 999 processes have one.
    """
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        try:
            yield folder
        finally:
            os.close(lock)
        return
    raise OSError(f"{parent}: 999 processes are using it")
