"""Spools of this host that nobody needs any more: their batch is decided."""

from __future__ import annotations

from pathlib import Path

from rollout.batch.spool import spool_folder
from rollout.config import BATCH_ID_PATTERN
from rollout.lake.paths import LakePaths
from rollout.lake.planfile import Plan
from rollout.lake.publishing import batch_status
from rollout.lake.staging import read_plan


def decided_spools(root: Path, paths: LakePaths) -> list[Plan]:
    """Plans of the lake's batches that are published, held back or discarded and have spools below `root`.

    They are left where a batch was killed on this host and ended on another.
    """
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    plans = (read_plan(paths, name) for name in names if BATCH_ID_PATTERN.fullmatch(name))
    return [
        plan
        for plan in plans
        if plan is not None and spool_folder(root, plan).is_dir() and batch_status(paths, plan.batch_id) is not None
    ]
