"""Finds an engine that hangs although it answers /health, and takes no long queue for one.

An engine makes progress when a counter of its /v1/loads moves (tokens held, prefilled, decoded), when
it has nothing to do, or when /health_generate gives its token. The counters are asked first: a
generation of ours beside a batch's could move that batch's last bits, where kernels are not
batch-invariant. An engine without /v1/loads is asked for a token each time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

_COUNTERS = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_used_tokens",
    "total_prefill_uncached_tokens",
    "total_prefill_busy_us",
    "decode_moments",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When an engine is given up, and when all hope; in seconds.

    alive_s       between two looks at its processes
    probe_s       between two questions for progress
    hang_s        without progress: it hangs
    idle_s        with nothing to do, until it is asked for a token all the same
    steady_s      a life so long makes the next death the first of a row
    max_restarts  deaths in a row after each of which it is started again
    backoff_s     before the second start in a row, doubled each time up to backoff_limit_s; the first is at once
    """

    alive_s: float = 0.1
    probe_s: float = 2.0
    hang_s: float = 120.0
    idle_s: float = 60.0
    steady_s: float = 60.0
    max_restarts: int = 6
    backoff_s: float = 0.5
    backoff_limit_s: float = 10.0

    def pause_s(self, deaths: int) -> float:
        """Seconds to wait before the start that follows so many deaths in a row."""
        return 0.0 if deaths < 2 else min(self.backoff_limit_s, self.backoff_s * 2.0 ** (deaths - 2))


class HangWatch:
    """Watches one engine over HTTP."""

    def __init__(self, url: str, limits: Limits) -> None:
        self._url, self._limits = url, limits
        self._timeout_s = min(30.0, limits.hang_s / 2)
        self._seen: object = None
        self._progress = self._rested = time.monotonic()

    async def until_hung(self) -> str:
        """Return when the engine has made no progress for `hang_s` seconds; says what was seen."""
        async with aiohttp.ClientSession() as http:
            while True:
                await asyncio.sleep(self._limits.probe_s)
                asked = time.monotonic()
                well = await self._makes_progress(http)
                now = time.monotonic()
                # A loop that was blocked meanwhile knows nothing of the engine.
                if well or now - asked > self._timeout_s * 2 + 5.0:
                    self._progress = now
                elif now - self._progress > self._limits.hang_s:
                    return f"it hangs: no token for {now - self._progress:.0f} s"

    async def _makes_progress(self, http: aiohttp.ClientSession) -> bool:
        loads = await self._loads(http)
        now = time.monotonic()
        if loads is None:
            return await self._generates(http)
        moved, self._seen = loads != self._seen, loads
        idle = not any(load.get("num_running_reqs") or load.get("num_waiting_reqs") for load in loads)
        if not idle or moved:
            self._rested = now
        if moved or (idle and now - self._rested < self._limits.idle_s):
            return True
        if idle or now - self._progress > self._limits.hang_s / 2:
            well = await self._generates(http)
            if well:
                self._rested = time.monotonic()
            return well
        return False

    async def _loads(self, http: aiohttp.ClientSession) -> list[dict[str, Any]] | None:
        """The counters of each rank, null where the engine does not tell them."""
        try:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            async with http.get(f"{self._url}/v1/loads", timeout=timeout) as reply:
                loads = orjson.loads(await reply.read())["loads"] if reply.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
            return None
        return None if loads is None else [{name: load.get(name) for name in _COUNTERS} for load in loads]

    async def _generates(self, http: aiohttp.ClientSession) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            async with http.get(f"{self._url}/health_generate", timeout=timeout) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
