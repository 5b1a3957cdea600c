"""A lake of an earlier version of the package gets the columns that were added since; old rows stay readable."""

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import StructType
from lake_batch import ENGINE, NOW, ROW, parity_rows, plan_batch, publish, sample_rows, stage_all

from rollout.columns import ENGINE as ENGINE_TYPE
from rollout.errors import BadLake
from rollout.lake import LakePaths, scan_batches, scan_samples
from rollout.lake.publishing import publish_batch
from rollout.lake.reading import newest_batch_row
from rollout.lake.schema import DELTA_SCHEMAS, conform, rows_to_table
from rollout.lake.tables import create_tables

ADDED = "flags"
"""The field of the engine column that earlier lakes lack."""


@pytest.fixture
def paths(tmp_path):
    return LakePaths(tmp_path / "lake")


def without_added(table: pa.Table) -> pa.Table:
    kept = pa.struct([field for field in ENGINE_TYPE if field.name != ADDED])
    rows = [{name: value for name, value in row.items() if name != ADDED} for row in table["engine"].to_pylist()]
    return table.set_column(table.schema.get_field_index("engine"), pa.field("engine", kept), pa.array(rows, kept))


def old_lake(paths) -> pa.Table:
    """The samples table as it was, with the rows of one batch."""
    plan = plan_batch("old")
    rows = without_added(conform(sample_rows(plan, 0), "samples"))
    write_deltalake(paths.table_uri("samples"), rows)
    return rows


def test_old_and_new_rows_are_read_together(paths):
    old = old_lake(paths)
    plan = plan_batch("new")
    publish(paths, plan, stage_all(paths, plan))
    rows = scan_samples(paths).collect()
    by_batch = {batch: {tuple(one["engine"]) for one in rows.to_dicts() if one["batch_id"] == batch} for batch in BOTH}
    assert {tuple(ENGINE_TYPE.field(k).name for k in range(ENGINE_TYPE.num_fields))} == set.union(*by_batch.values())
    assert old.num_rows == scan_samples(paths, "old").collect().height
    assert {"old": None, "new": None} == {row["batch_id"]: row["engine"][ADDED] for row in rows.to_dicts()}
    assert {ENGINE["flags_hash"]} == {row["engine"]["flags_hash"] for row in rows.to_dicts()}
    found = DeltaTable(paths.table_uri("samples")).to_pyarrow_dataset()  # noqa: F841  (DuckDB finds it by name)
    assert sorted(BOTH) == sorted(row[0] for row in duckdb.sql("select distinct batch_id from found").fetchall())


BOTH = ("old", "new")


def test_a_batches_table_without_costs_gets_them_and_keeps_its_rows(paths):
    old = rows_to_table(
        [{"batch_id": "old", "status": "published", "config_hash": "h", "created_at": NOW, "schema_version": 1}],
        "batches",
    )
    write_deltalake(paths.table_uri("batches"), old.drop([*ADDED_COSTS]))
    assert "seconds_held" not in newest_batch_row(paths, "old")
    plan = plan_batch("new")
    publish_batch(paths, plan, stage_all(paths, plan), parity_rows(plan), {**ROW, "seconds_held": 1.5})
    rows = scan_batches(paths).select("batch_id", *ADDED_COSTS).collect().rows()
    assert [("old", None, None, None, None), ("new", 1.5, None, None, None)] == rows


ADDED_COSTS = ("seconds_held", "tokens_per_gpu_second", "cached_share", "cost_per_trained_token")


def test_a_struct_that_lost_a_field_or_has_it_with_another_type_is_refused(paths):
    fields = [field for field in DELTA_SCHEMAS["samples"].fields if field.name != "engine"]
    changed = Field("engine", StructType([Field("name", "long")]))
    DeltaTable.create(paths.table_uri("samples"), Schema([*fields, changed]))
    with pytest.raises(BadLake, match="samples is of another schema: column engine"):
        create_tables(paths)
    assert ["CREATE TABLE"] == [c["operation"] for c in DeltaTable(paths.table_uri("samples")).history()]
