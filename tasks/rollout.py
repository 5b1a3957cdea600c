"""The tasks that run one shard's rollouts and stage them: in the flow's process, or apart from it."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from rollout.batch.apart import BatchReference, run_apart
from rollout.batch.progress import BatchProgress
from rollout.batch.worker import Worker
from rollout.lake.manifest import Manifest

NAME = "roll out shard"


@task(name=NAME, task_run_name=NAME + " {shard}", cache_policy=NO_CACHE, persist_result=False)
async def roll_out_shard(worker: Worker, shard: int, progress: BatchProgress) -> Manifest:
    """Run a shard and make it staged. Not retried: a rollout's own attempts are made inside, the rest are bugs."""
    manifest = await worker.run(shard, progress)
    get_run_logger().info("shard %d staged: %s", shard, manifest.counts)
    return manifest


@task(name=NAME, task_run_name=NAME + " {shard}", cache_policy=NO_CACHE, persist_result=False)
async def roll_out_apart(batch: BatchReference, shard: int) -> dict[str, Any]:
    """The same in another process; the counts of the manifest that stands."""
    manifest = await run_apart(batch, shard)
    get_run_logger().info("shard %d staged: %s", shard, manifest.counts)
    return manifest.counts
