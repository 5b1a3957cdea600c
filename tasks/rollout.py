"""The task that runs one shard's rollouts and stages them."""

from __future__ import annotations

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from rollout.batch.progress import BatchProgress
from rollout.batch.worker import Worker
from rollout.lake.manifest import Manifest


@task(name="roll out shard", task_run_name="roll out shard {shard}", cache_policy=NO_CACHE, persist_result=False)
async def roll_out_shard(worker: Worker, shard: int, progress: BatchProgress) -> Manifest:
    """Run a shard and make it staged. Not retried: a rollout's own attempts are made inside, the rest are bugs."""
    manifest = await worker.run(shard, progress)
    get_run_logger().info("shard %d staged: %s", shard, manifest.counts)
    return manifest
