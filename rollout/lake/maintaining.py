"""Upkeep of a lake, safe beside running batches and readers: checkpoints, and what no table and no manifest names.

Only files older than `keep_days` go, so whoever is writing now keeps theirs (a day is far above any clock's error).
No data file is rewritten: compaction would change the order of a batch's rows.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rollout.lake.paths import LakePaths
from rollout.lake.schema import TABLE_NAMES, TableName
from rollout.lake.staging import planned_batches, staged_shards
from rollout.lake.tables import open_table

CHECKPOINT_COMMITS = 10
"""Commits after which reading a table's log anew costs more than its checkpoint."""
DAY_S = 86_400.0


@dataclass(kw_only=True, slots=True)
class Upkeep:
    """What was done, or would be: tables that got a checkpoint, and keys of removed files below the lake."""

    checkpoints: list[str] = field(default_factory=list)
    unreferenced: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, Any]:
        return {name: len(found) for name, found in asdict(self).items()}


def maintain_lake(paths: LakePaths, *, keep_days: int, dry_run: bool = False) -> Upkeep:
    """Do all upkeep once. Safe to repeat and to kill.

    Args:
        keep_days: age of a file, in days, below which it is somebody's work in progress.
        dry_run: only say what would be done.

    Raises:
        DeltaError, OSError: the storage refuses; what was done stays done.
    """
    done = Upkeep()
    for name in TABLE_NAMES:
        _maintain_table(paths, name, keep_days, dry_run, done)
    for batch_id in planned_batches(paths):
        done.orphans += _orphans(paths, batch_id, keep_days, dry_run)
    return done


def _maintain_table(paths: LakePaths, name: TableName, keep_days: int, dry_run: bool, done: Upkeep) -> None:
    table = open_table(paths, name)
    if table is None:
        return
    gone = table.vacuum(retention_hours=24 * keep_days, dry_run=dry_run, enforce_retention_duration=False, full=True)
    done.unreferenced += [f"{paths.table_key(name)}/{file}" for file in gone]
    if table.version() - _last_checkpoint(paths, name) >= CHECKPOINT_COMMITS:
        done.checkpoints.append(name)
        if not dry_run:
            table.create_checkpoint()


def _last_checkpoint(paths: LakePaths, name: TableName) -> int:
    """Version of a table's newest checkpoint; -1 if it has none."""
    try:
        return int(json.loads(paths.store.read(f"{paths.table_key(name)}/_delta_log/_last_checkpoint"))["version"])
    except FileNotFoundError:
        return -1


def _orphans(paths: LakePaths, batch_id: str, keep_days: int, dry_run: bool) -> list[str]:
    """Keys of staged files that no manifest names: of writers that were killed, or that came second."""
    folder = f"{paths.folder(batch_id)}/data"
    old = [key for file in paths.store.names(folder) if _is_old(paths, key := f"{folder}/{file}", keep_days)]
    # The manifests are read last: a file that got one meanwhile is none of ours.
    named = {one.key(file) for one in staged_shards(paths, batch_id).values() for file in one.files}
    orphans = [key for key in old if key not in named]
    for key in [] if dry_run else orphans:
        paths.store.remove(key)
    return orphans


def _is_old(paths: LakePaths, key: str, keep_days: int) -> bool:
    try:
        return time.time() - paths.store.modified(key) > keep_days * DAY_S
    except FileNotFoundError:
        return False
