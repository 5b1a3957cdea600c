"""Whether a living process has a file locked, found out without touching its lock.

Trying the lock would take it for a moment, and whoever opens the file just then would think it held.
Linux says in /proc/locks which process locked which inode. Both a file's number and its being open in
that process are looked at, because some file systems give one number for several files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

LOCKS = Path("/proc/locks")


def any_locked(paths: Iterable[Path]) -> bool | None:
    """Whether one of the files is flocked by a process of this machine; null where the system does not say.

    A process in another container, on another machine or of another PID namespace is not seen.
    """
    inodes = {status.st_ino: status for path in paths if (status := _stat(path)) is not None}
    if not inodes:
        return False
    try:
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return None
    # "1: FLOCK  ADVISORY  WRITE 1234 fd:01:131 0 EOF"; a line of a waiting process has "->" behind the number.
    held = [(fields[4], int(fields[5].rsplit(":", 1)[1])) for line in lines if (fields := line.split())[1] == "FLOCK"]
    return any(inode in inodes and _has_open(pid, inodes[inode]) for pid, inode in held)


def _has_open(pid: str, status: os.stat_result) -> bool:
    """Whether the process has the file open; taken for true where another user's process cannot be looked at."""
    try:
        descriptors = list(Path("/proc", pid, "fd").iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return any(found is not None and os.path.samestat(found, status) for found in map(_stat, descriptors))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
