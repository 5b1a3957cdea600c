"""Keeps what agents print off the worker's standard output, which belongs to the command's answer.

An agent in this process, and any child that it starts, writes to file descriptor 1 what it likes. While
rollouts run, that descriptor is a pipe: the first megabyte goes to a log, the rest is dropped, so that
a flood fills neither disk nor memory.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KEPT_BYTES = 2**20


@contextmanager
def contained_output(log: Path) -> Iterator[None]:
    """For as long as the block lasts, descriptor 1 ends in `log`, which keeps KEPT_BYTES of it.

    What a process that lives on writes into it later is read and dropped.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    source, sink = os.pipe()
    ended, end = os.pipe()
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(sink, 1)
    os.close(sink)
    written = threading.Event()
    drain = threading.Thread(
        target=_drain, args=(source, ended, log.open("wb"), written), name="agents' output", daemon=True
    )
    drain.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
        os.close(end)
        written.wait(1.0)  # whoever else holds the pipe may never stop writing


def _drain(source: int, ended: int, log: BinaryIO, written: threading.Event) -> None:
    """Read `source` into `log` until it is at its end, or empty once `ended` is; read on for those that hold it."""
    with os.fdopen(source, "rb", 0) as pipe, os.fdopen(ended, "rb", 0) as end:
        _keep(pipe, end, log)
        written.set()
        while pipe.read(65536):
            pass


def _keep(pipe: BinaryIO, end: BinaryIO, log: BinaryIO) -> None:
    ready, kept, dropped = select.poll(), 0, 0
    for one in (pipe, end):
        ready.register(one, select.POLLIN)
    with log:
        # Where only the end is ready, all that was written before it has been read.
        while pipe.fileno() in dict(ready.poll()) and (piece := pipe.read(65536)):
            room = KEPT_BYTES - kept
            log.write(piece[:room])
            kept += min(len(piece), room)
            dropped += max(0, len(piece) - room)
        if dropped:
            log.write(f"\n... {dropped} more bytes were dropped\n".encode())
