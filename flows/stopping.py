"""SIGTERM to the command or to a worker's flow run: the flow is cancelled at its next await, in order, as by Ctrl-C."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import wraps
from typing import Any

_stopped: ContextVar[asyncio.Task[Any] | None] = ContextVar("stopped_by_sigterm", default=None)
_in_worker = False


def stop_by_sigterm() -> None:
    """Let SIGTERM cancel the running task from now on, in this loop and in flows that it starts."""
    _stopped.set(asyncio.current_task())
    _take_sigterm(asyncio.current_task())


def stop_flows_by_sigterm() -> None:
    """Let SIGTERM cancel the flow that this process runs: it is how a worker ends a run."""
    global _in_worker
    _in_worker = True


def stoppable(body: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A flow's body that SIGTERM cancels, where one of the calls above was made; elsewhere SIGTERM stays Prefect's.

    Prefect puts a handler of its own in place when a flow begins. That raises wherever the main thread
    happens to be, and asyncio swallows what is raised in a callback. A run that somebody cancelled ends as
    Cancelled, one whose worker stops as Crashed: both can be retried.
    """

    @wraps(body)
    async def stopped(*given: Any, **options: Any) -> Any:
        return await _run(body, given, options)  # all there is in here: Ray takes it along, and no ContextVar can go

    # Prefect reads parameters from these, and would look up names of annotations in this module.
    stopped.__signature__ = inspect.signature(body, eval_str=True)  # type: ignore[attr-defined]
    stopped.__annotations__ = inspect.get_annotations(body, eval_str=True)
    return stopped


async def _run(body: Callable[..., Coroutine[Any, Any, Any]], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    _take_sigterm(asyncio.current_task() if _in_worker else _stopped.get())
    try:
        return await body(*given, **options)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not _in_worker or task is None or not await _is_cancelling():
            raise
        while task.uncancel():
            pass
        return await _cancelled()


def _cancel_once(task: asyncio.Task[Any]) -> None:
    """A second signal would cut short what the first one lets end in order."""
    if not task.cancelling():
        task.cancel()


def _take_sigterm(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel_once, task)


async def _is_cancelling() -> bool:
    """Whether somebody asked for this run's cancellation."""
    from prefect import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return False
    try:
        async with get_client() as client:
            run = await client.read_flow_run(context.flow_run.id)
    except Exception:  # whatever keeps the server from saying it, the run is cancelled all the same
        return False
    return run.state is not None and run.state.is_cancelling()


async def _cancelled() -> Any:
    from prefect.states import Cancelled

    return Cancelled(message="Cancelled; what is staged and spooled stays, a retry goes on with it.")
