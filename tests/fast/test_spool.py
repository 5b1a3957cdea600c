"""The spool: whatever is done to its file, what is read back is exactly the good prefix, and it goes on from there."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lake_batch import plan_batch, same_bits, sample_rows, tape_rows

from rollout.batch.spool import (
    RolloutRows,
    open_spool,
    remove_spools,
    spool_folder,
)

PLAN = plan_batch()
SHARD = 1


def rows_of(shard: int = SHARD) -> list[RolloutRows]:
    """The rollouts of a shard, one or two samples each."""
    tables = sample_rows(PLAN, shard), tape_rows(PLAN, shard)
    return [
        RolloutRows(
            **{name: _rows(table, index) for name, table in zip(("samples", "trajectories"), tables, strict=True)}
        )
        for index in PLAN.shards[shard].indexes
    ]


def _rows(table: pa.Table, index: int) -> pa.RecordBatch:
    (batch,) = table.filter(pc.equal(table.column("index"), index)).combine_chunks().to_batches()
    return batch


ROWS = rows_of()


def fill(root: Path, rows: list[RolloutRows] = ROWS) -> tuple[Path, list[int]]:
    """A spool with `rows`: its file, and the offsets before the first record and behind each."""
    with open_spool(root, PLAN, SHARD) as spool:
        ends = [spool.path.stat().st_size]
        for one in rows:
            spool.append(one)
            ends.append(spool.path.stat().st_size)
    return spool.path, ends


def found(root: Path) -> list[RolloutRows]:
    with open_spool(root, PLAN, SHARD) as spool:
        return spool.rollouts


def assert_same(expected: list[RolloutRows], actual: list[RolloutRows]) -> None:
    assert [one.index for one in expected] == [one.index for one in actual]
    for one, other in zip(expected, actual, strict=True):
        for name in ("samples", "trajectories"):
            assert same_bits(*(pa.Table.from_batches([getattr(rows, name)]) for rows in (one, other)))


def test_what_was_appended_is_read_back_bit_for_bit(tmp_path):
    fill(tmp_path)
    assert_same(ROWS, found(tmp_path))


with tempfile.TemporaryDirectory() as _folder:
    _path, ENDS = fill(Path(_folder))
    BYTES = _path.read_bytes()
    NAME = _path.relative_to(_folder)


def damage(data: bytes, place: int, flip: int | None) -> bytes:
    """`data` cut at `place`, or with the bits of `flip` turned over there."""
    return data[:place] if flip is None else data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, len(BYTES) - 1), flip=st.none() | st.integers(1, 255), tail=st.binary(max_size=60))
def test_any_cut_or_flipped_byte_leaves_exactly_the_rollouts_before_it(place, flip, tail):
    damaged = damage(BYTES, place, flip) + tail
    pairs = enumerate(zip(BYTES, damaged, strict=False))  # the tail can be the very bytes that were cut off
    n_same = next((k for k, (a, b) in pairs if a != b), min(len(BYTES), len(damaged)))
    good = max(0, sum(end <= n_same for end in ENDS) - 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NAME
        path.parent.mkdir(parents=True)
        path.write_bytes(damaged)
        with open_spool(Path(folder), PLAN, SHARD) as spool:
            assert_same(ROWS[:good], spool.rollouts)
            assert ENDS[good] == path.stat().st_size
            for one in ROWS[good:]:
                spool.append(one)
        assert BYTES == path.read_bytes()


@pytest.mark.parametrize("place", [*ENDS, *(end - 1 for end in ENDS), *(end + 8 for end in ENDS[:-1])])
def test_a_cut_at_and_around_every_border(tmp_path, place):
    path, _ = fill(tmp_path)
    path.write_bytes(BYTES[:place])
    good = max(0, sum(end <= place for end in ENDS) - 1)
    assert_same(ROWS[:good], found(tmp_path))


def test_a_record_twice_or_in_another_place_is_no_record(tmp_path):
    path, ends = fill(tmp_path)
    first, second = BYTES[ends[0] : ends[1]], BYTES[ends[1] : ends[2]]
    path.write_bytes(BYTES[: ends[1]] + first)
    assert_same(ROWS[:1], found(tmp_path))
    path.write_bytes(BYTES[: ends[0]] + second + first)
    assert_same([], found(tmp_path))


def test_zeros_of_a_lost_page_are_no_record(tmp_path):
    path, ends = fill(tmp_path)
    path.write_bytes(BYTES[: ends[2]] + bytes(4096))
    assert_same(ROWS[:2], found(tmp_path))


@pytest.mark.parametrize(
    "other", [plan_batch(seed=1), plan_batch(batch_id="b2"), plan_batch(shard_size=6), plan_batch(lake="elsewhere")]
)
def test_a_spool_of_another_plan_is_never_used(tmp_path, other):
    path, _ = fill(tmp_path)
    with open_spool(tmp_path, other, SHARD) as spool:
        assert [] == spool.rollouts and path != spool.path
    # Not even under this plan's name: the header says what the rows are of.
    path.write_bytes(spool.path.read_bytes() + BYTES[ENDS[0] :])
    assert_same([], found(tmp_path))


def test_a_spool_of_another_shard_is_never_used(tmp_path):
    path, _ = fill(tmp_path)
    with open_spool(tmp_path, PLAN, 0) as spool:
        assert [] == spool.rollouts
    os.replace(path, spool.path)
    with open_spool(tmp_path, PLAN, 0) as spool:
        assert [] == spool.rollouts


def test_two_that_run_one_shard_never_share_a_file_and_lose_nothing(tmp_path):
    first, second = open_spool(tmp_path, PLAN, SHARD), open_spool(tmp_path, PLAN, SHARD)
    assert first.path != second.path
    first.append(ROWS[0])
    second.append(ROWS[0])
    second.append(ROWS[1])
    first.close()
    with open_spool(tmp_path, PLAN, SHARD) as third:  # the second still has its own
        assert_same(ROWS[:1], third.rollouts)
    second.close()
    with open_spool(tmp_path, PLAN, SHARD) as last:
        assert_same(ROWS[:2], last.rollouts)
        assert [last.path] == list(last.path.parent.iterdir())
    assert_same(ROWS[:2], found(tmp_path))


HOLDER = """
import sys
from pathlib import Path
from lake_batch import plan_batch
from rollout.batch.spool import open_spool
spool = open_spool(Path(sys.argv[1]), plan_batch(), 1)
print(spool.path, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_gives_its_file_up(tmp_path):
    fill(tmp_path, ROWS[:1])
    argv = [sys.executable, "-c", HOLDER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        held = Path(holder.stdout.readline().strip())
        with open_spool(tmp_path, PLAN, SHARD) as spool:
            assert ([], True) == (spool.rollouts, held != spool.path)
        holder.kill()
        holder.wait()
    with open_spool(tmp_path, PLAN, SHARD) as spool:
        assert (held, 1) == (spool.path, len(spool.rollouts))


def test_a_staged_shard_leaves_nothing(tmp_path):
    fill(tmp_path)
    with open_spool(tmp_path, PLAN, SHARD) as spool, open_spool(tmp_path, PLAN, 0) as other:
        spool.remove()
        assert [other.path] == [path for path in tmp_path.rglob("*") if path.is_file()]
        spool.append(ROWS[0])  # a rollout that ends late writes nowhere
        other.remove()
    assert [] == list(tmp_path.iterdir())


def test_what_a_kill_after_staging_left_is_removed_unless_somebody_holds_it(tmp_path):
    fill(tmp_path)
    with open_spool(tmp_path, PLAN, SHARD) as held:
        remove_spools(tmp_path, PLAN, SHARD)
        assert [held.path] == list(spool_folder(tmp_path, PLAN).iterdir())
    remove_spools(tmp_path, PLAN, SHARD)
    assert [] == list(tmp_path.iterdir())
    remove_spools(tmp_path, PLAN, SHARD)


def test_a_disk_that_is_full_stops_no_shard_and_spoils_no_record(tmp_path, caplog):
    with open_spool(tmp_path, PLAN, SHARD) as spool:
        spool.append(ROWS[0])
        end = spool.path.stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (end + 100, hard))
        try:
            spool.append(ROWS[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        spool.append(ROWS[2])
    assert 1 == len(caplog.records) and "are lost in a kill" in caplog.text
    assert_same(ROWS[:1], found(tmp_path))
