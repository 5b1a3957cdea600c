"""What a flow run shows in Prefect's UI at its end: one artifact for each question, under keys that stay."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import task
from prefect.artifacts import acreate_image_artifact, acreate_markdown_artifact, acreate_table_artifact
from prefect.cache_policies import NO_CACHE

from rollout.batch.ending import Ending


@task(name="report", cache_policy=NO_CACHE, persist_result=False, retries=2, retry_delay_seconds=1)
async def report(ending: Ending, how: str, version: int | None = None) -> None:
    """Leave the batch's artifacts; `how` says in one line how it ended, `version` is the samples table's."""
    rows: list[dict[str, Any]] = [{"what": what, "value": value} for what, value in ending.summary_rows()]
    groups, of_groups = ending.groups()
    name = ending.batch_id
    await asyncio.gather(
        acreate_table_artifact(rows, key="rollout-batch-summary", description=name),
        acreate_markdown_artifact(ending.text(how), key="rollout-batch-report", description=name),
        acreate_markdown_artifact(ending.parity_text(), key="rollout-batch-parity", description=name),
        acreate_image_artifact(ending.parity_plot(), key="rollout-batch-parity-plot", description=name),
        acreate_table_artifact(groups, key="rollout-batch-groups", description=of_groups),
        acreate_image_artifact(ending.distribution_plot(), key="rollout-batch-histograms", description=name),
        acreate_markdown_artifact(ending.lake_text(version), key="rollout-batch-lake", description=name),
    )
