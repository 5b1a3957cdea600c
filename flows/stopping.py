"""SIGTERM to the command: the flow is cancelled at its next await, in order, as by Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from contextvars import ContextVar
from typing import Any

_stopped: ContextVar[asyncio.Task[Any] | None] = ContextVar("stopped_by_sigterm", default=None)


def stop_by_sigterm() -> None:
    """Let SIGTERM cancel the running task from now on, in this loop and in flows that it starts."""
    _stopped.set(asyncio.current_task())
    keep_sigterm()


def keep_sigterm() -> None:
    """Take SIGTERM back inside a flow, where `stop_by_sigterm` was called; elsewhere it stays Prefect's.

    Prefect puts a handler of its own in place when a flow begins. That raises wherever the main thread
    happens to be, and asyncio swallows what is raised in a callback.
    """
    task = _stopped.get()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
