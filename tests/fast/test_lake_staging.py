import json
import struct
from dataclasses import replace
from datetime import datetime

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lake_batch import plan_batch, rollout_samples, same_bits, sample_rows, stage_all, stamp_rows, tape_rows
from strategies import all_doubles, samples

from rollout.columns import SAMPLES_SCHEMA, table_to_samples
from rollout.errors import BadConfig, BadLake, BatchIncomplete, StagedChanged
from rollout.lake.datafile import cut_by_bytes, row_bytes, write_data_file
from rollout.lake.paths import LakePaths
from rollout.lake.schema import SCHEMAS, SchemaBreach, conform
from rollout.lake.staging import (
    create_plan,
    planned_batches,
    read_plan,
    read_staged,
    require_all,
    stage_shard,
    staged_shards,
    verify,
)
from rollout.sample import InvalidSample


@pytest.fixture
def paths(tmp_path):
    return LakePaths(tmp_path / "lake")


def staged_files(paths):
    return [paths.store.path(f"staging/b1/data/{name}") for name in paths.store.names("staging/b1/data")]


# plan.json


def test_a_plan_reads_back_as_written(paths):
    plan = plan_batch(rollout_ids="index")
    assert plan == create_plan(paths, plan)
    assert plan == read_plan(paths, "b1")
    foreign = paths.store.path("staging") / "Copy of b1"
    foreign.mkdir()
    (foreign / "plan.json").write_bytes(plan.to_bytes())
    assert ["b1"] == planned_batches(paths)
    assert read_plan(paths, "b2") is None


def test_the_first_plan_of_a_configuration_stands(paths):
    """Shard size is no part of the hash, so the stored cut holds for a later run with another."""
    first = create_plan(paths, plan_batch())
    assert first == create_plan(paths, plan_batch(shard_size=100))


def test_a_batch_id_with_another_configuration_is_refused_with_both_hashes(paths):
    first = create_plan(paths, plan_batch())
    other = plan_batch(temperature=0.5)
    with pytest.raises(BadConfig) as caught:
        create_plan(paths, other)
    message = str(caught.value)
    assert first.config_hash in message and other.config_hash in message
    assert "temperature: 1.0 != 0.5" in message and "\n" not in message


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"batch_id": "b1"}'])
def test_a_torn_plan_is_named(paths, damage):
    create_plan(paths, plan_batch())
    paths.store.replace("staging/b1/plan.json", damage)
    with pytest.raises(BadLake, match=r"staging/b1/plan.json is damaged"):
        create_plan(paths, plan_batch())


def test_a_writer_killed_before_the_link_leaves_no_plan(paths, monkeypatch):
    def fault_killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("rollout.lake.store.os.link", fault_killed)
    with pytest.raises(KeyboardInterrupt):
        create_plan(paths, plan_batch())
    monkeypatch.undo()
    assert read_plan(paths, "b1") is None
    assert create_plan(paths, plan_batch()).batch_id == "b1"


# Shards


def test_staged_rows_read_back_sorted_with_their_bits(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    for shard, manifest in manifests.items():
        verify(paths, manifest)
        found, tapes = read_staged(paths, manifest)
        given_rows = sample_rows(plan, shard)
        order = pa.compute.sort_indices(
            given_rows, sort_keys=[("group_index", "ascending"), ("rollout_key", "ascending"), ("sibling", "ascending")]
        )
        assert same_bits(conform(given_rows, "samples").take(order), found)
        assert tapes.column("seq").to_pylist() == [-1, 0] * 4
    assert manifests == staged_shards(paths, "b1")
    assert [0, 1, 2] == [m.shard for m in require_all(plan, staged_shards(paths, "b1"))]


def test_the_first_writer_of_a_shard_wins_and_a_zombie_changes_nothing(paths):
    """G21: the frozen worker wakes up with other rows when its shard has been staged by another."""
    plan = create_plan(paths, plan_batch())
    first = stage_shard(paths, plan, 0, sample_rows(plan, 0), tape_rows(plan, 0), {"by": "first"})
    before = staged_files(paths)
    second = stage_shard(paths, plan, 0, sample_rows(plan, 0, seed=9), tape_rows(plan, 0), {"by": "zombie"})
    assert first == second
    assert before == staged_files(paths)


def test_a_zombie_that_wakes_between_files_and_manifest_loses_and_its_files_go(paths, monkeypatch):
    plan = create_plan(paths, plan_batch())
    create, winner = paths.store.create, []

    def fault_overtaken(key, data):
        monkeypatch.undo()
        winner.append(stage_shard(paths, plan, 0, sample_rows(plan, 0), tape_rows(plan, 0), {}))
        return create(key, data)

    monkeypatch.setattr(paths.store, "create", fault_overtaken)
    lost = stage_shard(paths, plan, 0, sample_rows(plan, 0, seed=9), tape_rows(plan, 0), {})
    assert winner == [lost]
    assert {f.path for f in lost.files} == {f"data/{file.name}" for file in staged_files(paths)}
    verify(paths, lost)


def test_a_crash_before_the_manifest_leaves_the_shard_unstaged(paths, monkeypatch):
    plan = create_plan(paths, plan_batch())

    def fault_killed(key, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(paths.store, "create", fault_killed)
    with pytest.raises(KeyboardInterrupt):
        stage_shard(paths, plan, 0, sample_rows(plan, 0), tape_rows(plan, 0), {})
    monkeypatch.undo()
    assert {} == staged_shards(paths, "b1")
    with pytest.raises(BatchIncomplete, match="3 of 3 shards are not staged"):
        require_all(plan, staged_shards(paths, "b1"))
    stage_shard(paths, plan, 0, sample_rows(plan, 0), tape_rows(plan, 0), {})
    with pytest.raises(BatchIncomplete, match=r"2 of 3 shards are not staged \(first 1\).*--batch-id b1"):
        require_all(plan, staged_shards(paths, "b1"))


@pytest.mark.parametrize("kind", ["samples", "trajectories"])
def test_a_flipped_bit_and_a_missing_file_are_noticed(paths, kind):
    manifest = stage_all(paths, plan_batch())[1]
    file = paths.store.path(manifest.key(manifest.files_of(kind)[0]))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(StagedChanged, match="digest"):
        verify(paths, manifest)
    file.write_bytes(data + b"x")
    with pytest.raises(StagedChanged, match="bytes, its manifest says"):
        verify(paths, manifest)
    file.unlink()
    with pytest.raises(StagedChanged, match="is missing"):
        verify(paths, manifest)
    with pytest.raises(StagedChanged, match="is missing"):
        read_staged(paths, manifest)


def test_a_damaged_or_foreign_manifest_is_named(paths):
    manifests = stage_all(paths, plan_batch())
    paths.store.replace("staging/b1/shards/0.json", b"{")
    with pytest.raises(StagedChanged, match=r"shards/0.json is damaged"):
        staged_shards(paths, "b1")
    paths.store.replace("staging/b1/shards/0.json", manifests[1].to_bytes())
    with pytest.raises(StagedChanged, match="is the manifest of b1/1"):
        staged_shards(paths, "b1")


def test_a_manifest_cannot_name_a_file_outside_its_batch(paths):
    manifest = stage_all(paths, plan_batch())[0]
    data = json.loads(manifest.to_bytes())
    data["files"][0]["path"] = "../../other"
    paths.store.replace("staging/b1/shards/0.json", json.dumps(data).encode())
    with pytest.raises(StagedChanged, match="no path inside a lake"):
        staged_shards(paths, "b1")


def test_a_manifest_of_another_configuration_is_refused(paths):
    manifests = stage_all(paths, plan_batch())
    with pytest.raises(StagedChanged, match="shard 0 was staged for b1 with config hash"):
        require_all(plan_batch(temperature=0.5), manifests)


# Rows that are refused


def stage_changed(paths, change):
    plan = create_plan(paths, plan_batch())
    rows = [s for index in plan.shards[0].indexes for s in rollout_samples(index, 2)]
    table = conform(change(stamp_rows(plan, 0, rows)), "samples")
    return stage_shard(paths, plan, 0, table, tape_rows(plan, 0), {})


def set_column(table, name, values):
    position = table.schema.get_field_index(name)
    return table.set_column(position, table.schema.field(name), pa.array(values, table.schema.field(name).type))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("loss_mask", "rollout_key 0: loss_mask: its length"),
        ("rollout_log_probs", "rollout_key 0: rollout_log_probs: its length"),
        ("tokens", "rollout_key 0: response_length: not within the tokens"),
    ],
)
def test_a_per_token_list_of_a_third_length_is_refused_with_its_key(paths, name, problem):
    def change(table):
        values = table.column(name).to_pylist()
        values[0] = values[0] + [0] if name != "tokens" else []
        lengths = table.column("response_length").to_pylist()
        if name == "tokens":
            lengths[0] = 1
            table = set_column(table, "response_length", lengths)
            for other, filler in (("loss_mask", 1), ("rollout_log_probs", -1.0)):
                filled = table.column(other).to_pylist()
                table = set_column(table, other, [[filler], *filled[1:]])
        return set_column(table, name, values)

    with pytest.raises(InvalidSample, match=problem):
        stage_changed(paths, change)
    assert {} == staged_shards(paths, "b1")
    assert [] == staged_files(paths)


def test_nan_as_reward_a_null_token_and_lost_or_doubled_rollouts_are_refused(paths):
    def lose_last(table):
        return table.filter(pa.compute.not_equal(table.column("index"), 3))

    def double(table):
        return pa.concat_tables([table, table.slice(table.num_rows - 1)])

    def lose_sibling(table):
        return table.slice(1)

    cases = [
        (lambda t: set_column(t, "reward", [float("nan"), *t.column("reward").to_pylist()[1:]]), "reward: NaN"),
        (lambda t: set_column(t, "tokens", [[1, None] * 5, *t.column("tokens").to_pylist()[1:]]), "element is null"),
        (lose_last, "1 planned rollouts have no row .first index 3"),
        (double, "sibling"),
        (lose_sibling, "sibling"),
        (lambda t: set_column(t, "batch_id", ["b1", *["x"] * (t.num_rows - 1)]), "batch_id: 'x' in the rows of 'b1'"),
        (lambda t: set_column(t, "index", [9, 9, *t.column("index").to_pylist()[2:]]), "planned rollouts have no row"),
        (lambda t: set_column(t, "rollout_key", [1] * t.num_rows), "rollout_key 1"),
    ]
    for change, problem in cases:
        with pytest.raises(InvalidSample, match=problem):
            stage_changed(paths, change)
    assert {} == staged_shards(paths, "b1")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.append_column("extra", pa.nulls(t.num_rows)), "unknown or repeated columns extra"),
        (lambda t: t.drop_columns(["rollout_key"]), "rollout_key: null in"),
        (lambda t: t.drop_columns(["reward"]).append_column("reward", pa.array(["1"] * t.num_rows)), "reward: string"),
        (
            lambda t: t.drop_columns(["created_at"]).append_column(
                "created_at", pa.array([datetime(2026, 1, 1)] * t.num_rows, pa.timestamp("us"))
            ),
            "naive timestamp",
        ),
        (
            lambda t: t.drop_columns(["index"]).append_column("index", pa.array([0.5] * t.num_rows)),
            "index: double where the schema has int64",
        ),
        (lambda t: set_column(t, "schema_version", [2] * t.num_rows), r"schema_version: \[2\]"),
    ],
)
def test_a_table_that_does_not_fit_the_frozen_schema_is_refused_by_column(paths, change, problem):
    with pytest.raises(SchemaBreach, match=problem):
        stage_changed(paths, change)


def test_tapes_without_their_sessions_row_or_with_a_number_twice_are_refused(paths):
    plan = create_plan(paths, plan_batch())
    tapes = tape_rows(plan, 0)
    for broken, problem in [
        (tapes.filter(pa.compute.not_equal(tapes.column("seq"), -1)), "lacks its session's row"),
        (pa.concat_tables([tapes, tapes.slice(0, 1)]), "has two rows with seq 0"),
        (tape_rows(plan, 1), "index 4 is not of shard 0"),
    ]:
        with pytest.raises(InvalidSample, match=problem):
            stage_shard(paths, plan, 0, sample_rows(plan, 0), broken, {})


def test_wider_arrow_types_of_other_writers_are_taken(paths):
    """Polars gives large_string and large_list; the file still has the frozen types."""
    plan = create_plan(paths, plan_batch())
    wide = pl.DataFrame(sample_rows(plan, 0)).to_arrow()
    assert wide.schema.field("prompt").type != pa.string()
    manifest = stage_shard(paths, plan, 0, wide, tape_rows(plan, 0), {})
    assert read_staged(paths, manifest)[0].schema.equals(SAMPLES_SCHEMA)


# Files


def test_a_files_footer_has_the_frozen_schema_and_no_other(paths):
    for manifest in stage_all(paths, plan_batch()).values():
        for file in manifest.files:
            footer = pq.read_metadata(paths.store.path(manifest.key(file)))
            assert footer.schema.to_arrow_schema().equals(SCHEMAS[file.table])
            assert footer.metadata is None
            assert file.digest[:16] in file.path and manifest.writer in file.path


def test_all_null_and_empty_columns_keep_their_types_everywhere(tmp_path):
    """G19: shard 1 has rollout_id all null and an empty tokens list, shard 2 has ids."""
    files = []
    for number, keys in enumerate(([None, None], [5, 6])):
        rows = [replace_sample(s, rollout_id=key) for s, key in zip(two_samples(empty=number == 0), keys, strict=True)]
        table = stamp_rows(plan_batch(), 0, rows)
        files.append(tmp_path / f"{number}.parquet")
        write_data_file(conform(table, "samples"), np.arange(2), files[-1], "samples")
    for order in (files, files[::-1]):
        frame = pl.scan_parquet(order).select("rollout_id", "tokens").collect()
        assert {"rollout_id": pl.Int64, "tokens": pl.List(pl.Int32)} == dict(frame.schema)
        table = pa.concat_tables([pq.read_table(file) for file in order])
        assert pa.int64() == table.schema.field("rollout_id").type
    found = duckdb.sql(f"select typeof(rollout_id), typeof(tokens) from read_parquet({[str(f) for f in files]})")
    assert {("BIGINT", "INTEGER[]")} == set(found.fetchall())


def two_samples(empty):
    both = [rollout_samples(index, 1)[0] for index in (1, 2)]
    if empty:
        none = {"tokens_T": np.zeros(0, np.int32), "response_length": 0}
        lists = {"loss_mask_R": np.zeros(0, np.int8), "rollout_log_probs_R": np.zeros(0)}
        both = [replace_sample(s, **none, **lists) for s in both]
    return both


def replace_sample(sample, **changes):
    return replace(sample, **changes)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=st.lists(samples(), min_size=1, max_size=4), group_bytes=st.integers(1, 2000))
def test_any_samples_come_back_from_parquet_bit_for_bit(tmp_path_factory, rows, group_bytes):
    table = conform(stamp_rows(plan_batch(), 0, rows), "samples")
    file = tmp_path_factory.mktemp("bits") / "f.parquet"
    write_data_file(table, np.arange(len(rows)), file, "samples", row_group_bytes=group_bytes)
    found = conform(pq.read_table(file), "samples")
    assert same_bits(table, found)
    assert len(table_to_samples(found)) == len(rows)
    polars = conform(pl.read_parquet(file).to_arrow(), "samples")
    assert same_bits(table, polars)


SIGNALLING_NAN, PAYLOAD_NAN = 0x7FF0000000000001, 0xFFF8DEADBEEF0001


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(all_doubles, max_size=8))
def test_doubles_keep_nan_payloads_and_minus_zero(tmp_path_factory, values):
    specials = [struct.unpack("<d", struct.pack("<Q", b))[0] for b in (SIGNALLING_NAN, PAYLOAD_NAN, 1 << 63, 1)]
    bits = np.array([*specials, *values], np.float64).view(np.int64)
    plan = plan_batch()
    tapes = tape_rows(plan, 0).slice(0, 1)
    lists = pa.ListArray.from_arrays(pa.array([0, len(bits)], pa.int32()), pa.array(bits.view(np.float64)))
    tapes = tapes.set_column(tapes.schema.get_field_index("output_log_probs"), "output_log_probs", lists)
    file = tmp_path_factory.mktemp("bits") / "f.parquet"
    write_data_file(conform(tapes, "trajectories"), np.arange(1), file, "trajectories")
    for found in (
        pq.read_table(file).column("output_log_probs").chunk(0).flatten().to_numpy(),
        pl.read_parquet(file)["output_log_probs"].explode().to_numpy(),
    ):
        assert bits.tolist() == found.view(np.int64).tolist()


def test_row_groups_are_bounded_by_bytes(paths):
    """G62, small: 300 rows of 8 kB text under a bound of 1 MB."""
    plan = create_plan(paths, plan_batch(n_samples_per_prompt=50, shard_size=1000))
    rows = [replace_sample(s, response="x" * 8000) for i in range(300) for s in rollout_samples(i, 50)]
    manifest = stage_shard(
        paths, plan, 0, stamp_rows(plan, 0, rows), tape_rows(plan, 0), {}, row_group_bytes=2**20, file_bytes=2 * 2**20
    )
    files = manifest.files_of("samples")
    assert sum(file.rows for file in files) == len(rows)
    assert len(files) == 2
    keys = []
    for file in files:
        footer = pq.read_metadata(paths.store.path(manifest.key(file)))
        assert footer.num_row_groups == 2
        assert all(footer.row_group(i).num_rows * 8000 < 2**20 for i in range(footer.num_row_groups))
        keys.append(set(pq.read_table(paths.store.path(manifest.key(file)))["rollout_key"].to_pylist()))
    assert not keys[0] & keys[1], "a rollout straddles two files"


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30), limit=st.integers(1, 100), per_key=st.none() | st.integers(1, 5)
)
def test_cuts_cover_every_row_once_and_keep_keys_together(sizes, limit, per_key):
    array = np.array(sizes, np.int64)
    keys = None if per_key is None else np.arange(len(sizes)) // per_key
    runs = list(cut_by_bytes(array, limit, keys))
    assert list(range(len(sizes))) == [row for run in runs for row in range(len(sizes))[run]]
    for run in runs:
        units = 1 if keys is None else per_key
        assert (
            array[run].sum() <= limit or run.stop - run.start <= units or array[run.start : run.stop - units].sum() == 0
        )
        if keys is not None and run.start:
            assert keys[run.start] != keys[run.start - 1]


def test_row_bytes_counts_lists_texts_and_structs():
    table = pa.table(
        {
            "a": pa.array([1, 2], pa.int32()),
            "b": pa.array(["xyz", None]),
            "c": pa.array([[1, 2], []], pa.list_(pa.int64())),
            "d": pa.array([[{"v": "ab", "n": 1}], None], pa.list_(pa.struct([("v", pa.string()), ("n", pa.int32())]))),
        }
    )
    assert [4 + 3 + 16 + 6, 4] == row_bytes(table).tolist()
    assert [4] == row_bytes(table.slice(1)).tolist()


def test_a_shard_without_tapes_is_staged(paths):
    plan = create_plan(paths, plan_batch())
    manifest = stage_shard(paths, plan, 0, sample_rows(plan, 0), tape_rows(plan, 0).slice(0, 0), {})
    verify(paths, manifest)
    assert 0 == read_staged(paths, manifest)[1].num_rows
