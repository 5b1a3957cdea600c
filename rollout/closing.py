"""What is closed by leaving its block."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class ClosedByBlock:
    """An async context manager that is itself, and calls its `close` when the block is left."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give up what is held; nothing may be asked of it any more."""
        raise NotImplementedError
