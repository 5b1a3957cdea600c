"""Backpressure: requests wait at our side while the engine's own queue is long.

What waits here is sent in the order in which it came, can leave at once, and is not lost when the engine is. A
queue inside the engine is none of it, and hides from a router which of its workers is free. Until `bound`
requests are under way nothing is asked and nothing waits; above that the engine's /v1/loads says, once a second,
how many more it has room for.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollout.errors import EngineError, describe

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Between two looks at the engine's queue, while more than a few requests are under way."""
_ANSWER_S = 2.0
"""Nobody waits longer than this to learn whether there is room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one engine, or one data-parallel rank of it, has to do; null is what it does not say.

    `used` of `capacity` tokens of its cache are taken.
    """

    running: int
    waiting: int
    max_running: int | None = None
    used: int | None = None
    capacity: int | None = None

    def room(self, bound: int) -> float:
        """How many requests more it takes until `bound` of them wait in it."""
        return max(0, bound - self.waiting) + max(0, self._free())

    def _free(self) -> float:
        """How many more can run: by their number, and by the memory that each of those at work takes so far."""
        if not self.max_running:
            return 0 if self.waiting else math.inf
        free = self.max_running - self.running
        if not self.capacity or not self.used:
            return free
        return min(free, self.running * (self.capacity - self.used) // self.used)


def read_loads(told: dict[str, Any]) -> list[Load]:
    """The loads in a body of /v1/loads; what has no counts in it is left out."""
    loads = told.get("loads")
    entries = [entry for entry in loads if isinstance(entry, dict)] if isinstance(loads, list) else []
    found = (_read_load(entry) for entry in entries)
    return [load for load in found if load is not None]


def _read_load(entry: dict[str, Any]) -> Load | None:
    def count(name: str) -> int | None:
        value = entry.get(name)
        return value if isinstance(value, int) else None

    running, waiting = count("num_running_reqs"), count("num_waiting_reqs")
    if running is None or waiting is None:
        return None
    used, capacity = count("num_used_tokens"), count("max_total_num_tokens")
    most = count("max_running_requests")
    return Load(running=running, waiting=waiting, max_running=most, used=used, capacity=capacity)


class Gate:
    """One for the requests that one client sends to one engine, or one router. Belongs to one event loop.

    `limit` is how many may be under way. Whoever waits does so because that many are, so a request that finds
    room is the first in line.
    """

    def __init__(self, ask: Callable[[], Awaitable[Sequence[Load] | None]], *, bound: int) -> None:
        """
        Args:
            ask: the engine's loads now; null if it never will say.
            bound: how many requests may wait in the engine, in each of its ranks.
        """
        self._ask, self._bound = ask, bound
        self._under_way = self._most = 0
        self._limit: float = bound
        self._line: deque[asyncio.Future[None]] = deque()
        self._polling: asyncio.Task[None] | None = None
        self._deaf = False

    @property
    def held(self) -> int:
        """Requests that wait here."""
        return sum(not place.done() for place in self._line)

    async def enter(self, timeout_s: float) -> None:
        """Wait for room; `leave` must follow.

        Raises:
            TimeoutError: there was none for `timeout_s` seconds; `leave` must not follow.
        """
        if self._under_way < self._limit:
            self._under_way += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        self._watch()
        try:
            async with asyncio.timeout(timeout_s):
                await place
        except BaseException:
            if place.done() and not place.cancelled():  # it had its turn in the same moment
                self.leave()
            else:
                with suppress(ValueError):
                    self._line.remove(place)
            raise

    def leave(self) -> None:
        self._most = max(self._most, self._under_way)
        self._under_way -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._line and self._under_way < self._limit:
            place = self._line.popleft()
            if not place.done():
                self._under_way += 1
                place.set_result(None)

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)

    def _watch(self) -> None:
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        """Look at the engine's queue until no second had `bound` requests under way, or it never will say."""
        self._most = self._bound
        while max(self._most, self._under_way) >= self._bound or self._line:
            self._most = 0
            under_way = self._under_way
            room = await self._room()
            self._limit = max(self._bound, under_way + room)
            self._let_in()
            if self._deaf:
                return
            await asyncio.sleep(POLL_S)
        self._limit = self._bound

    async def _room(self) -> float:
        """How many requests more the engine takes; any number where it does not say."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                loads = await self._ask()
        except (EngineError, TimeoutError) as error:
            log.info("no backpressure for now, the engine does not tell its queue: %s", describe(error))
            return math.inf
        if loads is None:
            self._deaf = True
            log.warning("no backpressure: the engine has no /v1/loads, so requests wait in its own queue")
            return math.inf
        return sum(load.room(self._bound) for load in loads) if loads else math.inf
