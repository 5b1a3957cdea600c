"""How far a fetched checkpoint is, said now and then; a quick one says nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fsspec.callbacks import Callback

QUIET_S = 2.0
LINE_S = 5.0
"""Seconds before the first line, and between two lines."""

_GB = 1e9


class Progress(Callback):  # type: ignore[misc]
    """fsspec's callback of one transfer of several files, counted together; sizes in bytes."""

    def __init__(self, uri: str, total: int, say: Callable[[str], None]) -> None:
        super().__init__()
        self._uri, self._total, self._say, self._done = uri, total, say, 0
        self._began = time.monotonic()
        self._due = self._began + QUIET_S

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Callback:
        return _File(self)

    def add(self, n_bytes: int) -> None:
        """Count bytes that have arrived, and say so when it is time for a line."""
        self._done += n_bytes
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LINE_S
        rate = self._done / 1e6 / (now - self._began)
        text = f"fetching {self._uri}: {self._done / _GB:.2f} of {self._total / _GB:.2f} GB, {rate:.0f} MB/s"
        self._say(text)


class _File(Callback):  # type: ignore[misc]
    def __init__(self, whole: Progress) -> None:
        super().__init__()
        self._whole = whole

    def relative_update(self, inc: int = 1) -> None:
        self._whole.add(inc)
