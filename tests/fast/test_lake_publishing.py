import json
import os
import time
from datetime import timedelta

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, WriterProperties
from deltalake.exceptions import CommitFailedError
from lake_batch import ROW, parity_rows, plan_batch, publish, row_counts, same_bits, sample_rows, stage_all

from rollout.errors import BadConfig, BadLake, BatchClosed, BatchIncomplete, PublishFailed, StagedChanged
from rollout.lake import LakePaths, publishing, scan_batches, scan_parity, scan_samples, scan_trajectories, tables
from rollout.lake.publishing import batch_status, publish_batch, published_version, quarantine_batch
from rollout.lake.schema import DELTA_SCHEMAS, TABLE_NAMES, conform
from rollout.lake.staging import read_staged, staged_shards


@pytest.fixture
def paths(tmp_path):
    return LakePaths(tmp_path / "x y ü 50%")


def expected_samples(plan):
    table = pa.concat_tables([conform(sample_rows(plan, cut.shard), "samples") for cut in plan.shards])
    return table.sort_by([("rollout_key", "ascending"), ("sibling", "ascending")])


def read_samples(paths, batch=None):
    frame = scan_samples(paths, batch).sort("rollout_key", "sibling").collect()
    return conform(frame.to_arrow(), "samples")


def test_a_batch_is_published_whole_with_its_bits(paths):
    plan = plan_batch()
    assert batch_status(paths, "b1") is None
    result = publish(paths, plan, stage_all(paths, plan))
    assert (result.batch_id, result.already) == ("b1", False)
    assert [16, 24, 12, 1] == row_counts(paths)
    assert same_bits(expected_samples(plan), read_samples(paths, "b1"))
    assert "published" == batch_status(paths, "b1")
    row = scan_batches(paths).collect().to_dicts()[0]
    assert (row["status"], row["config_hash"], row["reward_mean"]) == ("published", plan.config_hash, 0.5)


def test_the_samples_commit_comes_last_and_carries_the_batch_id(paths):
    plan = plan_batch()
    result = publish_batch(paths, plan, stage_all(paths, plan), parity_rows(plan), ROW, metadata={"flow_run": "f1"})
    table = DeltaTable(paths.table_uri("samples"))
    commit = next(c for c in table.history() if c["version"] == result.version)
    assert ("b1", "f1") == (commit["batch_id"], commit["flow_run"])
    assert table.version() == result.version == published_version(paths, "b1")
    times = [DeltaTable(paths.table_uri(n)).history(1)[0]["timestamp"] for n in publishing_order()]
    assert times == sorted(times)


def publishing_order():
    return ("trajectories", "parity", "batches", "samples")


def test_the_staged_files_themselves_are_published(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    publish(paths, plan, manifests)
    staged = {os.stat(paths.store.path(m.key(f))).st_ino for m in manifests.values() for f in m.files_of("samples")}
    folder = paths.store.path("tables/samples")
    published = {os.stat(folder / name).st_ino for name in os.listdir(folder) if name.endswith(".parquet")}
    assert staged == published


def test_publishing_again_is_a_no_op_that_says_so(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    first = publish(paths, plan, manifests)
    again = publish(paths, plan, manifests)
    assert (again.already, again.version) == (True, first.version)
    assert [16, 24, 12, 1] == row_counts(paths)


def test_publish_compact_publish_again_is_one_set_of_rows(paths):
    """G51: a compaction replaces the published paths; only the transaction still knows the batch."""
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    publish(paths, plan, manifests)
    for name in publishing_order():
        table = DeltaTable(paths.table_uri(name))
        table.optimize.compact(writer_properties=WriterProperties(max_row_group_size=1000))
        table.create_checkpoint()
    assert publish(paths, plan, manifests).already
    assert [16, 24, 12, 1] == row_counts(paths)
    assert same_bits(expected_samples(plan), read_samples(paths))
    schema = DeltaTable(paths.table_uri("samples")).schema()
    assert DELTA_SCHEMAS["samples"] == schema, "rollout_key stays not null"


def test_a_missing_shard_is_named_and_nothing_is_visible(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    del manifests[1]
    with pytest.raises(BatchIncomplete, match=r"1 of 3 shards are not staged \(first 1\)"):
        publish(paths, plan, manifests)
    with pytest.raises(BadLake, match="no lake at"):
        scan_samples(paths)


# Faults


@pytest.mark.parametrize("name", ["trajectories", "parity", "batches", "samples"])
@pytest.mark.parametrize("error", [CommitFailedError("conflict?"), OSError("timed out")])
def test_a_commit_that_landed_but_was_reported_failed_gives_one_set_of_rows(paths, monkeypatch, name, error):
    """G20."""
    write, faults = tables.write_transaction, []

    def fault_lost_answer(table, table_name, *rest):
        write(table, table_name, *rest)
        if table_name == name and not faults:
            faults.append(table_name)
            raise error

    monkeypatch.setattr(tables, "write_transaction", fault_lost_answer)
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    assert not publish(paths, plan, manifests).already, "the commit is this call's own, whatever the answer was"
    assert [name] == faults
    assert publish(paths, plan, manifests).already
    assert [16, 24, 12, 1] == row_counts(paths)


@pytest.mark.parametrize("name", ["trajectories", "parity", "batches", "samples"])
@pytest.mark.parametrize("after", [False, True])
def test_a_publisher_killed_around_any_commit_is_finished_by_the_next(paths, monkeypatch, name, after):
    write = tables.write_transaction

    def fault_killed(table, table_name, *rest):
        if table_name != name or after:
            write(table, table_name, *rest)
        if table_name == name:
            raise KeyboardInterrupt

    plan = plan_batch()
    manifests = stage_all(paths, plan)
    monkeypatch.setattr(tables, "write_transaction", fault_killed)
    with pytest.raises(KeyboardInterrupt):
        publish(paths, plan, manifests)
    monkeypatch.undo()
    done = name == "samples" and after
    assert ("published" if done else None) == batch_status(paths, "b1")
    assert done == publish(paths, plan, manifests).already
    assert [16, 24, 12, 1] == row_counts(paths)


@pytest.mark.parametrize("name", ["trajectories", "parity", "batches", "samples"])
def test_a_publisher_overtaken_between_its_look_up_and_its_commit_adds_nothing(paths, monkeypatch, name):
    """Its snapshot says that the batch is new; the commit on that snapshot must be refused, not rebased."""
    write = tables.write_transaction
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    overtaking = []

    def overtaken(table, table_name, *rest):
        if table_name == name and not overtaking:
            overtaking.append(True)
            overtaking.append(publish(paths, plan, manifests))
        write(table, table_name, *rest)

    monkeypatch.setattr(tables, "write_transaction", overtaken)
    assert publish(paths, plan, manifests).already
    assert not overtaking[1].already
    assert [16, 24, 12, 1] == row_counts(paths)


def test_a_publisher_overtaken_by_another_batch_still_tells_its_own_version(paths, monkeypatch):
    """A commit that was rebased by automatic retries would carry the version of the other's commit."""
    write = tables.write_transaction
    plans = [plan_batch("a1"), plan_batch("b2")]
    staged = [stage_all(paths, plan) for plan in plans]

    def overtaken(table, name, *rest):
        if name == "samples":
            monkeypatch.undo()
            publish(paths, plans[1], staged[1])
        write(table, name, *rest)

    monkeypatch.setattr(tables, "write_transaction", overtaken)
    publish(paths, plans[0], staged[0])
    history = {c["version"]: c.get("batch_id") for c in DeltaTable(paths.table_uri("samples")).history()}
    assert ["a1", "b2"] == [history[published_version(paths, batch_id)] for batch_id in ("a1", "b2")]
    assert [32, 48, 24, 2] == row_counts(paths)


def test_a_storage_that_never_answers_gives_up_and_a_later_publish_works(paths, monkeypatch):
    def fault_no_answer(*args):
        raise OSError("no route to host")

    plan = plan_batch()
    manifests = stage_all(paths, plan)
    monkeypatch.setattr(tables, "write_transaction", fault_no_answer)
    monkeypatch.setattr(tables, "_pause", lambda attempt: None)
    with pytest.raises(PublishFailed, match="no route to host"):
        publish(paths, plan, manifests)
    monkeypatch.undo()
    publish(paths, plan, manifests)
    assert [16, 24, 12, 1] == row_counts(paths)


def test_a_vacuum_between_the_moving_of_the_files_and_the_commit_keeps_them(paths, monkeypatch):
    """G54: staged a month ago, linked now; a link that kept the staged time would be vacuumed."""
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    old = time.time() - 40 * 86400
    for manifest in manifests.values():
        for file in manifest.files:
            os.utime(paths.store.path(manifest.key(file)), (old, old))
    commit_once = publishing.commit_once

    def vacuum_then_commit(lake, name, *rest):
        DeltaTable(lake.table_uri(name)).vacuum(full=True, dry_run=False)
        return commit_once(lake, name, *rest)

    monkeypatch.setattr(publishing, "commit_once", vacuum_then_commit)
    publish(paths, plan, manifests)
    assert [16, 24, 12, 1] == row_counts(paths)


def test_files_that_vanish_before_the_commit_are_noticed(paths, monkeypatch):
    """G54, with a retention that is too short."""
    commit_rows = publishing._commit_rows

    def vacuum_everything(lake, plan, name, rows):
        table = DeltaTable(lake.table_uri("samples"))
        table.vacuum(0, full=True, dry_run=False, enforce_retention_duration=False)
        return commit_rows(lake, plan, name, rows)

    plan = plan_batch()
    manifests = stage_all(paths, plan)
    monkeypatch.setattr(publishing, "_commit_rows", vacuum_everything)
    with pytest.raises(PublishFailed, match="vanished before its commit"):
        publish(paths, plan, manifests)
    monkeypatch.undo()
    publish(paths, plan, manifests)
    assert [16, 24, 12, 1] == row_counts(paths)


# The Delta log and its readers


def test_the_log_has_statistics_and_readers_prune_by_them(paths):
    for batch_id in ("a1", "b2"):
        plan = plan_batch(batch_id)
        publish(paths, plan, stage_all(paths, plan))
    actions = pl.DataFrame(DeltaTable(paths.table_uri("samples")).get_add_actions(flatten=True))
    for column in ("batch_id", "run_date", "rollout_key"):
        assert actions[f"min.{column}"].null_count() == actions[f"max.{column}"].null_count() == 0
        assert actions[f"null_count.{column}"].to_list() == [0] * 6
    assert 32 == actions["num_records"].sum()
    for name in actions.filter(pl.col("min.batch_id") == "b2")["path"]:
        os.unlink(paths.store.path(f"tables/samples/{name}"))
    assert 16 == scan_samples(paths, "a1").collect().height


def test_duckdb_and_pyarrow_read_the_same_rows_and_bits(paths):
    plan = plan_batch()
    publish(paths, plan, stage_all(paths, plan))
    dataset = DeltaTable(paths.table_uri("samples")).to_pyarrow_dataset()
    table = dataset.to_table().sort_by([("rollout_key", "ascending"), ("sibling", "ascending")])
    assert same_bits(expected_samples(plan), conform(table, "samples"))
    with duckdb.connect() as connection:
        connection.register("samples", dataset)
        rows = connection.sql("select count(*), sum(len(tokens)) from samples").fetchall()
    assert [(16, 16 * 9)] == rows


def test_filters_of_other_readers_find_every_row_whatever_column_they_name(paths):
    """Bounds that the log does not give must not be taken for null ones, which would drop whole files."""
    plan = plan_batch()
    publish(paths, plan, stage_all(paths, plan))
    for name in TABLE_NAMES:
        dataset = DeltaTable(paths.table_uri(name)).to_pyarrow_dataset()
        table = dataset.to_table()
        for field in table.schema:
            if pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
                continue
            value = table.column(field.name)[0]
            wanted = pc.field(field.name) == value if value.is_valid else pc.field(field.name).is_null()
            assert table.filter(wanted).num_rows == dataset.count_rows(filter=wanted) > 0, (name, field.name)


def test_batches_keep_apart(paths):
    plans = [plan_batch(batch_id) for batch_id in ("a1", "b2")]
    for plan in plans:
        publish(paths, plan, stage_all(paths, plan))
    for plan in plans:
        assert same_bits(expected_samples(plan), read_samples(paths, plan.batch_id))
    assert ["a1", "b2"] == scan_batches(paths).collect()["batch_id"].to_list()
    assert 0 == scan_samples(paths, "c3").collect().height
    with pytest.raises(BadConfig):
        scan_samples(paths, "C 3")


def test_a_lake_that_does_not_exist_yet_says_so(tmp_path):
    for scan in (scan_samples, scan_trajectories, scan_parity, scan_batches):
        with pytest.raises(BadLake, match="no lake at") as caught:
            scan(tmp_path / "none")
        assert "\n" not in str(caught.value)
    assert [] == os.listdir(tmp_path)


def test_the_newest_row_of_a_batch_wins(paths):
    plan = plan_batch()
    publish(paths, plan, stage_all(paths, plan))
    later = publishing._batch_table(plan, {"by": "me", "why": "bad judge"}, "discarded")
    created = pa.array(
        [later.column("created_at")[0].as_py() + timedelta(seconds=1)], later.schema.field("created_at").type
    )
    later = later.set_column(later.schema.get_field_index("created_at"), later.schema.field("created_at"), created)
    action = publishing.write_rows(paths, "b1", "batches", later)
    tables.commit_once(paths, "batches", "b1/discard", [action], {})
    assert [("discarded", "bad judge")] == scan_batches(paths).select("status", "why").collect().rows()
    assert "discarded" == batch_status(paths, "b1")


def test_a_release_counts_once_its_samples_are_committed_and_is_never_published_again(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    quarantine(paths, plan, manifests)
    released = publishing.write_rows(paths, "b1", "batches", publishing._batch_table(plan, {}, "released"))
    tables.commit_once(paths, "batches", "b1/release", [released], {})
    assert "quarantined" == batch_status(paths, "b1"), "its samples commit is missing"
    version = tables.commit_once(paths, "samples", "b1/release", [], {"batch_id": "b1"}).version
    assert "released" == batch_status(paths, "b1")
    result = publish(paths, plan, manifests)
    assert (True, version) == (result.already, result.version)


# Quarantine


def quarantine(paths, plan, manifests):
    report = {"paths": ["sample.rollout_log_probs[3]: 1 != 2"]}
    return quarantine_batch(paths, plan, manifests, parity_rows(plan, "differs"), ROW, report)


def test_a_quarantined_batch_shows_its_verdicts_and_never_its_rows(paths):
    plan = plan_batch()
    assert quarantine(paths, plan, stage_all(paths, plan))
    assert [0, 0, 12, 1] == row_counts(paths)
    assert "quarantined" == batch_status(paths, "b1")
    assert ["plan.json"] == [n for n in paths.store.names("staging/b1") if n.endswith(".json")]
    assert {} == staged_shards(paths, "b1")
    assert [] == paths.store.names("staging/b1/data")
    report = json.loads(paths.store.read("quarantine/b1/report.json"))
    assert report["paths"] == ["sample.rollout_log_probs[3]: 1 != 2"]
    held = staged_shards(paths, "b1", "quarantine")
    assert [0, 1, 2] == list(held)
    assert 16 == sum(read_staged(paths, manifest)[0].num_rows for manifest in held.values())


def test_a_quarantined_batch_is_closed(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    quarantine(paths, plan, manifests)
    with pytest.raises(BatchClosed, match="rollout release b1"):
        publish(paths, plan, manifests)
    assert not quarantine(paths, plan, manifests)
    assert [0, 0, 12, 1] == row_counts(paths)


def test_a_published_batch_cannot_be_quarantined(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    publish(paths, plan, manifests)
    with pytest.raises(BatchClosed, match="is published and cannot be quarantined"):
        quarantine(paths, plan, manifests)
    assert [16, 24, 12, 1] == row_counts(paths)


@pytest.mark.parametrize("step", ["write_transaction", "link", "remove"])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_quarantine_killed_anywhere_is_finished_by_the_next(paths, monkeypatch, step, call):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    owner = tables if step == "write_transaction" else paths.store
    real, calls = getattr(owner, step), []

    def fault_killed(*args):
        calls.append(args)
        if len(calls) > call:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, step, fault_killed)
    if step == "write_transaction" and call == 3:
        quarantine(paths, plan, manifests)
    else:
        with pytest.raises(KeyboardInterrupt):
            quarantine(paths, plan, manifests)
    monkeypatch.undo()
    quarantine(paths, plan, manifests)
    assert [0, 0, 12, 1] == row_counts(paths)
    held = staged_shards(paths, "b1", "quarantine")
    assert 16 == sum(read_staged(paths, manifest)[0].num_rows for manifest in held.values())
    assert {} == staged_shards(paths, "b1")


def test_a_publication_that_has_begun_stands_against_a_quarantine(paths, monkeypatch):
    write = tables.write_transaction

    def fault_killed(table, name, *rest):
        if name == "samples":
            raise KeyboardInterrupt
        write(table, name, *rest)

    plan = plan_batch()
    manifests = stage_all(paths, plan)
    monkeypatch.setattr(tables, "write_transaction", fault_killed)
    with pytest.raises(KeyboardInterrupt):
        publish(paths, plan, manifests)
    monkeypatch.undo()
    with pytest.raises(PublishFailed, match="its publication had begun"):
        quarantine(paths, plan, manifests)
    assert not publish(paths, plan, manifests).already
    assert [16, 24, 12, 1] == row_counts(paths)


def test_a_quarantine_in_the_middle_of_a_publication_closes_it(paths, monkeypatch):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    commit_rows = publishing._commit_rows

    def overtaken(lake, given, name, rows):
        if name == "batches":
            monkeypatch.undo()
            quarantine(paths, plan, manifests)
        return commit_rows(lake, given, name, rows)

    monkeypatch.setattr(publishing, "_commit_rows", overtaken)
    with pytest.raises(BatchClosed, match="b1 is quarantined"):
        publish(paths, plan, manifests)
    assert 0 == scan_samples(paths).collect().height
    assert "quarantined" == batch_status(paths, "b1")
    assert ["_delta_log"] == paths.store.names("tables/samples")


def test_a_changed_file_is_no_reason_for_quarantine(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    file = paths.store.path(manifests[0].key(manifests[0].files[0]))
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(StagedChanged):
        quarantine(paths, plan, manifests)
    assert np.array_equal([], paths.store.names("quarantine"))
