"""`rollout parity --against`: asks another engine a batch's recorded turns, and shows where they part."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.batch.against import compare_engines
from rollout.batch.spool import SPOOLS
from rollout.batch.view import view_batch
from rollout.home import state_home
from rollout.parity.cross_report import CrossReport, bars, headline, rollout_line

LINE_S = 5.0
"""Seconds between two plain lines of progress."""


def show_against(
    lake: str,
    batch_id: str,
    url: str,
    *,
    rollouts: int | None,
    concurrency: int,
    record: bool,
    limit: int,
    as_json: bool,
) -> bool:
    """Compare, and print the report; True if a rollout differs. With `record` it runs as a flow."""
    told = (lambda done, of: None) if as_json else progress_lines()
    if record:
        report = asyncio.run(_as_flow(lake, batch_id, url, rollouts, concurrency, told))
    else:
        view = view_batch(lake, batch_id, state_home() / SPOOLS)
        report = asyncio.run(
            compare_engines(view, url, rollouts=rollouts, concurrency=concurrency, progress=told),
        )
    if as_json:
        found = [one.to_json() for one in report.verdicts]
        print(json.dumps({**report.to_json(), "results": found}, ensure_ascii=False))
    else:
        _print(report, limit)
    return report.differs


async def _as_flow(
    lake: str, batch_id: str, url: str, rollouts: int | None, concurrency: int, told: Callable[[int, int], None]
) -> CrossReport:
    from flows.server import prefect_api

    reports: list[CrossReport] = []
    async with prefect_api():
        from flows import parity

        parity.told.set(told)
        parity.compared.set(reports)
        await parity.cross_engine(batch_id, url, lake=lake, rollouts=rollouts, concurrency=concurrency)
    return reports[0]


def progress_lines() -> Callable[[int, int], None]:
    """Progress on stderr: one line that is written over on a terminal, plain lines now and then elsewhere."""
    started, terminal, last = time.monotonic(), sys.stderr.isatty(), [time.monotonic()]

    def told(done: int, of: int) -> None:
        now = time.monotonic()
        line = f"[{int(now - started) // 60}:{int(now - started) % 60:02}] compared {done} of {of} rollouts"
        if terminal:
            print(f"\r{line}", end="\n" if done == of else "", file=sys.stderr, flush=True)
        elif done == of or now - last[0] >= LINE_S:
            last[0] = now
            print(line, file=sys.stderr, flush=True)

    return told


def _print(report: CrossReport, limit: int) -> None:
    for name, value in headline(report):
        print(f"{name:<12} {value}")
    for unit in sorted(report.ulps):
        print(f"\nlog-prob distance in ULP of {unit}")
        lines = bars(report.histogram(unit))
        width = max(len(label) for label, _, _ in lines)
        for label, n, bar in lines:
            print(f"  {label:>{width}}  {n:>9}  {bar}".rstrip())
    other = [found for found in report.verdicts if found.verdict != "equal"]
    if not other:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rollout", "verdict", "first token", "first log-prob", "max ULP"):
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for found in other[:limit]:
        table.add_row(*map(Text, rollout_line(found)))
    console = Console()
    console = console if console.is_terminal else Console(width=240)
    print()
    console.print(table)
    if len(other) > limit:
        print(f"... and {len(other) - limit} more (--limit)")
