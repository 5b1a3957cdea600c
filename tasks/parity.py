"""The tasks that check one staged shard and run rollouts again, and what decides about the batch."""

from __future__ import annotations

import pyarrow as pa
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from rollout.batch.check import Checkers, ShardCheck
from rollout.batch.live import run_live
from rollout.batch.prepare import Batch
from rollout.batch.progress import BatchProgress
from rollout.batch.worker import Worker
from rollout.errors import ParityFailed
from rollout.parity.validate import require_parity, summarize


@task(name="check shard", task_run_name="check shard {shard}", cache_policy=NO_CACHE, persist_result=False)
async def check_shard(checkers: Checkers, batch: Batch, shard: int) -> ShardCheck:
    """Replay every rollout of a staged shard on both session versions."""
    check = await checkers.check(batch, shard)
    get_run_logger().info("shard %d checked: %s", shard, summarize(check.parity).verdicts)
    return check


@task(name="live parity", cache_policy=NO_CACHE, persist_result=False)
async def live_parity(worker: Worker, checks: list[ShardCheck], progress: BatchProgress) -> pa.Table:
    """Run the chosen rollouts again on both session paths; their rows of the parity table."""
    rows = await run_live(worker, checks, progress)
    get_run_logger().info("live parity: %s", summarize(rows).live)
    return rows


def parity_failure(batch: Batch, parity: pa.Table) -> ParityFailed | None:
    """Why the batch must go to quarantine, null if it may be published."""
    try:
        require_parity(parity, min_equal=batch.config.parity_min_equal)
    except ParityFailed as error:
        return error
    return None
