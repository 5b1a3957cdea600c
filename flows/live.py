"""The progress of a running batch: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

from rollout.background import beside
from rollout.batch.progress import BatchProgress

REFRESH_S = 0.25
LINE_S = 5.0
"""Seconds between two plain lines in which something changed."""


@contextlib.asynccontextmanager
async def showing(progress: BatchProgress, *, quiet: bool) -> AsyncIterator[None]:
    """Show `progress` on stderr for as long as the block lasts; not at all where `quiet`."""
    if quiet:
        yield
        return
    async with beside(_draw(progress) if sys.stderr.isatty() else _print(progress)):
        yield


async def _draw(progress: BatchProgress) -> None:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots")

    def picture() -> RenderableType:
        spinner.update(text=Text(_status(progress)))
        bar = ProgressBar(total=1.0, completed=progress.share, width=60)
        return Group(spinner, bar, Text(progress.counts, style="dim")) if progress.rollouts else spinner

    console = Console(stderr=True)
    with Live(picture(), console=console, refresh_per_second=8, transient=True) as live:
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(picture())
        finally:
            console.print(Text(_line(progress)))


async def _print(progress: BatchProgress) -> None:
    shown, phase, printed = "", "", 0.0
    try:
        while True:
            line = _line(progress)
            due = progress.phase != phase or time.monotonic() - printed >= LINE_S
            if due and line != shown:
                _put(line)
                shown, phase, printed = line, progress.phase, time.monotonic()
            await asyncio.sleep(REFRESH_S)
    finally:
        if (line := _line(progress)) != shown:
            _put(line)


def _put(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _line(progress: BatchProgress) -> str:
    return f"{_status(progress)}: {progress.counts}" if progress.rollouts else _status(progress)


def _status(progress: BatchProgress) -> str:
    seconds = int(time.monotonic() - progress.started)
    name = f"{progress.batch_id} " if progress.batch_id else ""
    return f"[{seconds // 60}:{seconds % 60:02}] {name}{progress.phase}"
