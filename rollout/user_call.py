"""Calls a user's function under a deadline: async ones as tasks, plain ones in a thread of their own.

A blocked thread cannot be ended, only left behind; so no pool is shared that it could fill, and the
threads are daemons that never keep a process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rollout.errors import RolloutLakeError, describe

GRACE_S = 1.0
"""Seconds that a cancelled task gets for its own cleaning up before it is left behind."""


class Overdue(RolloutLakeError):
    """A user's function had not returned when its time was over."""


class Quit(RolloutLakeError):
    """A user's function tried to end the process, its task or its loop instead of raising an error."""


async def call_user(function: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """The value of `function(*args, **kwargs)`, awaited if it is awaitable.

    Raises:
        Overdue: it did not return within `timeout_s` seconds. A task is cancelled, a thread left behind.
        Quit: it raised SystemExit or KeyboardInterrupt, or was cancelled from inside.
        Exception: whatever it raised.
    """
    end = asyncio.get_running_loop().time() + timeout_s
    if is_async(function):
        return await _within(_guarded(function(*args, **kwargs)), end)
    value = await _within(_in_thread(lambda: function(*args, **kwargs)), end)
    return await _within(_guarded(value), end) if inspect.isawaitable(value) else value


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` only makes a coroutine, so that no thread is needed."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def _guarded(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:  # asyncio would let them end the whole worker
        raise Quit(describe(error)) from error


async def _within(awaitable: Awaitable[Any], end: float) -> Any:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(awaitable)
    task.add_done_callback(_look)
    try:
        await asyncio.wait({task}, timeout=max(0.0, end - loop.time()))
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.cancelled():
        raise Quit("it was cancelled from inside")
    if task.done():
        return task.result()
    task.cancel()
    # Not wait_for: that waits for ever on a task that swallows its cancellation.
    await asyncio.wait({task}, timeout=GRACE_S)
    raise Overdue("it had not returned")


def _look(task: asyncio.Future[Any]) -> None:
    """Take the exception of a task that nobody waits for any more, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(function)
        except Exception as raised:
            error = RuntimeError(describe(raised)) if isinstance(raised, StopIteration) else raised
        except BaseException as raised:
            error = Quit(describe(raised))
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile: nobody waits
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=work, name="rollout user call", daemon=True).start()
    return future
