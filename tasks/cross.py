"""Tasks of a comparison with another engine: ask it, record the verdicts, and leave a report with a plot."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from prefect import get_run_logger, task
from prefect.artifacts import acreate_image_artifact, acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from rollout.batch.against import Progress, compare_engines, parity_rows
from rollout.batch.view import BatchView
from rollout.lake.checks import record_check
from rollout.parity.cross import CHECK
from rollout.parity.cross_report import CrossReport, markdown, svg
from rollout.plot import data_url


@task(name="ask the other engine", cache_policy=NO_CACHE, persist_result=False)
async def ask_engine(
    view: BatchView, url: str, rollouts: int | None, concurrency: int, progress: Progress | None
) -> CrossReport:
    """Every recorded turn of the batch's rollouts, asked of the engine at `url`."""
    report = await compare_engines(view, url, rollouts=rollouts, concurrency=concurrency, progress=progress)
    get_run_logger().info("compared: %s", report.counts())
    return report


@task(name="record verdicts", cache_policy=NO_CACHE, persist_result=False, retries=2, retry_delay_seconds=1)
async def record_verdicts(view: BatchView, report: CrossReport) -> None:
    """Add the verdicts to the parity table under this flow run's id: a retried run adds them once."""
    rows = parity_rows(report, datetime.now(UTC))
    await asyncio.to_thread(record_check, view.paths, view.batch_id, CHECK, str(flow_run.id), rows)


@task(name="report comparison", cache_policy=NO_CACHE, persist_result=False, retries=2, retry_delay_seconds=1)
async def report_comparison(report: CrossReport) -> None:
    """Leave the report as text with bars, and its histogram as a picture that the artifact itself carries."""
    await acreate_markdown_artifact(markdown(report), key="rollout-cross-engine", description=report.batch_id)
    await acreate_image_artifact(data_url(svg(report)), key="rollout-cross-engine-plot", description=report.batch_id)
