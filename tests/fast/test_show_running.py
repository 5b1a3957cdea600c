"""`rollout show` of a batch that runs: what its spools have counts, and looking disturbs nobody."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from command import COMMAND
from lake_batch import plan_batch, publish, same_bits, sample_rows, stage_all, stamp_rows, tape_rows

from rollout.batch.spool import SPOOLS, RolloutRows, open_spool, peek_spool, spool_folder
from rollout.batch.view import list_batches, view_batch
from rollout.errors import Failure
from rollout.flock import any_locked
from rollout.lake.paths import LakePaths
from rollout.lake.schema import conform
from rollout.lake.staging import create_plan, stage_shard
from rollout.sample import Sample, Status

PLAN = plan_batch()
"""Twelve rollouts in six groups and three shards."""
HOLDER = """
import sys
from pathlib import Path
from lake_batch import plan_batch
from rollout.batch.spool import open_spool
spool = open_spool(Path(sys.argv[1]), plan_batch(), 1)
print(spool.path, flush=True)
sys.stdin.read()
"""


def rows_of(shard: int) -> list[RolloutRows]:
    """The rollouts of a shard; its last one failed."""
    samples, tapes = sample_rows(PLAN, shard), tape_rows(PLAN, shard)
    last = PLAN.shards[shard].indexes[-1]
    bad = Sample(
        index=last,
        group_index=last // 2,
        status=Status.FAILED,
        failure=Failure(type="agent_error", message="it broke"),
        prompt=[{"role": "user", "content": "x"}],
        tokens_T=np.zeros(0, np.int32),
        response_length=0,
        loss_mask_R=np.zeros(0, np.int8),
        rollout_log_probs_R=np.zeros(0),
        remove_sample=True,
    )
    samples = pa.concat_tables([_of(samples, index) for index in PLAN.shards[shard].indexes[:-1]])
    samples = pa.concat_tables([samples, stamp_rows(PLAN, shard, [bad])])
    return [
        RolloutRows(samples=_batch(_of(samples, index)), trajectories=_batch(_of(tapes, index)))
        for index in PLAN.shards[shard].indexes
    ]


def _of(table: pa.Table, index: int) -> pa.Table:
    return table.filter(pc.equal(table.column("index"), index))


def _batch(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches()
    return batch


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def lake(tmp_path: Path, home: Path) -> Path:
    """Shard 0 is staged, the spool of shard 1 has three of its four rollouts, shard 2 has not begun."""
    paths = LakePaths(tmp_path / "lake")
    create_plan(paths, PLAN)
    stage_shard(paths, PLAN, 0, sample_rows(PLAN, 0), tape_rows(PLAN, 0), {})
    with open_spool(home / SPOOLS, PLAN, 1) as spool:
        for rows in rows_of(1)[1:]:
            spool.append(rows)
    return tmp_path / "lake"


@contextmanager
def held(home: Path) -> Iterator[None]:
    """A process that has the spool of shard 1 open, as the batch's worker does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    argv = [sys.executable, "-c", HOLDER, str(home / SPOOLS)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout.readline()
        yield
        holder.kill()


def show(home: Path, lake: Path, *arguments: object) -> str:
    command = [COMMAND, "show", *map(str, arguments), "--lake", str(lake)]
    environment = {**os.environ, "ROLLOUT_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout


def test_what_only_a_spool_has_is_shown(home: Path, lake: Path):
    with held(home):
        facts = json.loads(show(home, lake, "b1", "--json"))
        screen = show(home, lake, "b1")
        (listed,) = json.loads(show(home, lake, "--json"))["batches"]
    assert (True, "running", "running") == (facts["running"], facts["status"], listed["status"])
    assert (1, 3, 7, 3, 12) == tuple(
        facts[name] for name in ("shards_staged", "shards", "rollouts_finished", "rollouts_spooled", "n_rollouts")
    )
    assert {"agent_error": 1} == facts["failures"]
    assert [(0, 2), (1, 2), (2, 1), (3, 2)] == [(group["group"], group["rollouts"]) for group in facts["groups"]]
    rewards = [reward for group in facts["groups"] for reward in group["rewards"] if reward is not None]
    assert 6 == len(rewards) and facts["reward_mean"] == pytest.approx(sum(rewards) / 6)
    assert "running (a process of this machine holds its spools)" in screen
    assert "7 of 12 (3 of them in this machine's spools)" in screen and "agent_error 1" in screen


def test_groups_and_samples_of_a_spool_can_be_looked_at(home: Path, lake: Path):
    group = json.loads(show(home, lake, "b1", "--group", 3, "--json"))["samples"]
    assert {6, 7} == {row["rollout_key"] for row in group}
    failed = next(row for row in group if row["failure"])
    row = json.loads(show(home, lake, "b1", "--sample", failed["sample_id"], "--json"))
    assert ("it broke", 7) == (row["failure"]["message"], row["index"])


def test_a_batch_that_stopped_says_how_to_go_on(home: Path, lake: Path):
    facts, screen = json.loads(show(home, lake, "b1", "--json")), show(home, lake, "b1")
    assert (False, "staged", 7) == (facts["running"], facts["status"], facts["rollouts_finished"])
    assert "`rollout run --batch-id b1` goes on" in screen
    elsewhere = json.loads(show(home / "other", lake, "b1", "--json"))
    assert (4, 0) == (elsewhere["rollouts_finished"], elsewhere["rollouts_spooled"])


def test_a_plan_alone_is_shown(home: Path, tmp_path: Path):
    create_plan(LakePaths(tmp_path / "lake"), PLAN)
    assert "planned, nothing staged yet" in show(home, tmp_path / "lake", "b1")
    facts = json.loads(show(home, tmp_path / "lake", "b1", "--json"))
    assert ("planned", 0, None, []) == tuple(facts[k] for k in ("status", "shards_staged", "reward_mean", "groups"))
    assert "planned" == list_batches(str(tmp_path / "lake"), home / SPOOLS)[0]["status"]


def test_a_shard_that_is_staged_counts_once(home: Path, lake: Path):
    stage_shard(LakePaths(lake), PLAN, 1, sample_rows(PLAN, 1), tape_rows(PLAN, 1), {})
    view = view_batch(str(lake), "b1", home / SPOOLS)
    assert (8, {}) == (view.rollouts_finished, view.spooled)
    assert 8 == view.samples(["index"])["index"].n_unique()


def test_spools_of_a_published_batch_count_nothing(home: Path, tmp_path: Path):
    paths = LakePaths(tmp_path / "lake")
    publish(paths, PLAN, stage_all(paths, PLAN))
    with open_spool(home / SPOOLS, PLAN, 1) as spool:
        spool.append(rows_of(1)[0])
        view = view_batch(paths.uri, "b1", home / SPOOLS)
    assert ("published", False, 12, {}) == (view.status, view.running, view.rollouts_finished, view.spooled)


def test_looking_locks_cuts_and_makes_nothing(home: Path, lake: Path, monkeypatch: pytest.MonkeyPatch):
    spools = home / SPOOLS
    (path,) = spool_folder(spools, PLAN).iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-200:])  # a frame that is being written
    before, changed = sorted(home.rglob("*")), path.stat().st_mtime_ns
    for module, name in ((fcntl, "flock"), (fcntl, "lockf"), (os, "ftruncate"), (os, "pwrite"), (os, "open")):
        monkeypatch.setattr(module, name, refuse)
    found = {shard: peek_spool(spools, PLAN, shard) for shard in range(3)}
    monkeypatch.undo()
    assert (before, changed) == (sorted(home.rglob("*")), path.stat().st_mtime_ns)
    assert whole + whole[-200:] == path.read_bytes()
    assert ([], [5, 6, 7], []) == tuple([rows.index for rows in found[shard]] for shard in range(3))
    for expected, actual in zip(rows_of(1)[1:], found[1], strict=True):
        tables = [conform(pa.Table.from_batches([rows.samples]), "samples") for rows in (expected, actual)]
        assert same_bits(*tables)


def refuse(*arguments: object, **named: object) -> None:
    raise AssertionError("a looker changed something")


def test_a_torn_or_damaged_frame_is_not_there(home: Path, lake: Path):
    spools = home / SPOOLS
    (path,) = spool_folder(spools, PLAN).iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert [5, 6] == [rows.index for rows in peek_spool(spools, PLAN, 1)]
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [5, 6] == [rows.index for rows in peek_spool(spools, PLAN, 1)]


def test_two_spools_of_one_shard_are_one(home: Path):
    spools, rows = home / SPOOLS, rows_of(1)
    with open_spool(spools, PLAN, 1) as first, open_spool(spools, PLAN, 1) as second:
        first.append(rows[1])
        second.append(rows[1])
        second.append(rows[0])
        assert [4, 5] == [one.index for one in peek_spool(spools, PLAN, 1)]


def test_a_lock_is_seen_without_being_taken(tmp_path: Path):
    paths = [tmp_path / name for name in ("one", "two", "gone")]
    for path in paths[:2]:
        path.touch()
    assert any_locked(paths) is False
    with paths[1].open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert any_locked(paths) is True and any_locked(paths[:1]) is False
    assert any_locked(paths) is False and any_locked([]) is False


def test_a_system_that_lists_no_locks_leaves_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "one").touch()
    monkeypatch.setattr("rollout.flock.LOCKS", tmp_path / "none")
    assert any_locked([tmp_path / "one"]) is None
