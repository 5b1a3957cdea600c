"""Real processes against one lake: whatever they do at once, a batch is one set of rows."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor

import lake_races
import polars as pl
import pytest
from deltalake import DeltaTable
from lake_batch import parity_rows, plan_batch, row_counts, same_bits, sample_rows, stage_all, tape_rows

from rollout.lake import LakePaths, scan_samples
from rollout.lake.publishing import publish_batch
from rollout.lake.schema import conform
from rollout.lake.staging import create_plan, read_plan, read_staged, stage_shard, staged_shards, verify

PROCESSES = 4
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(PROCESSES, mp_context=SPAWN) as executor:
        yield executor


@pytest.fixture
def paths(tmp_path):
    return LakePaths(tmp_path / "lake")


def together(pool, function, *calls):
    """Run the calls in processes of their own, all from one moment on."""
    start = time.time() + 0.3
    return [f.result(timeout=120) for f in [pool.submit(function, *call, start) for call in calls]]


def race_on_an_empty_lake(pool, tmp_path, rounds):
    for number in range(rounds):
        paths = LakePaths(tmp_path / f"lake{number}")
        stage_all(paths, plan_batch())
        results = together(pool, lake_races.publish, *[(paths.uri, "b1")] * PROCESSES)
        assert [16, 24, 12, 1] == row_counts(paths)
        assert 1 == len({version for version, _ in results})
        assert [False] == [already for _, already in results if not already], "one published, the others say so"


def test_four_processes_publish_one_batch_into_an_empty_lake(pool, tmp_path):
    race_on_an_empty_lake(pool, tmp_path, rounds=5)


@pytest.mark.full
def test_four_processes_publish_one_batch_into_an_empty_lake_twenty_times(pool, tmp_path):
    race_on_an_empty_lake(pool, tmp_path, rounds=20)


def race_with_batches(pool, paths, n_batches):
    names = [f"b{number}" for number in range(n_batches)]
    for name in names:
        stage_all(paths, plan_batch(name))
    results = together(pool, lake_races.publish, *[(paths.uri, name) for name in names])
    assert n_batches == len({version for version, _ in results})
    assert [16 * n_batches, 24 * n_batches, 12 * n_batches, n_batches] == row_counts(paths)
    by_batch = scan_samples(paths).group_by("batch_id").agg(pl.len(), pl.struct("rollout_key", "sibling").n_unique())
    assert [(16, 16)] == by_batch.drop("batch_id").collect().unique().rows()


def test_publishers_of_different_batches_all_land(pool, paths):
    race_with_batches(pool, paths, 8)


@pytest.mark.full
def test_twenty_publishers_of_twenty_batches_all_land(pool, paths):
    race_with_batches(pool, paths, 20)


def test_publishers_and_a_compaction_at_once_keep_one_set_of_rows(pool, paths):
    for name in ("b0", "b1", "b2"):
        stage_all(paths, plan_batch(name))
    lake_races.publish(paths.uri, "b0", 0.0)
    start = time.time() + 0.3
    running = [pool.submit(lake_races.publish, paths.uri, name, start) for name in ("b0", "b1", "b2")]
    for _ in range(6):
        DeltaTable(paths.table_uri("samples")).optimize.compact()
        time.sleep(0.05)
    assert [True, False, False] == [f.result(timeout=120)[1] for f in running]
    assert [48, 72, 36, 3] == row_counts(paths)


def test_one_of_several_configurations_wins_a_batch_id_and_the_plan_is_never_torn(pool, tmp_path):
    for number in range(5):
        paths = LakePaths(tmp_path / f"lake{number}")
        results = together(pool, lake_races.plan_with, *[(paths.uri, k / 10) for k in range(PROCESSES)])
        (winner,) = [text for outcome, text in results if outcome == "won"]
        assert winner == read_plan(paths, "b1").config_hash
        assert all(winner in text for _, text in results), "the refusals name the hash that is there"


def test_one_of_several_writers_of_a_shard_wins_and_only_its_files_stay(pool, tmp_path):
    for number in range(5):
        paths = LakePaths(tmp_path / f"lake{number}")
        create_plan(paths, plan_batch())
        writers = together(pool, lake_races.stage, *[(paths.uri, seed) for seed in range(PROCESSES)])
        manifest = staged_shards(paths, "b1")[0]
        assert {manifest.writer} == set(writers)
        verify(paths, manifest)
        assert {f.path for f in manifest.files} == {f"data/{n}" for n in paths.store.names("staging/b1/data")}


def test_a_zombie_that_wakes_after_the_publication_changes_nothing(paths):
    """G21: frozen behind its data files, replaced, published, then woken."""
    plan = create_plan(paths, plan_batch())
    zombie = SPAWN.Process(target=lake_races.stage_frozen, args=(paths.uri, 99))
    zombie.start()
    wait_until(lambda: process_state(zombie.pid) == "T")
    assert {} == staged_shards(paths, "b1"), "files without a manifest are not staged"
    assert 2 == len(paths.store.names("staging/b1/data"))
    for cut in plan.shards:
        stage_shard(paths, plan, cut.shard, sample_rows(plan, cut.shard), tape_rows(plan, cut.shard), {})
    before = staged_shards(paths, "b1")
    publish_batch(paths, plan, before, parity_rows(plan), lake_races.ROW)
    os.kill(zombie.pid, signal.SIGCONT)
    zombie.join(60)
    assert 0 == zombie.exitcode
    assert before == staged_shards(paths, "b1")
    given = sample_rows(plan, 0).sort_by([("rollout_key", "ascending"), ("sibling", "ascending")])
    assert same_bits(conform(given, "samples"), read_staged(paths, before[0])[0])
    assert [16, 24, 12, 1] == row_counts(paths)


def wait_until(condition, deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.05)


def process_state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(") ", 1)[1][0]


# 6 links, 2 files of rows, before and after each of 4 commits: 16 steps.
@pytest.mark.parametrize("steps", [0, 3, 6, 8, pytest.param(11, marks=pytest.mark.full), 14, 15])
def test_a_publisher_killed_at_any_step_is_finished_by_the_next(paths, steps):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    victim = SPAWN.Process(target=lake_races.publish_killed, args=(paths.uri, "b1", steps))
    victim.start()
    victim.join(60)
    assert -signal.SIGKILL == victim.exitcode
    result = publish_batch(paths, plan, manifests, parity_rows(plan), lake_races.ROW)
    assert (steps == 15) == result.already
    assert [16, 24, 12, 1] == row_counts(paths)


def test_a_finished_publisher_meets_exactly_the_counted_steps(paths):
    """So that the test above does kill where it says."""
    stage_all(paths, plan_batch())
    survivor = SPAWN.Process(target=lake_races.publish_killed, args=(paths.uri, "b1", 16))
    survivor.start()
    survivor.join(60)
    assert 0 == survivor.exitcode
    assert [16, 24, 12, 1] == row_counts(paths)
