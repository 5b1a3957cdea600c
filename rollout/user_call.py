"""Calls a user's function under a deadline, in a thread of its own.

An awaitable gets an event loop of its own in that thread. So whatever a user's function does to its
thread or loop (block it, run busy, swallow its cancellation, leave tasks or child processes behind)
costs its own rollout and no other: neither the worker's loop, with the flow's heartbeat, nor another
user's function waits for it. Measured on 2 busy cores: 1.5 ms a call, on the worker's loop 0.02.

A thread cannot be killed. At the deadline a coroutine is cancelled; what has not ended GRACE_S seconds
later gets an exception at its next step of Python and is left behind, and its child processes are
killed. No pool is shared that it could fill, and the threads are daemons that never keep a process
from ending. Only code that holds the interpreter's lock in one long C call stops the others too; such
an agent belongs into a program of its own (the agent `command`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollout.errors import RolloutLakeError, describe
from rollout.threads import awaiting, end_children, interrupt, place, stack

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds that a cancelled function gets for its own cleaning up before it is left behind."""


class Overdue(RolloutLakeError):
    """A user's function had not returned when its time was over; the message says where it stood."""


class Quit(RolloutLakeError):
    """A user's function tried to end the process, its task or its loop instead of raising an error."""


class LeftBehind(BaseException):
    """Raised inside a function whose time is over, where it does not end by itself."""


async def call_user(function: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """The value of `function(*args, **kwargs)`, awaited if it is awaitable, in a thread of its own.

    Raises:
        Overdue: it did not return within `timeout_s` seconds.
        Quit: it raised SystemExit or KeyboardInterrupt, or was cancelled from inside.
        Exception: whatever it raised.
    """
    call = _Call(lambda: function(*args, **kwargs), name=getattr(function, "__module__", None) or "user")
    try:
        await asyncio.wait({call.done}, timeout=timeout_s)
        if call.done.done():
            return call.done.result()
        where = call.where()
        await call.end()
        raise Overdue(where)
    except asyncio.CancelledError:
        await call.end()
        raise


async def call_here(function: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """`call_user` for a coroutine function of this package, which is known not to block: in the running loop.

    Raises:
        Overdue, Quit, Exception: as call_user; what a cancelled task raised stands in Overdue's message.
    """
    task = asyncio.ensure_future(_awaited(function(*args, **kwargs)))
    task.add_done_callback(_look)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.cancelled():
            raise Quit("it was cancelled from inside")
        if task.done():
            return task.result()
        await _cancel(task)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    ended = task.done() and not task.cancelled() and task.exception()
    raise Overdue(str(ended) if ended else "")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` only makes a coroutine."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def _cancel(task: asyncio.Future[Any]) -> None:
    # Not wait_for: that waits for ever on a task that swallows its cancellation.
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_S)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:  # asyncio would let them end the whole worker
        raise Quit(describe(error)) from error


def _look(task: asyncio.Future[Any]) -> None:
    """Take the exception of a task that nobody waits for any more, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


class _Call:
    """One call in its thread. `done` belongs to the caller's loop."""

    def __init__(self, function: Callable[[], Any], *, name: str) -> None:
        self._function, self._name = function, name
        self._caller = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self._caller.create_future()
        self.done.add_done_callback(_look)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._over = False
        self._starting = threading.Lock()
        self._workers = _Workers()
        self._pid = os.getpid()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="rollout user call", daemon=True)
        self._thread.start()

    async def end(self) -> None:
        """Cancel it; if that does not end it, leave it behind and kill its child processes."""
        with self._starting:
            self._over = True
        if self._task is not None:
            self._wake(self._task.cancel)
        await asyncio.wait({self.done}, timeout=GRACE_S)
        if self.done.done():
            return
        log.warning("a function of %s does not end and is left behind, %s", self._name, self.where())
        if self._loop is not None:
            self._wake(self._loop.stop)
        for ident in [self._thread.ident, *self._workers.idents]:
            interrupt(ident, LeftBehind)
        end_children([self._thread.native_id, *self._workers.native_ids])

    def where(self) -> str:
        """Where it stands now, as `at file.py:12 in name`; empty when it has just ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if self._task is not None and frame is not None and Path(frame.f_code.co_filename).name == "selectors.py":
            return place(awaiting(self._task.get_coro()))
        return place(stack(frame))

    def _wake(self, callback: Callable[[], Any]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it has closed meanwhile
            self._loop.call_soon_threadsafe(callback)

    def _work(self) -> None:
        value: Any = None
        error: BaseException | None = None
        with contextlib.suppress(LeftBehind):
            try:
                value = self._function()
                if inspect.isawaitable(value):
                    value = self._await(value)
            except LeftBehind:
                raise
            except Exception as raised:
                error = RuntimeError(describe(raised)) if isinstance(raised, StopIteration) else raised
            except asyncio.CancelledError:
                error = Quit("it was cancelled from inside")
            except BaseException as raised:
                error = Quit(describe(raised))
            if os.getpid() != self._pid:  # a fork that the function let run on
                os._exit(0)
            ended = end_children([threading.get_native_id(), *self._workers.native_ids])
            if ended:
                log.warning("%d child processes that a function of %s left behind were ended", ended, self._name)
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile: nobody waits
                self._caller.call_soon_threadsafe(self._deliver, value, error)

    def _deliver(self, value: Any, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(value)
        else:
            self.done.set_exception(error)

    def _await(self, awaitable: Awaitable[Any]) -> Any:
        with self._starting:  # a loop interrupted while it is made could not even be closed
            if self._over:
                _drop(awaitable)
                raise Quit("its time was over before it began to wait")
            self._loop = loop = asyncio.new_event_loop()
            self._task = loop.create_task(_awaited(awaitable))
        loop.set_default_executor(self._workers)
        loop.set_exception_handler(_note)
        self._task.add_done_callback(_look)
        try:
            asyncio.set_event_loop(loop)
            try:
                return loop.run_until_complete(self._task)
            finally:
                if not loop.is_running():
                    loop.run_until_complete(_tidy(loop))
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _drop(awaitable: Any) -> None:
    """End an awaitable that nobody will await, so that Python does not complain about it."""
    if inspect.iscoroutine(awaitable):
        awaitable.close()
    elif isinstance(awaitable, asyncio.Future):
        awaitable.cancel()


async def _tidy(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that a function left running in its loop."""
    left = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=GRACE_S)
    await loop.shutdown_asyncgens()


def _note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    log.debug("in a user's event loop: %s", context.get("message"))


class _Workers(ThreadPoolExecutor):
    """The loop's default executor: a daemon thread per call, so that a blocked one keeps no process from ending."""

    def __init__(self) -> None:
        super().__init__()
        self.idents: list[int] = []
        self.native_ids: list[int] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            self.idents.append(threading.get_ident())
            self.native_ids.append(threading.get_native_id())
            with contextlib.suppress(LeftBehind):
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)
            # An ended thread's children would become another thread's, and be found no more.
            end_children([threading.get_native_id()])
            self.idents.remove(threading.get_ident())
            self.native_ids.remove(threading.get_native_id())

        threading.Thread(target=work, name="rollout user call", daemon=True).start()
        return future
