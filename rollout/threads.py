"""Looks into other threads of this process: where they stand, what processes they started; and puts an end to them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = (Path(asyncio.__file__).parent, Path(__file__).parent, Path(__file__).parent / "agents")


def interrupt(ident: int | None, error: type[BaseException]) -> None:
    """Raise `error` in a thread, at its next step of Python; one that has ended is no error."""
    if ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


def end_children(native_ids: list[int | None]) -> int:
    """Kill the processes that these threads started and that still run, with what those started; how many.

    Linux keeps for each thread the children that it started; elsewhere nothing is found.
    """
    children = [pid for thread in native_ids for pid in _children(os.getpid(), thread)]
    for pid in children:
        for descendant in [*_descendants(pid), pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGKILL)
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return len(children)


def _descendants(pid: int) -> list[int]:
    found = [child for thread in _threads(pid) for child in _children(pid, thread)]
    return [*found, *(deeper for child in found for deeper in _descendants(child))]


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _children(pid: int, thread: int | None) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    except OSError:
        return []


def stack(frame: FrameType | None) -> list[FrameType]:
    """Frames of a thread, innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def awaiting(coroutine: Any) -> list[FrameType]:
    """Frames of a coroutine that waits, innermost first."""
    frames = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(frame)
        coroutine = coroutine.cr_await
    return frames[::-1]


def place(frames: list[FrameType]) -> str:
    """The innermost place that is neither asyncio's nor this package's."""
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if path.parent not in _OURS and path.name != "threading.py":
            return f"at {'/'.join(path.parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""
