"""Work that goes on beside a block of code, for as long as the block lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, Result]) -> AsyncIterator[asyncio.Task[Result]]:
    """Run `work` as a task that is cancelled, and waited for, when the block is left.

    Raises:
        Exception: what `work` itself failed with, when the block is left.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
