"""The flow that keeps a lake in order."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from tasks.maintain import forget_spools, keep_in_order
from tasks.plan import refuse_relative_in_worker


@flow(name="rollout-maintain-lake", persist_result=False)
async def maintain_lake(
    lake: str = "./lake", keep_days: Annotated[int, Field(ge=1, le=3650)] = 7, dry_run: bool = False
) -> dict[str, Any]:
    """Write checkpoints, and remove what no table and no staged shard names; safe beside running batches.

    Args:
        lake: Lake: a local path or s3://bucket/prefix.
        keep_days: Days for which a file that nothing names is taken for work in progress.
        dry_run: Only say what would be done.
    """
    refuse_relative_in_worker(lake=lake)
    upkeep = await keep_in_order(lake, keep_days, dry_run)
    spools = await forget_spools(lake, dry_run)
    return {"lake": lake, "dry_run": dry_run, **upkeep.counts(), "spools": spools}
