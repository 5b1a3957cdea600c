"""What publishing refuses: files that delta-rs would take as they are, rows of another batch, missing verdicts."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from lake_batch import ROW, parity_rows, plan_batch, publish, row_counts, stage_all

from rollout.errors import BadLake, ParityFailed, StagedChanged
from rollout.lake import LakePaths
from rollout.lake.datafile import file_digest
from rollout.lake.publishing import batch_status, publish_batch, quarantine_batch
from rollout.lake.staging import staged_shards


@pytest.fixture
def paths(tmp_path):
    return LakePaths(tmp_path / "x y ü 50%")


def rewrite(paths, manifests, change, kind="samples", **options):
    """Change a staged file and its manifest together."""
    manifest = manifests[0]
    file = manifest.files_of(kind)[0]
    path = paths.store.path(manifest.key(file))
    pq.write_table(change(pq.read_table(path)), path, store_schema=False, **options)
    data = json.loads(manifest.to_bytes())
    entry = next(f for f in data["files"] if f["path"] == file.path)
    with path.open("rb") as source:
        entry |= {"size": path.stat().st_size, "digest": file_digest(source)}
    paths.store.replace(f"{manifest.folder}/shards/0.json", json.dumps(data).encode())
    return staged_shards(paths, "b1")


def with_null_key(table):
    keys = pa.array([None, *table.column("rollout_key").to_pylist()[1:]], pa.int64())
    return table.set_column(table.schema.get_field_index("rollout_key"), "rollout_key", keys)


def with_float32(table):
    narrow = table.column("rollout_log_probs").cast(pa.list_(pa.float32()))
    return table.set_column(table.schema.get_field_index("rollout_log_probs"), "rollout_log_probs", narrow)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_null_key, "rollout_key is"),
        (with_float32, "rollout_log_probs is"),
        (lambda t: t.append_column("extra", pa.array([1] * t.num_rows)), "extra .'extra'."),
        (lambda t: t.drop_columns(["label"]), "missing .'label'."),
        (lambda t: t.select(t.column_names[::-1]), "another order"),
        (lambda t: t.slice(1), "rows, the manifest says"),
    ],
)
def test_a_file_that_does_not_fit_its_table_is_refused_and_nothing_is_published(paths, change, problem):
    """G52 among them: delta-rs would register a null rollout_key in the not-null column."""
    plan = plan_batch()
    manifests = rewrite(paths, stage_all(paths, plan), change)
    with pytest.raises(StagedChanged, match=problem):
        publish(paths, plan, manifests)
    assert [0, 0, 0, 0] == row_counts(paths)
    assert ["_delta_log"] == paths.store.names("tables/samples") == paths.store.names("tables/trajectories")


def test_a_changed_file_under_its_old_manifest_is_refused_and_nothing_is_published(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    file = paths.store.path(manifests[2].key(manifests[2].files_of("samples")[0]))
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        StagedChanged, match=r"^staging/b1/data/.*: digest .*; restore it, or remove its manifest in shards/"
    ):
        publish(paths, plan, manifests)
    assert [0, 0, 0, 0] == row_counts(paths)
    assert batch_status(paths, "b1") is None


def test_rows_of_another_batch_are_refused(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    for end in (publish_batch, lambda *args: quarantine_batch(*args, {})):
        with pytest.raises(ValueError, match="batch_id: 'b2' in the rows of 'b1'"):
            end(paths, plan, manifests, parity_rows(plan_batch("b2")), ROW)
        with pytest.raises(ValueError, match="unknown columns nonsense"):
            end(paths, plan, manifests, parity_rows(plan), {"nonsense": 1})
        assert batch_status(paths, "b1") is None


def constant(column, value):
    return lambda table: set_value(table, column, pa.array([value] * table.num_rows, table.schema.field(column).type))


def set_value(table, column, values):
    place = table.schema.get_field_index(column)
    return table.set_column(place, table.schema.field(place), values)


@pytest.mark.parametrize("kind", ["samples", "trajectories"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (constant("batch_id", "b2"), "batch_id is 'b2' to 'b2', not within 'b1' to 'b1'"),
        (constant("index", 5), "index is 5 to 5, not within 0 to 3"),
    ],
)
def test_staged_rows_of_another_batch_or_shard_never_get_into_a_table(paths, kind, change, problem):
    """File and manifest were rewritten together, so the digest is right; `scan_samples("b2")` must not see them."""
    plan = plan_batch()
    manifests = rewrite(paths, stage_all(paths, plan), change, kind)
    with pytest.raises(StagedChanged, match=problem):
        publish(paths, plan, manifests)
    assert [0, 0, 0, 0] == row_counts(paths)


def test_bounds_that_a_footer_does_not_tell_are_refused(paths):
    plan = plan_batch()
    manifests = rewrite(paths, stage_all(paths, plan), lambda table: table, write_statistics=False)
    with pytest.raises(StagedChanged, match="batch_id has unknown nulls"):
        publish(paths, plan, manifests)


def test_one_shards_manifest_does_not_stand_for_another(paths):
    plan = plan_batch()
    manifests = stage_all(paths, plan)
    with pytest.raises(StagedChanged, match="manifest of shard 0 stands for shard 1"):
        publish(paths, plan, {**manifests, 1: manifests[0]})
    with pytest.raises(StagedChanged, match="index is 0 to 3, not within 4 to 7"):
        publish(paths, plan, {**manifests, 1: replace(manifests[0], shard=1)})
    assert [0, 0, 0, 0] == row_counts(paths)


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        (lambda t: t.slice(1), ValueError, "11 verdicts on 11 rollouts, batch b1 has 12"),
        (lambda t: pa.concat_tables([t.slice(1), t.slice(1, 1)]), ValueError, "12 verdicts on 11 rollouts"),
        (constant("check", "live"), ValueError, "0 verdicts"),
        (constant("verdict", "differs"), ParityFailed, r"12 of 12 rollouts differ \(first index 0\)"),
    ],
)
def test_nothing_is_published_without_a_verdict_on_every_rollout_or_with_one_that_differs(
    paths, change, error, problem
):
    plan = plan_batch()
    with pytest.raises(error, match=problem):
        publish_batch(paths, plan, stage_all(paths, plan), change(parity_rows(plan)), ROW)
    assert batch_status(paths, "b1") is None
    assert not paths.store.exists("tables/samples")


def test_a_table_of_another_schema_is_refused(paths):
    DeltaTable.create(paths.table_uri("parity"), pa.schema([("batch_id", pa.string())]))
    plan = plan_batch()
    with pytest.raises(BadLake, match="tables/parity is of another schema: column batch_id is"):
        publish(paths, plan, stage_all(paths, plan))
