"""Keeps what agents print off the worker's standard output, which belongs to the command's answer.

An agent in this process, and any child that it starts, writes to file descriptor 1 what it likes. While
rollouts run, that descriptor is a pipe: the first megabyte goes to a log, the rest is dropped, so that
a flood fills neither disk nor memory.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KEPT_BYTES = 2**20


@contextmanager
def contained_output(log: Path) -> Iterator[None]:
    """For as long as the block lasts, descriptor 1 ends in `log`, which keeps KEPT_BYTES of it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    source, sink = os.pipe()
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(sink, 1)
    os.close(sink)
    drain = threading.Thread(target=_drain, args=(source, log.open("wb")), name="agents' output", daemon=True)
    drain.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
        drain.join(1.0)  # a process elsewhere may hold the pipe open; the thread then reads on


def _drain(source: int, log: BinaryIO) -> None:
    kept = dropped = 0
    with log, os.fdopen(source, "rb", 0) as pipe:
        while piece := pipe.read(65536):
            room = KEPT_BYTES - kept
            log.write(piece[:room])
            kept += min(len(piece), room)
            dropped += max(0, len(piece) - room)
        if dropped:
            log.write(f"\n... {dropped} more bytes were dropped\n".encode())
