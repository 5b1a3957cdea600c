"""Tasks of a lake's upkeep."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from prefect import get_run_logger, task
from prefect.artifacts import acreate_table_artifact
from prefect.cache_policies import NO_CACHE

from rollout.batch.leftover import decided_spools
from rollout.batch.spool import SPOOLS, remove_batch_spools
from rollout.home import state_home
from rollout.lake.maintaining import Upkeep
from rollout.lake.maintaining import maintain_lake as maintain
from rollout.lake.paths import LakePaths

SHOWN = 100
"""Names of one kind in the artifact; a first upkeep may find thousands."""


@task(name="keep the lake in order", cache_policy=NO_CACHE, persist_result=False, retries=2, retry_delay_seconds=1)
async def keep_in_order(lake: str, keep_days: int, dry_run: bool) -> Upkeep:
    """Do a lake's upkeep and leave a table of what was done."""
    paths = LakePaths(lake)
    upkeep = await asyncio.to_thread(maintain, paths, keep_days=keep_days, dry_run=dry_run)
    get_run_logger().info("%s: %s%s", paths.uri, upkeep.counts(), ", dry run" if dry_run else "")
    rows = [{"what": what, "name": name} for what, names in asdict(upkeep).items() for name in names[:SHOWN]]
    await acreate_table_artifact(rows, key="rollout-maintain-lake", description=paths.uri)
    return upkeep


@task(name="forget spools", cache_policy=NO_CACHE, persist_result=False)
async def forget_spools(lake: str, dry_run: bool) -> int:
    """Remove this host's spools of batches that are decided; how many batches had some."""
    root = state_home() / SPOOLS
    plans = await asyncio.to_thread(decided_spools, root, LakePaths(lake))
    for plan in [] if dry_run else plans:
        remove_batch_spools(root, plan)
    return len(plans)
