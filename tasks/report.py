"""What a flow run shows in Prefect's UI: progress while it runs, a table and a text at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

from prefect import task
from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.cache_policies import NO_CACHE

from rollout.background import beside
from rollout.batch.prepare import Batch
from rollout.batch.progress import BatchProgress
from rollout.batch.report import summary_rows
from rollout.batch.summary import Summary

UPDATE_S = 5.0
"""Seconds between two updates of the progress artifact."""


@contextlib.asynccontextmanager
async def progress_artifact(progress: BatchProgress) -> AsyncIterator[None]:
    """Keep an artifact at `progress` for as long as the block lasts."""
    created = await acreate_progress_artifact(0.0, key="rollout-batch-progress", description=progress.batch_id)
    assert isinstance(created, UUID)
    async with beside(_keep(created, progress)):
        yield
    await aupdate_progress_artifact(created, 100.0 * progress.share)


async def _keep(artifact: UUID, progress: BatchProgress) -> None:
    while True:
        await asyncio.sleep(UPDATE_S)
        await aupdate_progress_artifact(artifact, 100.0 * progress.share)


@task(name="report", cache_policy=NO_CACHE, persist_result=False, retries=2, retry_delay_seconds=1)
async def report(batch: Batch, summary: Summary, ending: str) -> None:
    """Leave the summary as a table and as text; `ending` says in one line how the batch ended."""
    rows: list[dict[str, Any]] = [{"what": what.strip(), "value": value} for what, value in summary_rows(summary)]
    await acreate_table_artifact(rows, key="rollout-batch-summary", description=batch.plan.batch_id)
    lines = "\n".join(f"| {row['what']} | {row['value']} |" for row in rows)
    text = f"# {batch.plan.batch_id}\n\n{ending}\n\n| | |\n|---|---|\n{lines}\n"
    await acreate_markdown_artifact(text, key="rollout-batch-report", description=batch.plan.batch_id)
