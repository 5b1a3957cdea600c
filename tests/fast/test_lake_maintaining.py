"""Upkeep removes what nobody names and is old, and nothing else; readers see the same rows."""

import os
import time
from pathlib import Path

import pytest
from lake_batch import plan_batch, publish, row_counts, sample_rows, stage_all, tape_rows

from rollout.batch.leftover import decided_spools
from rollout.batch.spool import open_spool
from rollout.lake import LakePaths
from rollout.lake.maintaining import maintain_lake
from rollout.lake.staging import create_plan, stage_shard, staged_shards

OLD_S = 8 * 86_400


@pytest.fixture
def paths(tmp_path: Path) -> LakePaths:
    return LakePaths(tmp_path / "lake")


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - OLD_S,) * 2)


def leave(paths: LakePaths, key: str, *, old: bool) -> str:
    path = Path(paths.root, key)
    path.write_bytes(b"left by a writer that was killed")
    if old:
        make_old(path)
    return key


def test_orphans_go_and_what_a_manifest_or_a_table_names_stays(paths: LakePaths):
    plan, running = plan_batch(), plan_batch("b2")
    publish(paths, plan, stage_all(paths, plan))
    create_plan(paths, running)
    stage_shard(paths, running, 0, sample_rows(running, 0), tape_rows(running, 0), {})
    before, staged = row_counts(paths), staged_shards(paths, "b2")
    for path in Path(paths.root).rglob("*.parquet"):
        make_old(path)
    orphan = leave(paths, "staging/b2/data/orphan.parquet", old=True)
    young = leave(paths, "staging/b2/data/young.parquet", old=False)
    stray = leave(paths, "tables/samples/stray.parquet", old=True)
    fresh = leave(paths, "tables/samples/fresh.parquet", old=False)

    told = maintain_lake(paths, keep_days=7, dry_run=True)
    assert ([stray], [orphan], []) == (told.unreferenced, told.orphans, told.checkpoints)
    assert paths.store.exists(stray) and paths.store.exists(orphan), "a dry run removes nothing"

    assert told == maintain_lake(paths, keep_days=7)
    assert [False, False, True, True] == [paths.store.exists(key) for key in (stray, orphan, young, fresh)]
    assert (before, staged) == (row_counts(paths), staged_shards(paths, "b2"))
    for cut in running.shards[1:]:
        stage_shard(paths, running, cut.shard, sample_rows(running, cut.shard), tape_rows(running, cut.shard), {})
    publish(paths, running, staged_shards(paths, "b2"))
    assert [2 * rows for rows in before] == row_counts(paths)
    assert {"checkpoints": 0, "unreferenced": 0, "orphans": 0} == maintain_lake(paths, keep_days=7).counts()


def test_a_table_of_many_commits_gets_a_checkpoint_and_keeps_its_transactions(paths: LakePaths):
    plans = [plan_batch(f"b{number}") for number in range(11)]
    for plan in plans:
        publish(paths, plan, stage_all(paths, plan))
    before = row_counts(paths)
    assert ["samples", "trajectories", "parity", "batches"] == maintain_lake(paths, keep_days=1).checkpoints
    assert (Path(paths.root) / "tables/samples/_delta_log/_last_checkpoint").exists()
    assert before == row_counts(paths)
    assert publish(paths, plans[0], staged_shards(paths, "b0")).already
    assert [] == maintain_lake(paths, keep_days=1).checkpoints


def test_a_lake_that_is_not_there_has_nothing_to_do(paths: LakePaths):
    assert {"checkpoints": 0, "unreferenced": 0, "orphans": 0} == maintain_lake(paths, keep_days=1).counts()
    assert not Path(paths.root).exists()


def test_spools_of_decided_batches_are_found(paths: LakePaths, tmp_path: Path):
    done, running, elsewhere = plan_batch(), plan_batch("b2"), plan_batch("b3")
    publish(paths, done, stage_all(paths, done))
    create_plan(paths, running)
    for plan in (done, running, elsewhere):
        open_spool(tmp_path / "spool", plan, 0).close()
    assert ["b1"] == [plan.batch_id for plan in decided_spools(tmp_path / "spool", paths)]
    assert [] == decided_spools(tmp_path / "none", paths)
