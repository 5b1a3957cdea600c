"""How far a fetched checkpoint is, said now and then; a quick one says nothing. Also where a fetch is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from fsspec.callbacks import Callback

QUIET_S = 2.0
LINE_S = 5.0
"""Seconds before the first line, and between two lines."""

_GB = 1e9


class GivenUp(Exception):
    """Whoever asked for the checkpoint has gone."""


class Watch:
    """One fetch as its caller sees it: `say` is told lines, `left` is set when the caller has gone."""

    def __init__(self, say: Callable[[str], None] | None, left: threading.Event | None) -> None:
        self.say = say or (lambda text: None)
        self._left = left or threading.Event()

    def wait(self, seconds: float = 0.0) -> None:
        """Wait; raises GivenUp when the caller has gone."""
        if self._left.wait(seconds) if seconds else self._left.is_set():
            raise GivenUp


class Progress(Callback):  # type: ignore[misc]
    """fsspec's callback of one transfer of several files, counted together; sizes in bytes."""

    def __init__(self, uri: str, total: int, watch: Watch) -> None:
        super().__init__()
        self._uri, self._total, self._watch, self._done = uri, total, watch, 0
        self._began = time.monotonic()
        self._due = self._began + QUIET_S

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Callback:
        return _File(self)

    def add(self, n_bytes: int) -> None:
        """Count bytes that have arrived, and say so when it is time for a line; raises GivenUp."""
        self._watch.wait()
        self._done += n_bytes
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LINE_S
        rate = self._done / 1e6 / (now - self._began)
        text = f"fetching {self._uri}: {self._done / _GB:.2f} of {self._total / _GB:.2f} GB, {rate:.0f} MB/s"
        self._watch.say(text)


class _File(Callback):  # type: ignore[misc]
    def __init__(self, whole: Progress) -> None:
        super().__init__()
        self._whole = whole

    def relative_update(self, inc: int = 1) -> None:
        self._whole.add(inc)
