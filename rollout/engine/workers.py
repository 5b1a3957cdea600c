"""The engines behind a router (sglang-router, smg), which knows neither of what an engine tells nor of aborts."""

from __future__ import annotations

import time
from typing import Any

from rollout.engine.wire import Wire
from rollout.errors import EngineRefused

_ASK_S = 10.0
_FRESH_S = 10.0
"""How long the list of a router's workers is believed: workers come and go."""


class Workers:
    """What stands behind one base URL: nothing where that is an engine itself."""

    def __init__(self, wire: Wire, base_url: str) -> None:
        self._wire, self._base_url = wire, base_url
        self._urls: list[str] = []
        self._asked: float | None = None
        self._engine = False

    async def urls(self) -> list[str]:
        """The workers' own URLs, each once; empty where `base_url` is an engine.

        Raises:
            EngineError: it cannot be asked.
        """
        if self._engine or (self._asked is not None and time.monotonic() - self._asked < _FRESH_S):
            return self._urls
        try:
            told = await self._wire.ask("GET", f"{self._base_url}/workers", _ASK_S)
        except EngineRefused:  # an engine has no such path
            told = {}
        if not isinstance(told.get("workers"), list):
            self._engine = True
            return self._urls
        self._urls, self._asked = read_workers(told["workers"]), time.monotonic()
        return self._urls


def read_workers(told: list[Any]) -> list[str]:
    """HTTP URLs from a router's list: ranks of one server ("URL@0", "URL@1") are one, one of gRPC has none."""
    urls = (str(worker.get("url") or "") for worker in told if isinstance(worker, dict))
    found = (_without_rank(url) for url in urls if url.startswith(("http://", "https://")))
    return list(dict.fromkeys(found))


def _without_rank(url: str) -> str:
    server, at, rank = url.rpartition("@")
    return (server if at and rank.isdecimal() else url).rstrip("/")
