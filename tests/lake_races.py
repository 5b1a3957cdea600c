"""What the processes of tests/e2e/test_publish_races.py run; a module of its own so that spawn can import it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from lake_batch import parity_rows, plan_batch, sample_rows, tape_rows

from rollout.errors import BadConfig
from rollout.lake import publishing, tables
from rollout.lake.paths import LakePaths
from rollout.lake.publishing import publish_batch
from rollout.lake.staging import create_plan, stage_shard, staged_shards

ROW: dict[str, Any] = {"counts": "{}"}


def publish(uri: str, batch_id: str, start: float) -> tuple[int, bool]:
    """Publish a staged batch at a moment that all processes share: its version, and whether it was there."""
    paths, plan = LakePaths(uri), plan_batch(batch_id)
    parity = parity_rows(plan)
    time.sleep(max(0.0, start - time.time()))
    result = publish_batch(paths, plan, staged_shards(paths, batch_id), parity, ROW)
    return result.version, result.already


def plan_with(uri: str, temperature: float, start: float) -> tuple[str, str]:
    """Plan one batch id with a configuration of its own: won or refused, and the hash."""
    plan = plan_batch("b1", temperature=temperature)
    time.sleep(max(0.0, start - time.time()))
    try:
        return "won", create_plan(LakePaths(uri), plan).config_hash
    except BadConfig as error:
        return "refused", str(error)


def stage(uri: str, seed: int, start: float) -> str:
    """Stage shard 0 with rows of its own: the writer that won."""
    paths, plan = LakePaths(uri), plan_batch("b1")
    rows, tapes = sample_rows(plan, 0, seed), tape_rows(plan, 0)
    time.sleep(max(0.0, start - time.time()))
    return stage_shard(paths, plan, 0, rows, tapes, {}).writer


def stage_frozen(uri: str, seed: int) -> None:
    """Stage shard 0, but freeze when the data files are written and the manifest is not (G21)."""
    paths, plan = LakePaths(uri), plan_batch("b1")
    create = paths.store.create

    def fault_frozen(key: str, data: bytes) -> bool:
        os.kill(os.getpid(), signal.SIGSTOP)
        return create(key, data)

    paths.store.create = fault_frozen  # type: ignore[method-assign]
    stage_shard(paths, plan, 0, sample_rows(plan, 0, seed), tape_rows(plan, 0), {})


def publish_killed(uri: str, batch_id: str, steps: int) -> None:
    """Publish, but die by SIGKILL at the given step: a link, a file of rows, or before or after a commit."""
    paths, plan = LakePaths(uri), plan_batch(batch_id)
    left = [steps]

    def count() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    write, link, rows = tables.write_transaction, paths.store.link, publishing.write_rows

    def fault_commit(*args: Any) -> None:
        count()
        write(*args)
        count()

    def fault_link(source: str, target: str) -> None:
        count()
        link(source, target)

    def fault_rows(*args: Any) -> Any:
        count()
        return rows(*args)

    tables.write_transaction = fault_commit
    publishing.write_rows = fault_rows
    paths.store.link = fault_link  # type: ignore[method-assign]
    publish_batch(paths, plan, staged_shards(paths, batch_id), parity_rows(plan), ROW)
