"""What rollouts know of the engine's supervision: whether it is up, and how often it was lost."""

from __future__ import annotations

import asyncio
import time

_POLL_S = 0.05


class Outages:
    """One per worker, told by whoever supervises its engine.

    `count` is the number of times that the engine, or one of several, was lost; `up` whether one is there;
    `failure` says why it will not come back. `notice_s`: seconds after which a loss has been noticed.
    """

    def __init__(self, *, notice_s: float = 1.0) -> None:
        self.count, self.up, self.notice_s = 0, True, notice_s
        self.failure: str | None = None

    def lost(self) -> None:
        self.count += 1
        self.up = False

    def gave_up(self, failure: str) -> None:
        self.failure, self.up = failure, False

    async def wait_up(self, timeout_s: float) -> float:
        """Wait while the engine is being started again; the seconds that took. Returns at once if it never will be."""
        began = time.monotonic()
        while not self.up and self.failure is None and time.monotonic() - began < timeout_s:
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - began

    async def since(self, count: int) -> bool:
        """Whether the engine was lost after `count` was read; waits for as long as that may stay unnoticed."""
        end = time.monotonic() + self.notice_s
        while self.count == count and self.failure is None and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        return self.count != count
