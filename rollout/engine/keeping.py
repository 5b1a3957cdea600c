"""Keeps one engine alive: sees it die or hang, ends what is left of it and starts it again, up to a limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rollout.engine.watch import HangWatch, Limits
from rollout.errors import RolloutLakeError, describe
from rollout.process import Child

log = logging.getLogger(__name__)

Start = Callable[[], Awaitable[Child]]
"""Starts the engine, on the same port each time; ready when it returns. Raises ChildFailed."""


class EngineKeeper:
    """One engine and its restarts. Everything in one thread: a child is bound to the life of the one that forks it.

    `up` says whether it answers, `losses` how often it was lost, and `failure` why it is not started any more.
    """

    def __init__(
        self, name: str, start: Start, *, limits: Limits | None = None, changed: Callable[[], None] | None = None
    ) -> None:
        """`changed` is called after every change of `up`, `losses` or `failure`."""
        self.name, self._start, self.limits = name, start, limits or Limits()
        self._changed = changed or (lambda: None)
        self.child: Child | None = None
        self.up, self.losses = False, 0
        self.failure: str | None = None
        self._started_at = 0.0

    async def start(self) -> Child:
        """Start the engine.

        Raises:
            ChildFailed: it did not become ready; it is not tried again.
        """
        self.child = await self._start()
        self._started_at, self.up = time.monotonic(), True
        self._changed()
        return self.child

    async def keep(self) -> None:
        """Start the engine again whenever it is lost; returns when it was lost too often in a row."""
        try:
            await self._keep()
        except Exception as error:  # a bug of ours: rollouts must not wait for ever for an engine that nobody keeps
            log.exception("%s is not kept any more", self.name)
            self.up, self.failure = False, f"{self.name} is not kept any more: {describe(error)}"
            self._changed()

    async def _keep(self) -> None:
        deaths = 0
        while True:
            reason = await self._until_lost()
            self.up, self.losses = False, self.losses + 1
            self._changed()
            deaths = 1 if time.monotonic() - self._started_at > self.limits.steady_s else deaths + 1
            await self._end()
            while not self.up:
                if deaths > self.limits.max_restarts:
                    self.failure = f"{self.name} was lost {deaths} times in a row, the last time: {reason}"
                    log.error("%s", self.failure)
                    self._changed()
                    return
                log.warning("%s was lost (%s) and is started again, number %d", self.name, reason, deaths)
                await asyncio.sleep(self.limits.pause_s(deaths))
                try:
                    await self.start()
                except (RolloutLakeError, OSError) as error:
                    reason, deaths = str(error), deaths + 1

    async def _until_lost(self) -> str:
        assert self.child is not None
        hung = asyncio.create_task(HangWatch(self.child.url, self.limits).until_hung())
        try:
            while (reason := self.child.lost()) is None and not hung.done():
                await asyncio.sleep(self.limits.alive_s)
            return reason or hung.result()
        finally:
            hung.cancel()
            with suppress(asyncio.CancelledError):
                await hung

    async def _end(self) -> None:
        """End all of a lost engine, so that its port is free."""
        if self.child is not None:
            await asyncio.to_thread(self.child.stop, 1.0)

    async def stop(self) -> None:
        """End the engine and all of its processes."""
        self.up = False
        if self.child is not None:
            await asyncio.to_thread(self.child.stop)
