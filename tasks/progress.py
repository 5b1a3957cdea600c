"""The artifact in Prefect's UI that moves while a batch runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact

from rollout.background import beside
from rollout.batch.progress import BatchProgress

UPDATE_S = 5.0
"""Seconds between two updates."""


@contextlib.asynccontextmanager
async def progress_artifact(progress: BatchProgress) -> AsyncIterator[None]:
    """Keep an artifact at `progress`, its phase and counts beside the bar, for as long as the block lasts."""
    created = await acreate_progress_artifact(0.0, key="rollout-batch-progress", description=_text(progress))
    assert isinstance(created, UUID)
    async with beside(_keep(created, progress)):
        yield
    await _update(created, progress)


async def _keep(artifact: UUID, progress: BatchProgress) -> None:
    while True:
        await asyncio.sleep(UPDATE_S)
        await _update(artifact, progress)


async def _update(artifact: UUID, progress: BatchProgress) -> None:
    await aupdate_progress_artifact(artifact, 100.0 * progress.share, description=_text(progress))


def _text(progress: BatchProgress) -> str:
    return f"{progress.batch_id} {progress.phase}: {progress.counts}"
